"""What each sharding stage keeps whole and what it cuts: the one table that the engine and the memory forecast read."""

from dataclasses import dataclass

from fourfold.config.schedules import SPLITS_BACKWARD
from fourfold.config.schema import Config
from fourfold.layout.layout import Layout


@dataclass(frozen=True)
class ShardingStage:
    """The optimizer works on shards in each of them."""

    reduces_every_micro_batch: bool
    """Gradients are cut to shards after each micro batch; otherwise they stay whole until the last."""
    frees_after_forward: bool
    """Parameters are gathered again for backward; otherwise they stay whole until the step's end."""


STAGES = {
    1: ShardingStage(reduces_every_micro_batch=False, frees_after_forward=False),
    2: ShardingStage(reduces_every_micro_batch=True, frees_after_forward=False),
    3: ShardingStage(reduces_every_micro_batch=True, frees_after_forward=True),
}


def sharding_stage(config: Config, layout: Layout) -> ShardingStage:
    # what lies in host memory is there to spare the device, which keeps nothing whole then
    stage = 3 if config.distributed.sharding.sharding_offload else config.distributed.sharding.sharding_stage
    if layout.pp > 1 and config.distributed.pp_schedule in SPLITS_BACKWARD:
        # Backward in two halves, over parameters that were freed in between, gives wrong gradients without an error. So
        # under these schedules stage 3 keeps parameters whole until the step's end, and needs stage 2's memory.
        stage = min(stage, 2)
    return STAGES[stage]


def is_sharded(config: Config, layout: Layout) -> bool:
    """Whether FSDP holds the parameters: for several data ranks, or for one that offloads."""
    return layout.data_ranks > 1 or config.distributed.sharding.sharding_offload
