"""The table of leaf keys, read off the schema: section, legal values in words, default, meaning.

Flags, hints about unknown names and the help text all come from this table, so a key added to the schema needs no
second mention. What PaddlePaddle calls our keys is here too.
"""

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from fourfold.config.schema import Config, Section
from fourfold.config.words import any_of, shown


@dataclass(frozen=True)
class Leaf:
    """One key of the schema."""

    path: tuple[str, ...]
    """The sections it lies in, as written in YAML: `("distributed", "sharding")`."""
    key: str
    choices: str
    """The legal values, in words."""
    types: frozenset[str]
    """JSON schema's names of its types: integer, number, boolean, string, array, null; `const` for a fixed word."""
    words: tuple[str, ...]
    """The fixed words among its values."""
    default: object
    doc: str

    @property
    def section(self) -> str:
        return ".".join(self.path)

    @property
    def name(self) -> str:
        return f"{self.section}.{self.key}"

    @property
    def default_text(self) -> str:
        """The default as one would write it."""
        if isinstance(self.default, tuple):
            return ",".join(str(part) for part in self.default)
        return self.default if isinstance(self.default, str) else shown(self.default)

    @property
    def is_boolean(self) -> bool:
        return "boolean" in self.types

    @property
    def is_text(self) -> bool:
        return "string" in self.types

    @property
    def is_number(self) -> bool:
        return bool({"integer", "number"} & self.types) and not self.is_boolean


def _alternatives(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """A key's schema with `x | y` and enumerations taken apart, one entry per alternative."""
    if "anyOf" in schema:
        return [part for each in schema["anyOf"] for part in _alternatives(each)]
    if "enum" in schema:
        return [{"const": value} for value in schema["enum"]]
    return [schema]


def _type_of(alternative: dict[str, Any]) -> str:
    if "const" in alternative:
        return "const"
    return "words" if "enum" in alternative.get("items", {}) else str(alternative["type"])


_BOUNDS = {
    "minimum": "of at least",
    "exclusiveMinimum": "greater than",
    "maximum": "at most",
    "exclusiveMaximum": "below",
}


def _range_words(schema: dict[str, Any]) -> str:
    # Through Decimal, for 2**63 to come out as digits and 1.0 as 1.
    clauses = [f"{words} {Decimal(schema[bound]):f}" for bound, words in _BOUNDS.items() if bound in schema]
    return f" {' and '.join(clauses)}" if clauses else ""


def _choice_words(alternatives: list[dict[str, Any]]) -> str:
    """`a whole number of at least 1, or auto`."""
    open_ended = {
        "integer": "a whole number",
        "number": "a number",
        "string": "text",
        "array": "three numbers such as 949,50,1",
        "words": "words such as first,head, or none",
        "object": "paths and weights such as {a: 0.7, b: 0.3}",
    }
    kinds = [open_ended[_type_of(each)] + _range_words(each) for each in alternatives if _type_of(each) in open_ended]
    fixed = [str(each["const"]) for each in alternatives if "const" in each]
    if any(_type_of(each) == "boolean" for each in alternatives):
        fixed = ["true", "false", *fixed]
    if any(_type_of(each) == "null" for each in alternatives):
        fixed.append("null")
    if kinds:
        return ", or ".join(kinds + fixed)
    return any_of(fixed) if len(fixed) <= 2 else f"one of {any_of(fixed)}"


def _leaves(section: type[Section], path: tuple[str, ...] = ()) -> Iterator[Leaf]:
    properties = section.model_json_schema()["properties"]
    for field_name, field in section.model_fields.items():
        key = field.alias or field_name
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from _leaves(field.annotation, (*path, key))
            continue
        alternatives = _alternatives(properties[key])
        yield Leaf(
            path=path,
            key=key,
            choices=_choice_words(alternatives),
            types=frozenset(_type_of(each) for each in alternatives),
            words=tuple(str(each["const"]) for each in alternatives if "const" in each),
            default=field.default,
            doc=field.description or "",
        )


LEAVES: dict[str, Leaf] = {leaf.key: leaf for leaf in _leaves(Config)}
assert len(LEAVES) == len(list(_leaves(Config))), "leaf keys must be unique: every one is also a flag"

SECTIONS: tuple[tuple[str, ...], ...] = tuple(dict.fromkeys(leaf.path for leaf in LEAVES.values()))

# What PaddleNLP and PaddleFleetX call the same thing.
RENAMED = {
    "to_static": "compile",
    "save_total_limit": "keep_last",
    "logging_steps": "logging_freq",
    "log_freq": "logging_freq",
    "eval_steps": "eval_freq",
    "save_dir": "output_dir",
    "ckpt_dir": "resume",
    "resume_from_checkpoint": "resume",
    "run_mode": "compile",
    "use_pure_fp16": "use_amp",
    "num_epochs": "num_train_epochs",
    "num_hidden_layers": "num_layers",
    "intermediate_size": "ffn_hidden_size",
    "max_seq_length": "max_seq_len",
    "learning_rate": "max_lr",
    "beta1": "adam_beta1",
    "beta2": "adam_beta2",
    "epsilon": "adam_epsilon",
    "max_grad_norm": "grad_clip",
    "data_parallel_degree": "dp_degree",
    "tensor_parallel_degree": "mp_degree",
    "pipeline_parallel_degree": "pp_degree",
    "sharding_parallel_degree": "sharding_degree",
}
RETIRED = {
    "amp_level": "write use_amp: true (O1) or false (O0); weights always stay in float32",
    "warmup_steps": "write warmup_rate, a fraction of decay_steps",
    "warmup_ratio": "write warmup_rate, a fraction of decay_steps",
    "accumulate_steps": "it follows from global_batch_size and micro_batch_size",
    "gradient_accumulation_steps": "it follows from global_batch_size and micro_batch_size",
    "local_batch_size": "it follows from global_batch_size and the degrees",
    "log_dir": "logs go to output_dir/logs",
}


def describe_keys() -> list[Leaf]:
    """Every key in the order of the schema, for the help text."""
    return list(LEAVES.values())


def hint(name: str, flag: bool = False) -> str | None:
    """What a user who wrote an unknown key probably meant, or None."""
    plain = name.lower().replace("-", "_")
    if plain in RETIRED:
        return RETIRED[plain]
    if plain in RENAMED:
        return f"it is called {_spelled(RENAMED[plain], flag)} here"
    close = difflib.get_close_matches(plain, LEAVES, n=1)
    return f"did you mean {_spelled(close[0], flag)}?" if close else None


def _spelled(key: str, flag: bool) -> str:
    return f"--{key}" if flag else LEAVES[key].name
