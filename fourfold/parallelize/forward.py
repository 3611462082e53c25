"""Another way to compute for modules that stay what they are: same names, same parameters, same place."""

from collections.abc import Callable
from functools import cache
from typing import Any

from torch import nn

Forward = Callable[..., Any]


def replace_forward(module: nn.Module, forward: Forward) -> None:
    """By a class that such modules share, not an attribute of each: with those every block is other code to the
    compiler, which compiles it anew, and after eight blocks not at all."""
    module.__class__ = _kind_with(type(module), forward)  # type: ignore[arg-type]  # to mypy, classes have no hash


@cache
def _kind_with(kind: type[nn.Module], forward: Forward) -> type[nn.Module]:
    return type(kind.__name__, (kind,), {"forward": forward})
