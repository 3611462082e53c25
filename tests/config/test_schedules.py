from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import schedules

from fourfold.config.schedules import INTERLEAVED, SPLITS_BACKWARD, is_count_legal
from fourfold.config.schema import Schedule
from fourfold.layout.stages import stage_indices, stages_per_rank

TORCH_SCHEDULES: dict[str, Any] = {
    "GPipe": schedules.ScheduleGPipe,
    "1F1B": schedules.Schedule1F1B,
    "Interleaved1F1B": schedules.ScheduleInterleaved1F1B,
    "InterleavedZeroBubble": schedules.ScheduleInterleavedZeroBubble,
    "ZBV": schedules.ScheduleZBVZeroBubble,
    "DualPipeV": schedules.ScheduleDualPipeV,
}


def build_schedule(name: str, pp_degree: int, virtual_pp_degree: int, micro_batches: int, module: nn.Module) -> None:
    """torch's schedule over stages that hold only what its constructor asks for; it plans every action."""
    last = pp_degree * stages_per_rank(name, virtual_pp_degree) - 1
    stages = [
        SimpleNamespace(
            group_size=pp_degree,
            group_rank=0,
            num_stages=last + 1,
            stage_index=index,
            submod=module,
            is_first=index == 0,
            is_last=index == last,
            has_backward=True,
        )
        for index in stage_indices(0, pp_degree, name, virtual_pp_degree)
    ]
    takes_one = issubclass(TORCH_SCHEDULES[name], schedules.PipelineScheduleSingle)
    TORCH_SCHEDULES[name](stages[0] if takes_one else stages, micro_batches)


@pytest.mark.parametrize("name", get_args(Schedule))
def test_a_number_of_micro_batches_is_legal_exactly_where_torch_takes_it(name: Schedule) -> None:
    for pp_degree in (2, 3, 4):
        for virtual_pp_degree in (1, 2, 3) if name in INTERLEAVED else (1,):
            for micro_batches in range(1, 13):
                try:
                    build_schedule(name, pp_degree, virtual_pp_degree, micro_batches, nn.Identity())
                    taken = True
                except ValueError:
                    taken = False
                assert taken == is_count_legal(name, pp_degree, micro_batches), (
                    pp_degree,
                    virtual_pp_degree,
                    micro_batches,
                )


@pytest.mark.parametrize("name", get_args(Schedule))
def test_a_schedule_refuses_a_compiled_model_exactly_where_it_splits_the_backward_pass(name: Schedule) -> None:
    compiled: Any = torch.compile(nn.Identity(), backend="eager")
    try:
        build_schedule(name, 2, 2 if name in INTERLEAVED else 1, 4, compiled)
        refused = False
    except RuntimeError:
        refused = True
    assert refused == (name in SPLITS_BACKWARD)
