"""Data parallelism and ZeRO sharding, both by FSDP2 on the (dp, sharding) axes.

Gradients are summed, never averaged: the loss was already divided by the tokens of the whole global batch.
"""

from functools import partial

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from fourfold.compat import allow_views
from fourfold.config.schema import Config
from fourfold.cost.sharding import ShardingStage, is_sharded, sharding_stage
from fourfold.layout.layout import Layout
from fourfold.model.gpt import GPT
from fourfold.parallelize.precision import compute_dtype


def apply_sharding(gpt: GPT, config: Config, layout: Layout, mesh: DeviceMesh) -> None:
    if not is_sharded(config, layout):
        return
    is_gpu = mesh.device_type != "cpu"
    apply = partial(
        fully_shard,
        mesh=mesh["dp", "sharding"],
        mp_policy=MixedPrecisionPolicy(compute_dtype(config.engine), torch.float32, cast_forward_inputs=False),
        offload_policy=(
            CPUOffloadPolicy(pin_memory=is_gpu) if config.distributed.sharding.sharding_offload else OffloadPolicy()
        ),
        reshard_after_forward=sharding_stage(config, layout).frees_after_forward,
    )
    allow_views()
    for block in gpt.blocks.values():
        apply(block)
    apply(gpt)  # the root too: what is left out is not synchronised
    for module in gpt.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply while it reduces


def free_gathered(gpt: GPT) -> None:
    """After a forward without backward, which would have freed them: a checkpoint reads shards."""
    for module in gpt.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def set_micro_batch(gpt: GPT, stage: ShardingStage, is_last: bool) -> None:
    """What is to happen to gradients and parameters after the backward of the coming micro batch."""
    if isinstance(gpt, FSDPModule):
        gpt.set_requires_gradient_sync(stage.reduces_every_micro_batch or is_last)
        # until then shards are summed on the device, offloaded ones too: over the host it would take seconds each time
        gpt.set_requires_all_reduce(is_last)
        gpt.set_reshard_after_backward(stage.frees_after_forward or is_last)
        gpt.set_is_last_backward(is_last)
