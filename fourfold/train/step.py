"""One update: gradients of the whole global batch, their norm, the step. Nothing here waits for the device."""

from typing import NamedTuple

import torch

from fourfold.config.resolve import accumulation
from fourfold.data.loader import Batch
from fourfold.mesh.process import seed_generators
from fourfold.model.loss import IGNORED
from fourfold.model.stateless import key_of
from fourfold.optim.clip import clip_divisor, global_norm
from fourfold.optim.schedule import learning_rate
from fourfold.train.build import Run


class StepResult(NamedTuple):
    """Still on the device; reading one waits for it."""

    loss: torch.Tensor
    grad_norm: torch.Tensor
    is_skipped: torch.Tensor


def train_step(run: Run, batch: Batch, step: int) -> StepResult:
    """`step` counts from 0; it is the number of steps finished before this one."""
    optimizer = run.config.optimizer
    loss = forward_backward(run, batch, step)
    norm = global_norm(run.optimizer.gradients()) / run.loss_scale.scale
    is_skipped = ~torch.isfinite(norm)
    divisor = run.loss_scale.scale * clip_divisor(norm, optimizer.grad_clip)
    run.optimizer.step(learning_rate(step + 1, optimizer), divisor, is_skipped)
    run.loss_scale.update(is_skipped)
    return StepResult(loss, norm, is_skipped)


def forward_backward(run: Run, batch: Batch, step: int) -> torch.Tensor:
    """Accumulate gradients over the micro batches and return the mean loss per token of the global batch.

    Each micro batch's summed loss is divided by the tokens of the whole global batch before backward, so gradients are
    only ever summed, and neither the micro batch's size nor uneven masks can change the result.
    """
    if run.config.model.attention_probs_dropout_prob > 0.0:
        seed_generators(key_of(run.config.global_.seed, "attention dropout", step, run.process.rank))
    run.gpt.train()
    weight = run.loss_scale.scale / count_targets(batch)
    total = torch.zeros(1, device=run.process.device)
    for micro in split_batch(to_device(batch, run.process.device), accumulation(run.config)):
        loss = run.gpt(micro.tokens_bt, micro.targets_bt, micro.sample_keys_b)
        (loss * weight).sum().backward()
        total += loss.detach()
    return total[0] / count_targets(batch)


def count_targets(batch: Batch) -> int:
    return int((batch.targets_bt != IGNORED).sum())


def to_device(batch: Batch, device: torch.device) -> Batch:
    return Batch(*(tensor.to(device, non_blocking=True) for tensor in batch))


def split_batch(batch: Batch, parts: int) -> list[Batch]:
    return [Batch(*tensors) for tensors in zip(*(tensor.chunk(parts) for tensor in batch), strict=True)]
