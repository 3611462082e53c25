"""A YAML file and flags become a Config, and a Config becomes YAML again.

Flags win over the file, the file over a preset, a preset over the schema's defaults. Every mistake in names and values
is collected into one ConfigError. Rules between keys are not checked here: `problems.py` has them.
"""

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
from pydantic import ValidationError

from fourfold.config.flags import SHARDING_SWITCH, Override
from fourfold.config.keys import LEAVES, SECTIONS, Leaf, hint
from fourfold.config.presets import PRESETS, find_preset
from fourfold.config.schema import Config
from fourfold.config.words import any_of, shown
from fourfold.config.yaml_text import dump_yaml, parse_scalar, parse_yaml
from fourfold.errors import ConfigError

CONFIG_FILE = "config.yaml"

# What must be equal for a checkpoint's tensors to mean the same in another run.
SHAPE_KEYS = (
    "hidden_size",
    "num_layers",
    "num_attention_heads",
    "ffn_hidden_size",
    "vocab_size",
    "max_position_embeddings",
    "tie_word_embeddings",
)

Given = dict[str, object]
"""What the user wrote, by leaf key; leaf keys are unique, so sections are not needed to tell them apart."""


def load_config(path: str | Path | None, overrides: Sequence[Override] = ()) -> Config:
    """The config of a run from its file (or none) and its flags."""
    problems: list[str] = []
    given: Given = {}
    if path is not None:
        given |= _read_file(Path(path), problems)
    given |= _read_overrides(overrides, problems)
    switch = given.pop(SHARDING_SWITCH, True)
    given = _with_preset(given, problems)
    config = _build(given, problems)
    problems += _sharding_switch_problems(switch, config)
    if problems or config is None:
        raise ConfigError(problems)
    return config


def load_config_text(text: str, source: str) -> Config:
    """The config that a run has left behind, as text; `source` is where it lay."""
    problems: list[str] = []
    config = _build(_read_document(text, source, problems), problems)
    if problems or config is None:
        raise ConfigError(problems)
    return config


def dump_config(config: Config) -> str:
    """The whole config as YAML, defaults included, in the order of the schema; it loads back equal."""
    return dump_yaml(config.model_dump(mode="json", by_alias=True))


def _read_file(path: Path, problems: list[str]) -> Given:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        problems.append(f"the config file {path} does not exist; check the path")
        return {}
    except OSError as error:
        problems.append(f"the config file {path} cannot be read ({error.strerror}); give a readable YAML file")
        return {}
    except UnicodeDecodeError:
        problems.append(f"the config file {path} is not UTF-8 text; give a YAML file")
        return {}
    return _read_document(text, str(path), problems)


def _read_document(text: str, path: str, problems: list[str]) -> Given:
    document, syntax_problems = parse_yaml(text, path)
    problems += syntax_problems
    given: Given = {}
    if isinstance(document, dict):
        _read_section(document, (), given, problems)
    elif document is not None:
        problems.append(f"the config file {path} holds no sections; write keys under sections such as `model:`")
    elif not syntax_problems:
        problems.append(f"the config file {path} is empty; write at least one section, such as `model:`")
    return given


def _read_section(section: dict[object, object], path: tuple[str, ...], given: Given, problems: list[str]) -> None:
    """Adds the keys of a section, and of the sections in it, to `given`."""
    seen: set[str] = set()
    for written, value in section.items():
        key = str(written)
        inner = (*path, key.lower())
        if inner in SECTIONS:
            if key.lower() in seen:
                problems.append(f"the section {key.lower()} is written twice; put its keys under one heading")
            seen.add(key.lower())
            # A heading with nothing under it is an empty section.
            if isinstance(value, dict):
                _read_section(value, inner, given, problems)
            elif value is not None:
                problems.append(
                    f"{'.'.join(inner)} = {shown(value)} is not a section; write its keys indented under it"
                )
        elif (key in LEAVES and LEAVES[key].path == path) or (key == SHARDING_SWITCH and path[:1] == ("distributed",)):
            given[key] = value
        else:
            problems.append(_unknown_in_file(key, path, value))


def _unknown_in_file(key: str, path: tuple[str, ...], value: object) -> str:
    where = ".".join((*path, key))
    named = where if isinstance(value, dict) else f"{where} = {shown(value)}"
    if key in LEAVES:
        return f"{named} is in the wrong section; move {key} to the section {LEAVES[key].section}"
    for section in SECTIONS:
        if key.lower() == section[-1]:
            return f"{where} is in the wrong place; write this section as {'.'.join(section)}"
    remedy = hint(key)
    if path:
        keys = ", ".join(leaf.key for leaf in LEAVES.values() if leaf.path == path)
        return f"{named} is not a key; {remedy or f'the keys of {path[-1]} are {keys}'}"
    names = [section[-1] for section in SECTIONS]
    close = difflib.get_close_matches(key.lower(), names, n=1)
    sections = ", ".join(section[0] for section in SECTIONS if len(section) == 1)
    return f"{named} is not a section; {f'did you mean {close[0]}?' if close else remedy or f'sections are {sections}'}"


