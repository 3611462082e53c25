"""Pipeline parallelism (pp): this rank's pipe stages, run by one of PyTorch's schedules.

Shapes between stages are stated and not inferred, so that nothing runs before the first step. Targets and sample keys go
to every stage beside its input; the last stage turns targets into the summed loss itself.
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from fourfold.config.resolve import accumulation
from fourfold.config.schema import Config
from fourfold.data.loader import Batch
from fourfold.layout.layout import Layout
from fourfold.layout.stages import stages_per_rank
from fourfold.model.gpt import GPT
from fourfold.parallelize.shard import stage_for

SCHEDULES: dict[str, type[PipelineScheduleSingle] | type[PipelineScheduleMulti]] = {
    "GPipe": ScheduleGPipe,
    "1F1B": Schedule1F1B,
    "Interleaved1F1B": ScheduleInterleaved1F1B,
    "InterleavedZeroBubble": ScheduleInterleavedZeroBubble,
    "ZBV": ScheduleZBVZeroBubble,
    "DualPipeV": ScheduleDualPipeV,
}


class ReducingStage(PipelineStage):
    """A stage that cuts gradients to shards after every micro batch, as sharding stages 2 and 3 do without a pipe.
    PyTorch's own keeps them whole until the step's end."""

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        result = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        if backward_type != "input" and isinstance(self.submod, FSDPModule):
            self.submod.set_requires_gradient_sync(True)
            state = fully_shard.state(self.submod)  # type: ignore[attr-defined]
            for each in state._state_ctx.all_states:
                for group in each._fsdp_param_groups:
                    group.post_backward()
            state._root_post_backward_final_callback()
        return result


class Pipelined:
    def __init__(
        self, parts: list[GPT], config: Config, layout: Layout, mesh: DeviceMesh, device: torch.device
    ) -> None:
        distributed = config.distributed
        self.parts = parts
        self.has_first = any(part.stage.has_embedding for part in parts)
        self.device = device
        self.weight = torch.ones((), device=device)
        self.total = torch.zeros(1, device=device)
        count = layout.pp * stages_per_rank(distributed.pp_schedule, distributed.virtual_pp_degree)
        reduces = stage_for(distributed, layout).reduces_every_micro_batch
        stages = [
            (ReducingStage if reduces else PipelineStage)(
                part,
                part.stage.index,
                count,
                device,
                input_args=boundary(config, part, is_input=True),
                output_args=boundary(config, part, is_input=False),
                group=mesh.get_group("pp"),
            )
            for part in parts
        ]
        schedule = SCHEDULES[distributed.pp_schedule]
        self.schedule = schedule(
            stages[0] if issubclass(schedule, PipelineScheduleSingle) else stages,  # type: ignore[arg-type]
            n_microbatches=accumulation(config),
            loss_fn=self._weigh,
            scale_grads=False,
        )

    def _weigh(self, loss: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Called by the schedule on the last stage, once per micro batch."""
        self.total += loss.detach()
        return (loss * self.weight).sum()

    def train(self, batch: Batch, weight: torch.Tensor) -> torch.Tensor:
        """As Accumulated.train; the loss is zero on ranks without the last stage."""
        self.weight = weight
        return self._run(batch, self.schedule.step, is_training=True)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> torch.Tensor:
        return self._run(batch, self.schedule.eval, is_training=False)

    def _run(self, batch: Batch, run: Any, is_training: bool) -> torch.Tensor:
        self.total = torch.zeros(1, device=self.device)
        for part in self.parts:
            part.train(is_training)
        beside = {"targets_bt": batch.targets_bt}
        if is_training:
            beside["sample_keys_b"] = batch.sample_keys_b
        tokens = (batch.tokens_bt,) if self.has_first else ()
        run(*tokens, target=batch.targets_bt, losses=[], **beside)
        return self.total


def boundary(config: Config, part: GPT, is_input: bool) -> torch.Tensor:
    """What goes into or comes out of a pipe stage, as a tensor without data."""
    micro, seq_len = config.global_.micro_batch_size, config.data.max_seq_len
    assert isinstance(micro, int) and isinstance(config.distributed.mp_degree, int)
    if is_input and part.stage.has_embedding:
        return torch.empty(micro, seq_len, dtype=torch.int64, device="meta")
    if not is_input and part.stage.has_head:
        return torch.empty(1, dtype=torch.float32, device="meta", requires_grad=True)
    length = seq_len // config.distributed.mp_degree if config.distributed.sequence_parallel else seq_len
    shape = (micro, length, config.model.hidden_size)
    return torch.empty(shape, dtype=part.compute_dtype, device="meta", requires_grad=True)
