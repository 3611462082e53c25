"""Pipeline parallelism (pp): this rank's pipe stages, run by one of PyTorch's schedules.

Shapes between stages are stated and not inferred, so that nothing runs before the first step. Targets, sample keys and
what is known of documents go to every stage beside its input; the last stage turns targets into the summed loss itself.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
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

from fourfold.compat import fsdp_groups
from fourfold.config.resolve import accumulation
from fourfold.config.schema import Config
from fourfold.cost.sharding import sharding_stage
from fourfold.data.loader import Batch
from fourfold.layout.layout import Layout
from fourfold.layout.stages import stage_indices, stages_per_rank
from fourfold.model.gpt import GPT
from fourfold.parallelize.accumulate import boundary_tensors, split_batch
from fourfold.parallelize.precision import keep_casts, keeps_casts
from fourfold.parallelize.shard import free_gathered

SCHEDULES: dict[str, type[PipelineScheduleSingle] | type[PipelineScheduleMulti]] = {
    "GPipe": ScheduleGPipe,
    "1F1B": Schedule1F1B,
    "Interleaved1F1B": ScheduleInterleaved1F1B,
    "InterleavedZeroBubble": ScheduleInterleavedZeroBubble,
    "ZBV": ScheduleZBVZeroBubble,
    "DualPipeV": ScheduleDualPipeV,
}


class ReducingStage(PipelineStage):
    """A stage that cuts gradients to shards after every micro batch, and frees parameters, where sharding does so
    without a pipe. PyTorch's own keeps both whole until the step's end."""

    frees_after_forward = False

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        result = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        if backward_type != "input" and isinstance(self.submod, FSDPModule):
            self.submod.set_requires_gradient_sync(True)
            self.submod.set_reshard_after_backward(self.frees_after_forward)
            state = fully_shard.state(self.submod)  # type: ignore[attr-defined]
            for each in state._state_ctx.all_states:
                for group in fsdp_groups(each):
                    group.post_backward()
            state._root_post_backward_final_callback()
        return result


class Pipelined:
    def __init__(
        self, parts: list[GPT], config: Config, layout: Layout, mesh: DeviceMesh, device: torch.device
    ) -> None:
        distributed = config.distributed
        self.parts, self.config, self.device = parts, config, device
        self.group, self.rank = mesh.get_group("pp"), mesh.get_local_rank("pp")
        self.micro_batches = accumulation(config)
        self.keeps_casts = keeps_casts(config, layout)
        self.weight = torch.ones((), device=device)
        self.total = torch.zeros(1, device=device)
        count = layout.pp * stages_per_rank(distributed.pp_schedule, distributed.virtual_pp_degree)
        self.rank_of = {
            index: rank
            for rank in range(layout.pp)
            for index in stage_indices(rank, layout.pp, distributed.pp_schedule, distributed.virtual_pp_degree)
        }
        sharding = sharding_stage(config, layout)
        stages = []
        for part in parts:
            kind = ReducingStage if sharding.reduces_every_micro_batch else PipelineStage
            ends = (boundary(config, part, is_input=True), boundary(config, part, is_input=False))
            stage = kind(part, part.stage.index, count, device, *ends, group=self.group)
            if isinstance(stage, ReducingStage):
                stage.frees_after_forward = sharding.frees_after_forward
            stages.append(stage)
        schedule = SCHEDULES[distributed.pp_schedule]
        self.schedule = schedule(
            stages[0] if issubclass(schedule, PipelineScheduleSingle) else stages,  # type: ignore[arg-type]
            n_microbatches=self.micro_batches,
            loss_fn=self._weigh,
            scale_grads=False,
        )

    def _weigh(self, loss: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Called by the schedule on the last stage, once per micro batch."""
        self.total += loss.detach()
        return (loss * self.weight).sum()

    def train(self, batch: Batch, weight: torch.Tensor) -> torch.Tensor:
        """As Accumulated.train; the loss is zero on ranks without the last stage."""
        self.weight, self.total = weight, torch.zeros(1, device=self.device)
        for part in self.parts:
            part.train()
            if self.keeps_casts:
                keep_casts(part)
        tokens = (batch.tokens_bt,) if self.parts[0].stage.has_embedding else ()
        beside: dict[str, Any] = {"targets_bt": batch.targets_bt, "sample_keys_b": batch.sample_keys_b}
        beside |= boundary_tensors(batch)
        self.schedule.step(*tokens, target=batch.targets_bt, return_outputs=False, **beside)
        return self.total

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> torch.Tensor:
        """Forward alone, each stage taking all micro batches before the next. PyTorch's own `schedule.eval` runs
        backward's exchanges where the pipe is folded into a V."""
        total = torch.zeros(1, device=self.device)
        micros = split_batch(batch, self.micro_batches)
        sends: list[dist.Work | None] = []
        handed_over: list[torch.Tensor] = []  # from one stage of this rank to the next
        for part in self.parts:
            part.eval()
            if self.keeps_casts:
                keep_casts(part)
            inputs: Iterable[torch.Tensor] = (self._receive(part, micro) for micro in micros)
            if (
                len(self.parts) > 1
            ):  # all at once, since a rank that waits for one stage's input must not hold another's
                inputs = handed_over or list(inputs)
            handed_over = []
            for x, micro in zip(inputs, micros, strict=True):
                y = part(x, micro.targets_bt, **boundary_tensors(micro))
                if part.stage.has_head:
                    total += y
                elif self.rank_of[part.stage.index + 1] == self.rank:
                    handed_over.append(y)
                else:
                    sends.append(dist.isend(y, group=self.group, group_dst=self.rank_of[part.stage.index + 1]))
        for send in sends:
            if send is not None:
                send.wait()
        for part in self.parts:
            free_gathered(part)
        return total

    def _receive(self, part: GPT, micro: Batch) -> torch.Tensor:
        if part.stage.has_embedding:
            return micro.tokens_bt
        x = torch.empty_like(boundary(self.config, part, is_input=True), device=self.device, requires_grad=False)
        dist.recv(x, group=self.group, group_src=self.rank_of[part.stage.index - 1])
        return x


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