def _read_overrides(overrides: Sequence[Override], problems: list[str]) -> Given:
    given: Given = {}
    for name, value in overrides:
        path, _, key = name.replace("-", "_").rpartition(".")
        written = name if path else f"--{name}"
        leaf = LEAVES.get(key)
        if key == SHARDING_SWITCH:
            given[key] = parse_scalar(value) if isinstance(value, str) else value
        elif leaf is None:
            problems.append(f"{written} is not a key; {hint(key, flag=not path) or '--help lists the keys'}")
        elif path and path.lower() != leaf.section:
            problems.append(f"{name} is in the wrong section; write {leaf.name} or --{key}")
        elif value == "" or (value is True and not leaf.is_boolean):
            problems.append(f"{written} is not followed by a value; it takes {leaf.choices}")
        elif isinstance(value, str) and "object" in leaf.types and value.startswith("{"):
            given[key], found = parse_yaml(value, written)
            problems += found
        else:
            given[key] = _typed(leaf, value)
    return given


def _typed(leaf: Leaf, value: str | bool) -> object:
    """A flag's text as YAML would read it, except that a key for text keeps it: `--output_dir 2024`."""
    if isinstance(value, bool) or (leaf.is_text and value != "null"):
        return value
    return parse_scalar(value)


def _with_preset(given: Given, problems: list[str]) -> Given:
    """The model keys of the named preset or checkpoint, under what was given beside it."""
    name = given.get("model_name_or_path")
    if not isinstance(name, str):
        return given
    preset = find_preset(name)
    if preset is not None:
        return {**preset, **given}
    if given.keys() >= set(SHAPE_KEYS):  # a config that a run has left behind: it needs nobody to tell it the shape
        return given
    try:
        content = _read_beside(name)
    except (OSError, ValueError, ImportError):  # not there, not a kind of address that fsspec knows
        presets = any_of(PRESETS)
        problems.append(
            f"model.model_name_or_path = {shown(name)} is neither a preset nor a checkpoint; it can be {presets}, a "
            "checkpoint such as output/checkpoints/step_00000100, or the output_dir of a run"
        )
        return given
    saved = load_config_text(content, f"{name}/{CONFIG_FILE}").model.model_dump()
    for key in SHAPE_KEYS:
        if given.get(key, "auto") not in ("auto", saved[key]):
            problems.append(
                f"model.{key} = {shown(given[key])} differs from {saved[key]} in the checkpoint that "
                f"model.model_name_or_path = {name} names; leave {key} out"
            )
    return {**given, **{key: saved[key] for key in SHAPE_KEYS}}


def _read_beside(folder: str) -> str:
    """The config that lies in a checkpoint or in a run's output folder, here or at an fsspec address."""
    with fsspec.open(f"{folder}/{CONFIG_FILE}", "rb") as stream:
        return str(stream.read().decode("utf-8"))


def _build(given: Given, problems: list[str]) -> Config | None:
    nested: dict[str, Any] = {}
    # pydantic would read true as 1.
    wrong = [key for key, value in given.items() if isinstance(value, bool) and LEAVES[key].is_number]
    for key, value in given.items():
        section = nested
        for name in LEAVES[key].path:
            section = section.setdefault(name, {})
        section[key] = value
    config = None
    try:
        config = Config.model_validate(nested)
    except ValidationError as error:
        # A key with several legal types has one error for each of them; the user gets one sentence.
        wrong += [next(str(part) for part in each["loc"] if part in LEAVES) for each in error.errors()]
    problems += [_value_problem(LEAVES[key], given[key]) for key in dict.fromkeys(wrong)]
    return config


def _value_problem(leaf: Leaf, value: object) -> str:
    close = difflib.get_close_matches(str(value).lower(), [word.lower() for word in leaf.words], n=1)
    if close:
        meant = next(word for word in leaf.words if word.lower() == close[0])
        remedy = f"did you mean {meant}?"
    elif leaf.is_text and not isinstance(value, dict | list):
        remedy = "put it in quotes"
    else:
        remedy = f"the default is {leaf.default_text}"
    return f"{leaf.name} = {shown(value)} is not {leaf.choices}; {remedy}"


def _sharding_switch_problems(switch: object, config: Config | None) -> list[str]:
    """`use_sharding` of the seed documents: the degree alone decides here, so it may only agree with it."""
    where = f"distributed.{SHARDING_SWITCH} = {shown(switch)}"
    if not isinstance(switch, bool):
        return [f"{where} is not true or false; leave it out, sharding_degree decides"]
    degree = config.distributed.sharding.sharding_degree if config else "auto"
    if not switch and degree != "auto" and degree > 1:
        return [
            f"{where} contradicts distributed.sharding.sharding_degree = {degree}; set the degree to 1 or drop the flag"
        ]
    return []
