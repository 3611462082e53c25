"""Four degrees and the arithmetic of ranks. Integers only.

Ranks are numbered with `pp` outermost and `mp` innermost, so that the ranks of one mp group, which talk most, are
neighbours on a machine.
"""

from dataclasses import dataclass
from math import prod

AXES = ("pp", "dp", "sharding", "mp")


@dataclass(frozen=True)
class Coordinate:
    """A rank's place on each axis."""

    pp: int
    dp: int
    sharding: int
    mp: int


@dataclass(frozen=True)
class Layout:
    """The degree of each axis. A single process is `Layout()`."""

    pp: int = 1
    dp: int = 1
    sharding: int = 1
    mp: int = 1

    @property
    def degrees(self) -> tuple[int, int, int, int]:
        return (self.pp, self.dp, self.sharding, self.mp)

    @property
    def world_size(self) -> int:
        return prod(self.degrees)

    @property
    def data_ranks(self) -> int:
        """How many ways the global batch is divided."""
        return self.dp * self.sharding

    def coordinate(self, rank: int) -> Coordinate:
        assert 0 <= rank < self.world_size
        places = []
        for degree in reversed(self.degrees):
            rank, place = divmod(rank, degree)
            places.append(place)
        return Coordinate(*reversed(places))

    def rank(self, at: Coordinate) -> int:
        rank = 0
        for degree, place in zip(self.degrees, (at.pp, at.dp, at.sharding, at.mp), strict=True):
            assert 0 <= place < degree
            rank = rank * degree + place
        return rank

    def data_rank(self, rank: int) -> int:
        """Who reads which rows of the global batch: equal for all ranks that must see the same rows."""
        at = self.coordinate(rank)
        return at.dp * self.sharding + at.sharding

    def __str__(self) -> str:
        return f"pp{self.pp} x dp{self.dp} x sharding{self.sharding} x mp{self.mp}"
