"""Bytes of model state that one rank holds: weights, gradients, optimizer. Activations are not in it.

Counted between two micro batches of a step, when a rank holds most: what a stage gathers for a moment is not counted.
A sharded rank has its float32 shard of the weights, and beside it the gathered copy in the dtype it computes in.
"""

from math import prod
from typing import NamedTuple

from fourfold.config.resolve import accumulation
from fourfold.config.schema import Config
from fourfold.cost.params import parameters, shard_of
from fourfold.cost.sharding import is_sharded, sharding_stage
from fourfold.layout.layout import Coordinate, Layout
from fourfold.layout.stages import PipeStage, pipe_stages, stage_indices, stages_per_rank

FLOAT32_BYTES = 4
HALF_BYTES = 2
MOMENTS = 2


class StateBytes(NamedTuple):
    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return sum(self)


def stages_of(config: Config, layout: Layout, at: Coordinate) -> list[PipeStage]:
    """The pipe stages of one rank; the whole model without a pipe."""
    if layout.pp == 1:
        return pipe_stages(config.model.num_layers, 1)
    schedule, virtual = config.distributed.pp_schedule, config.distributed.virtual_pp_degree
    stages = pipe_stages(config.model.num_layers, layout.pp * stages_per_rank(schedule, virtual))
    return [stages[index] for index in stage_indices(at.pp, layout.pp, schedule, virtual)]


def state_bytes(config: Config, layout: Layout, at: Coordinate) -> StateBytes:
    """Of a resolved config. Offloaded state is counted too: it is held by the host."""
    table = [parameter for stage in stages_of(config, layout, at) for parameter in parameters(config.model, stage)]
    owned = sum(parameter.size // (layout.mp if parameter.mp_dim is not None else 1) for parameter in table)
    shards = [shard_of(parameter, layout, at) for parameter in table]
    sharded = sum(prod(shard.shape) for shard in shards)
    optimizer = MOMENTS * FLOAT32_BYTES * sharded
    if not is_sharded(config, layout):
        return StateBytes(FLOAT32_BYTES * owned, FLOAT32_BYTES * owned, optimizer)
    compute_bytes = HALF_BYTES if config.engine.use_amp else FLOAT32_BYTES
    stage = sharding_stage(config, layout)
    gathered = 0 if stage.frees_after_forward else compute_bytes * owned
    gradients = FLOAT32_BYTES * (owned if keeps_whole_gradients(config, layout) else sharded)
    return StateBytes(FLOAT32_BYTES * sharded + gathered, gradients, optimizer)


def keeps_whole_gradients(config: Config, layout: Layout) -> bool:
    """Whether a sharded rank sums whole gradients over micro batches, before they are cut."""
    return not sharding_stage(config, layout).reduces_every_micro_batch and accumulation(config) > 1


def device_state_bytes(config: Config, layout: Layout, at: Coordinate) -> StateBytes:
    """What of the state lies on the device: with sharding_offload, what is gathered, and gradients as long as they are
    summed over micro batches."""
    state = state_bytes(config, layout, at)
    if not config.distributed.sharding.sharding_offload:
        return state
    shards = state.optimizer // MOMENTS
    return StateBytes(state.weights - shards, state.gradients if accumulation(config) > 1 else 0, 0)
