from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.config.schema import Schedule
from fourfold.layout.stages import STAGE_ORDER, PipeStage, pipe_stages, stage_indices, stages_per_rank, whole_model

CUTS = st.integers(1, 100).flatmap(lambda layers: st.tuples(st.just(layers), st.integers(1, layers)))


def work(stage: PipeStage) -> int:
    return len(stage.layers) + stage.has_embedding + stage.has_head


@given(CUTS)
def test_stages_cover_every_layer_once_and_in_order(cut: tuple[int, int]) -> None:
    layers, num_stages = cut
    stages = pipe_stages(layers, num_stages)
    assert [layer for stage in stages for layer in stage.layers] == list(range(layers))
    assert [stage.index for stage in stages] == list(range(num_stages))
    assert all(len(stage.layers) >= 1 for stage in stages)
    assert [stage.has_embedding for stage in stages] == [True] + [False] * (num_stages - 1)
    assert [stage.has_head for stage in stages] == [False] * (num_stages - 1) + [True]


@given(CUTS)
def test_work_is_as_even_as_whole_layers_allow(cut: tuple[int, int]) -> None:
    """No layer could move to a lighter stage: only a stage of a single layer may weigh more than one above another."""
    stages = pipe_stages(*cut)
    lightest = min(work(stage) for stage in stages)
    assert all(work(stage) <= lightest + 1 or len(stage.layers) == 1 for stage in stages)


@pytest.mark.parametrize(
    ("layers", "num_stages", "sizes"),
    [(24, 1, [24]), (4, 2, [2, 2]), (14, 4, [3, 4, 4, 3]), (6, 4, [1, 2, 2, 1]), (4, 4, [1, 1, 1, 1])],
)
def test_embedding_and_head_count_as_a_layer_each(layers: int, num_stages: int, sizes: list[int]) -> None:
    assert [len(stage.layers) for stage in pipe_stages(layers, num_stages)] == sizes


def test_one_stage_is_the_whole_model() -> None:
    assert pipe_stages(7, 1) == [whole_model(7)]


@pytest.mark.parametrize("schedule", get_args(Schedule))
@pytest.mark.parametrize("pp_degree", [2, 3, 8])
@pytest.mark.parametrize("virtual_pp_degree", [1, 2, 4])
def test_pipe_ranks_hold_every_stage_once(schedule: str, pp_degree: int, virtual_pp_degree: int) -> None:
    held = [stage_indices(rank, pp_degree, schedule, virtual_pp_degree) for rank in range(pp_degree)]
    per_rank = stages_per_rank(schedule, virtual_pp_degree)
    assert all(indices == sorted(indices) and len(indices) == per_rank for indices in held)
    assert sorted(index for indices in held for index in indices) == list(range(pp_degree * per_rank))


def test_a_v_puts_embedding_and_head_on_the_first_rank_and_a_loop_does_not() -> None:
    assert stage_indices(0, 4, "ZBV", 1) == [0, 7]
    assert stage_indices(3, 4, "DualPipeV", 1) == [3, 4]
    assert stage_indices(0, 4, "Interleaved1F1B", 2) == [0, 4]
    assert stage_indices(3, 4, "Interleaved1F1B", 2) == [3, 7]


def test_every_schedule_of_the_config_has_its_order_of_stages() -> None:
    assert set(STAGE_ORDER) == set(get_args(Schedule))
