"""The command line of a run: an optional config file and one flag per key. It reads arguments, never files.

Whether a key exists and its value is legal is not decided here but in `load.py`, together with the file, so that a
user sees every problem at once.
"""

import re

from fourfold.config.keys import LEAVES
from fourfold.errors import ConfigError

Override = tuple[str, str | bool]
"""A key (`max_lr`, or `optimizer.max_lr`) and its value as typed; True when the flag came without a value."""

_BOOLEAN_WORDS = {"true", "false", "yes", "no", "on", "off", "1", "0", "auto"}
_NEGATIVE_NUMBER = re.compile(r"^-\.?[0-9]")
# A flag of the seed documents that is no key of ours; `load.py` says what becomes of it.
SHARDING_SWITCH = "use_sharding"


def parse_flags(args: list[str]) -> tuple[str | None, list[Override]]:
    """`[CONFIG] [-c CONFIG] [-o section.key=value] [--key value] [--key=value] [--boolean]`, in any order.

    Where a key is given twice, the last one wins.
    """
    configs: list[str] = []
    overrides: list[Override] = []
    problems: list[str] = []
    rest = list(args)
    while rest:
        arg = rest.pop(0)
        name, has_value, value = arg.partition("=")
        if name in ("-c", "--config", "-o"):
            operand = value if has_value else _take_value(rest)
            if operand is None:
                problems.append(f"{name} is not followed by a value; write {_USAGE[name]}")
            elif name == "-o":
                _add_assignment(operand, overrides, problems)
            else:
                configs.append(operand)
        elif name.startswith("--") and len(name) > 2:
            key = name[2:].replace("-", "_")
            overrides.append((key, value if has_value else _value_of(key, rest)))
        elif arg.startswith("-"):
            problems.append(f"{arg} is not a flag; flags are -c CONFIG, -o section.key=value and --key value")
        else:
            configs.append(arg)
    if len(configs) > 1:
        problems.append(
            f"the config files {' and '.join(configs)} were both given; a run takes one, and flags as --key value"
        )
    if problems:
        raise ConfigError(problems)
    return (configs[0] if configs else None), overrides


_USAGE = {"-c": "-c CONFIG", "--config": "--config CONFIG", "-o": "-o section.key=value"}


def _take_value(rest: list[str]) -> str | None:
    """The next argument, if it is a value: not a flag, though a negative number is one."""
    if rest and (not rest[0].startswith("-") or _NEGATIVE_NUMBER.match(rest[0])):
        return rest.pop(0)
    return None


def _value_of(key: str, rest: list[str]) -> str | bool:
    leaf = LEAVES.get(key.rpartition(".")[2])
    is_boolean = key == SHARDING_SWITCH or (leaf is not None and leaf.is_boolean)
    # `--use_recompute my.yaml` is a bare flag and a config file, so a boolean takes only a boolean word.
    if is_boolean and not (rest and rest[0].lower() in _BOOLEAN_WORDS):
        return True
    value = _take_value(rest)
    return True if value is None else value


def _add_assignment(operand: str, overrides: list[Override], problems: list[str]) -> None:
    key, equals, value = operand.partition("=")
    if equals:
        overrides.append((key, value))
    else:
        problems.append(f"-o {operand} has no value; write -o section.key=value")
