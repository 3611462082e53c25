"""YAML without its traps, and back. Text in, plain values out; it knows nothing of the schema.

PyYAML follows YAML 1.1, where `1e-4` is text, `010` is eight, `1:30` is ninety and `no` is false, and where a key
written twice silently wins. Here scalars follow YAML 1.2 and a key written twice is reported.
"""

import re
from collections.abc import Hashable

import yaml

# Tag, pattern and first characters of each kind of plain scalar that is not text.
_SCALARS = (
    ("tag:yaml.org,2002:null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    ("tag:yaml.org,2002:int", re.compile(r"^[-+]?[0-9][0-9_]*$"), list("-+0123456789")),
    (
        "tag:yaml.org,2002:float",
        re.compile(
            r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
        ),
        list("-+.0123456789"),
    ),
)


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2 scalars, which notes every key that is written twice."""

    yaml_implicit_resolvers = {}  # noqa: RUF012  (PyYAML's own class attribute; emptied, then filled below)

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.repeated: list[yaml.ScalarNode] = []

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode):
                if key_node.value in seen:
                    self.repeated.append(key_node)
                seen.add(key_node.value)
        return super().construct_mapping(node, deep=deep)


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes whatever text `_Loader` or a YAML 1.1 reader would take for something else."""


def _decimal(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    return int(node.value.replace("_", ""))


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # Left to itself, PyYAML writes some exotic line breaks where its own reader does not take them for text.
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')


for _tag, _pattern, _first in _SCALARS:
    _Loader.add_implicit_resolver(_tag, _pattern, _first)
    _Dumper.add_implicit_resolver(_tag, _pattern, _first)
_Loader.add_constructor("tag:yaml.org,2002:int", _decimal)
_Dumper.add_representer(str, _text)


def parse_yaml(text: str, source: str) -> tuple[object, list[str]]:
    """The value of a YAML document and what is wrong with it; `source` is the name by which problems speak of it."""
    try:
        loader = _Loader(text)
        value: object = loader.get_single_data()
    except yaml.MarkedYAMLError as error:
        place = _place(error.problem_mark or error.context_mark)
        return None, [f"{source}{place}: this is not valid YAML: {error.problem or error.context}; mend this line"]
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        return None, [f"{source}: this is not valid YAML: {str(error).splitlines()[0]}"]
    return value, [
        f"{source}{_place(key.start_mark)}: the key {key.value} is written twice; keep one of them"
        for key in loader.repeated
    ]


def _place(mark: yaml.Mark | None) -> str:
    return f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""


def parse_scalar(text: str) -> object:
    """The value of one plain scalar, such as a flag's: `1e-4` is a number, `true` a boolean, `[1` text."""
    tag = next((tag for tag, pattern, _ in _SCALARS if pattern.match(text)), "tag:yaml.org,2002:str")
    value: object = _Loader("").construct_object(yaml.ScalarNode(tag, text))
    return value


def dump_yaml(value: object) -> str:
    """YAML that `parse_yaml` reads back as the same value, keys in the order given."""
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    return text
