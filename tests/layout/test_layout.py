import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.layout.layout import AXES, Coordinate, Layout

DEGREE = st.integers(1, 9)
LAYOUTS = st.builds(Layout, pp=DEGREE, dp=DEGREE, sharding=DEGREE, mp=DEGREE)


@given(LAYOUTS)
def test_ranks_and_coordinates_are_one_to_one(layout: Layout) -> None:
    places = [layout.coordinate(rank) for rank in range(layout.world_size)]
    assert len(set(places)) == layout.world_size
    assert [layout.rank(at) for at in places] == list(range(layout.world_size))


@given(LAYOUTS)
def test_ranks_count_along_mp_first_and_along_pp_last(layout: Layout) -> None:
    ranges = [range(degree) for degree in (layout.pp, layout.dp, layout.sharding, layout.mp)]
    in_order = [Coordinate(*places) for places in itertools.product(*ranges)]
    assert [layout.coordinate(rank) for rank in range(layout.world_size)] == in_order
    assert AXES == ("pp", "dp", "sharding", "mp")


@given(LAYOUTS)
def test_ranks_share_a_data_rank_exactly_when_only_pp_and_mp_tell_them_apart(layout: Layout) -> None:
    groups: dict[tuple[int, int], set[int]] = {}
    for rank in range(layout.world_size):
        at = layout.coordinate(rank)
        groups.setdefault((at.dp, at.sharding), set()).add(layout.data_rank(rank))
    assert all(len(found) == 1 for found in groups.values())
    assert sorted(found.pop() for found in groups.values()) == list(range(layout.data_ranks))


def test_a_known_rank_lies_where_it_should() -> None:
    layout = Layout(pp=2, dp=3, sharding=4, mp=5)
    assert layout.world_size == 120
    assert layout.coordinate(119) == Coordinate(pp=1, dp=2, sharding=3, mp=4)
    assert layout.coordinate(60 + 20 + 5 + 1) == Coordinate(pp=1, dp=1, sharding=1, mp=1)
    assert layout.data_rank(60 + 20 + 5 + 1) == 1 * 4 + 1
    assert str(layout) == "pp2 x dp3 x sharding4 x mp5"


def test_a_single_process_is_the_layout_of_ones() -> None:
    assert Layout().world_size == Layout().data_ranks == 1
    assert Layout().coordinate(0) == Coordinate(0, 0, 0, 0)


@pytest.mark.parametrize("rank", [-1, 8])
def test_a_rank_outside_the_world_has_no_coordinate(rank: int) -> None:
    with pytest.raises(AssertionError):
        Layout(dp=2, mp=4).coordinate(rank)
