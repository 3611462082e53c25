"""Which part of the model each pipe stage holds, and which stages each pipe rank holds.

The embedding and the head count as one layer of work each, so the first and the last stage get fewer layers when the
numbers do not come out even.
"""

from dataclasses import dataclass
from typing import Literal

# Loop: rank r holds stages r, r + pp, r + 2 pp, ... V: rank r holds r and its mirror image from the end, so that the
# first rank has both the embedding and the head.
STAGE_ORDER: dict[str, Literal["loop", "v"]] = {
    "GPipe": "loop",
    "1F1B": "loop",
    "Interleaved1F1B": "loop",
    "InterleavedZeroBubble": "loop",
    "ZBV": "v",
    "DualPipeV": "v",
}


@dataclass(frozen=True)
class PipeStage:
    """One stretch of the model: its layers, and whether the embedding or the head goes with them."""

    index: int
    layers: range
    has_embedding: bool
    has_head: bool


def whole_model(num_layers: int) -> PipeStage:
    return PipeStage(0, range(num_layers), has_embedding=True, has_head=True)


def pipe_stages(num_layers: int, num_stages: int) -> list[PipeStage]:
    """Cut the model into stages of work as equal as whole layers allow, each with at least one layer."""
    assert 1 <= num_stages <= num_layers
    sizes = [1] * num_stages
    ends = [int(i == 0) + int(i == num_stages - 1) for i in range(num_stages)]
    for _ in range(num_layers - num_stages):
        lightest = min(range(num_stages), key=lambda i: sizes[i] + ends[i])
        sizes[lightest] += 1
    stages = []
    start = 0
    for index, size in enumerate(sizes):
        layers = range(start, start + size)
        stages.append(PipeStage(index, layers, has_embedding=index == 0, has_head=index == num_stages - 1))
        start += size
    return stages


def stages_per_rank(schedule: str, virtual_pp_degree: int) -> int:
    return 2 if STAGE_ORDER[schedule] == "v" else virtual_pp_degree


def stage_indices(pp_rank: int, pp_degree: int, schedule: str, virtual_pp_degree: int) -> list[int]:
    """The stages that this pipe rank holds, in the order of the model."""
    if STAGE_ORDER[schedule] == "v":
        return [pp_rank, 2 * pp_degree - 1 - pp_rank]
    return [pp_rank + turn * pp_degree for turn in range(virtual_pp_degree)]
