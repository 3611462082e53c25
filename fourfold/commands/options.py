"""What commands share: the console, and reading flags, among them every key of the schema."""

import sys
from typing import Any

import typer
from rich.console import Console

from fourfold.config.flags import parse_flags
from fourfold.config.load import load_config
from fourfold.config.problems import problems
from fourfold.config.resolve import processes_needed, resolve
from fourfold.config.schema import Config
from fourfold.errors import ConfigError
from fourfold.mesh.process import has_gpu, world_size_from_environment

# a pipe has no width of its own, and 80 columns would cut tables
screen = Console(highlight=False, width=None if sys.stdout.isatty() else 140)

# A command whose flags are the keys of the schema reads its arguments itself.
FREE_FORM = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def take_options(arguments: list[str], defaults: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Split off a command's own options (a bool default: no value follows) from the keys of the schema."""
    rest, own = [], dict(defaults)
    waiting = iter(arguments)
    for argument in waiting:
        name, equals, value = argument.partition("=")
        if name.replace("-", "_").replace("__", "--", 1) in own:
            name = name.replace("-", "_").replace("__", "--", 1)
        if name not in own:
            rest.append(argument)
        elif isinstance(own[name], bool):
            own[name] = True
        else:
            text = value if equals else next(waiting, None)
            if text is None:
                raise ConfigError(f"{name} is not followed by a value; the default is {own[name]}")
            own[name] = read_option(name, text, type(own[name]))
    return rest, own


def read_option(name: str, text: str, kind: type) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(f"{name} = {text} is not a whole number") from None


def prepare_config(
    arguments: list[str], world_size: int | None = None, leaves_micro_batch: bool = False
) -> tuple[Config, int]:
    """The resolved config and its number of processes, or every problem at once."""
    path, overrides = parse_flags(arguments)
    config = load_config(path, overrides)
    world_size = world_size or world_size_from_environment() or processes_needed(config)
    found = problems(config, world_size)
    if found:
        raise ConfigError(found)
    return resolve(config, world_size, has_gpu(), leaves_micro_batch), world_size


def option(name: str, text: str, **limits: float) -> typer.models.OptionInfo:
    """An option spelled like the config's keys, with dashes accepted too."""
    spellings = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
    return typer.Option(*spellings, help=text, **limits)  # type: ignore[arg-type]
