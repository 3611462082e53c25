"""Data parallelism and ZeRO sharding, both by FSDP2 on the (dp, sharding) axes.

Gradients are summed, never averaged: the loss was already divided by the tokens of the whole global batch.
"""

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from fourfold.config.schedules import SPLITS_BACKWARD
from fourfold.config.schema import Distributed
from fourfold.layout.layout import Layout
from fourfold.model.gpt import GPT


@dataclass(frozen=True)
class Stage:
    """What a sharding stage asks of the engine. The optimizer works on shards in each of them."""

    reduces_every_micro_batch: bool
    """Gradients are cut to shards after each micro batch; otherwise they stay whole until the last."""
    frees_after_forward: bool
    """Parameters are gathered again for backward; otherwise they stay whole until the step's end."""


STAGES = {
    1: Stage(reduces_every_micro_batch=False, frees_after_forward=False),
    2: Stage(reduces_every_micro_batch=True, frees_after_forward=False),
    3: Stage(reduces_every_micro_batch=True, frees_after_forward=True),
}


def stage_for(distributed: Distributed, layout: Layout) -> Stage:
    stage = STAGES[distributed.sharding.sharding_stage]
    if layout.pp > 1 and distributed.pp_schedule in SPLITS_BACKWARD:
        # Backward in two halves over parameters that were freed in between gives wrong gradients without an error, so
        # these schedules keep parameters whole until the step's end: stage 3 then needs stage 2's memory.
        return Stage(stage.reduces_every_micro_batch, frees_after_forward=False)
    return stage


def is_sharded(distributed: Distributed, layout: Layout) -> bool:
    return layout.data_ranks > 1 or distributed.sharding.sharding_offload


def apply_sharding(
    gpt: GPT, distributed: Distributed, layout: Layout, mesh: DeviceMesh, compute_dtype: torch.dtype
) -> None:
    if not is_sharded(distributed, layout):
        return
    is_gpu = mesh.device_type != "cpu"
    offload = CPUOffloadPolicy(pin_memory=is_gpu) if distributed.sharding.sharding_offload else OffloadPolicy()
    options = {
        "mesh": mesh["dp", "sharding"],
        "mp_policy": MixedPrecisionPolicy(compute_dtype, torch.float32, cast_forward_inputs=False),
        "offload_policy": offload,
        "reshard_after_forward": stage_for(distributed, layout).frees_after_forward,
    }
    for block in gpt.blocks.values():
        fully_shard(block, **options)  # type: ignore[arg-type]
    fully_shard(gpt, **options)  # type: ignore[arg-type]  # the root too: what is left out is not synchronised
    for module in gpt.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply while it reduces


def set_micro_batch(gpt: GPT, stage: Stage, is_last: bool) -> None:
    """What is to happen to gradients and parameters after the backward of the coming micro batch."""
    if isinstance(gpt, FSDPModule):
        gpt.set_requires_gradient_sync(stage.reduces_every_micro_batch or is_last)
        gpt.set_requires_all_reduce(is_last)
        gpt.set_reshard_after_backward(stage.frees_after_forward or is_last)
        gpt.set_is_last_backward(is_last)
