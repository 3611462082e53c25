"""The most that a rank holds on its device in a step, as the larger of two moments: when forward has ended and every
activation is there, and when backward has ended and every gradient is. In between, one goes as the other comes.

What the allocator and the driver take beyond it is not counted: `ROOM` leaves something for them. A step that is
recorded and replayed (train/replay.py) has the same peak, but keeps it: an evaluation needs its own beside it, out of
the same room.
"""

from typing import NamedTuple

from fourfold.config.problems import FLOAT8_MULTIPLE
from fourfold.config.resolve import accumulation, legal_micro_batch_sizes, micro_batch_size, with_micro_batch_size
from fourfold.config.schema import Config
from fourfold.cost.activations import (
    FLOAT32_BYTES,
    between_blocks_bytes,
    block_bytes,
    block_moment_bytes,
    cast_bytes,
    compute_bytes,
    forwards_in_flight,
    granularity,
    has_float8,
    head_moment_bytes,
    stage_bytes,
)
from fourfold.cost.memory import device_state_bytes, stages_of
from fourfold.cost.params import Parameter, block_parameters, parameters, sizes
from fourfold.cost.sharding import is_sharded, sharding_stage
from fourfold.layout.layout import Coordinate, Layout
from fourfold.layout.stages import PipeStage

ROOM = 0.9
"""The part of a device's memory that a forecast may fill."""
WORKSPACE_BYTES = 100 * 2**20
"""cuBLAS has one for each stream, and small things add up: what measured peaks on an H200 have beyond the tables."""
GATHERED_BLOCKS = 2
"""The one that computes and the one that is fetched ahead."""


class Peak(NamedTuple):
    activations: int
    """All that is neither weights, gradients nor optimizer, at the larger of the two moments."""
    total: int
    """On the device."""


def peak_bytes(config: Config, layout: Layout, at: Coordinate) -> Peak:
    """Of a config that is resolved to the last key."""
    stages, state = stages_of(config, layout, at), device_state_bytes(config, layout, at)
    micro_batches = accumulation(config)
    waiting = forwards_in_flight(config, layout, at.pp, micro_batches)
    largest = max(stage_bytes(config, layout, stage) for stage in stages)
    always = (
        pipe_buffer_bytes(config, layout, stages, micro_batches)
        + cast_bytes(config, layout, stages)
        + gathered_bytes(config, layout, stages)
        + (WORKSPACE_BYTES if config.global_.device == "gpu" else 0)
    )
    # gradients of earlier micro batches are there when a forward ends
    before = state.total - (state.gradients if micro_batches == 1 else 0)
    first = stages[0].layers[0]
    moments = [block_moment_bytes(config, layout, first)]
    moments += [head_moment_bytes(config, layout)] * any(stage.has_head for stage in stages)
    after_forward = always + waiting * largest + max(moments)
    first_block = block_bytes(config, layout, first, granularity(config)) + block_moment_bytes(config, layout, first)
    last = end_of_backward_bytes(config, layout, stages, micro_batches, first_block)
    after_backward = always + (waiting - 1) * largest + last
    return max(
        Peak(after_forward, before + after_forward),
        Peak(after_backward, state.total + after_backward),
        key=lambda peak: peak.total,
    )


def pipe_buffer_bytes(config: Config, layout: Layout, stages: list[PipeStage], micro_batches: int) -> int:
    """PyTorch's pipe stages have a buffer for every micro batch of a step, for what comes from either side."""
    if layout.pp == 1:
        return 0
    sides = sum((not stage.has_embedding) + (not stage.has_head) for stage in stages)
    return sides * micro_batches * between_blocks_bytes(config, layout)


def gathered_bytes(config: Config, layout: Layout, stages: list[PipeStage]) -> int:
    """What sharding gathers for a moment, blocks and, as long as the model computes, what lies outside of them."""
    if not is_sharded(config, layout):
        return 0
    each = compute_bytes(config)
    block = each * held(layout, list(block_parameters(config.model, 0)))
    if not sharding_stage(config, layout).frees_after_forward:
        return block  # fetched into a buffer, from which it is copied to where it stays
    return GATHERED_BLOCKS * block + each * held(layout, outside_blocks(config, stages))


def end_of_backward_bytes(
    config: Config, layout: Layout, stages: list[PipeStage], micro_batches: int, first_block_bytes: int
) -> int:
    """What is left of the first block, and gradients of the last micro batch that are not yet added to the others, or
    not yet cut."""
    block = list(block_parameters(config.model, 0))
    if is_sharded(config, layout):
        both = compute_bytes(config) + FLOAT32_BYTES  # as they come, and on their way
        return first_block_bytes + both * held(layout, [*block, *outside_blocks(config, stages)])
    # a compiled backward hands over its block's gradients at its end
    waits = config.engine.compile and micro_batches > 1
    gradient_bytes = FLOAT32_BYTES * held(layout, block) if waits else 0
    hidden, _, vocab, _ = sizes(config.model)
    has_vocabulary = any(stage.has_embedding or stage.has_head for stage in stages)
    embedding_bytes = FLOAT32_BYTES * vocab * hidden // layout.mp if has_vocabulary else 0  # after all blocks
    return max(first_block_bytes + gradient_bytes, embedding_bytes)


def outside_blocks(config: Config, stages: list[PipeStage]) -> list[Parameter]:
    listed = [parameter for stage in stages for parameter in parameters(config.model, stage)]
    return [parameter for parameter in listed if not parameter.name.startswith("blocks.")]


def held(layout: Layout, listed: list[Parameter]) -> int:
    """Elements that a rank computes with."""
    return sum(parameter.size // (layout.mp if parameter.mp_dim is not None else 1) for parameter in listed)


def largest_peak(config: Config, layout: Layout) -> int:
    """Over the places in the pipe; along the other axes ranks differ by padding alone."""
    return max(peak_bytes(config, layout, Coordinate(pp, 0, 0, 0)).total for pp in range(layout.pp))


def candidate_sizes(config: Config, layout: Layout) -> list[int]:
    """The micro batch sizes that `auto` may take, the smallest first: up to what it takes where memory is no matter."""
    most = micro_batch_size(config, layout)
    step = FLOAT8_MULTIPLE if has_float8(config) else 1
    return [
        size
        for size in legal_micro_batch_sizes(config, layout)
        if size <= most and size * config.data.max_seq_len % step == 0
    ]


def fitting_micro_batch_size(config: Config, layout: Layout, memory_bytes: int) -> int | None:
    """The largest whose forecast leaves some room; None where not even the smallest does.

    `config` is resolved but for this one key.
    """
    for size in reversed(candidate_sizes(config, layout)):
        if largest_peak(with_micro_batch_size(config, size), layout) <= ROOM * memory_bytes:
            return size
    return None
