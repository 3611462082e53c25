"""One update: gradients of the whole global batch, their norm, the step. Nothing here waits for the device."""

from typing import NamedTuple

import torch

from fourfold.data.loader import Batch
from fourfold.layout.layout import Coordinate
from fourfold.mesh.mesh import sum_over_all
from fourfold.mesh.process import seed_generators
from fourfold.model.loss import IGNORED
from fourfold.model.stateless import key_of
from fourfold.optim.clip import clip_divisor, squared_norm
from fourfold.optim.schedule import learning_rate
from fourfold.train.build import Run


class Note(NamedTuple):
    """What a rank tells all others along with its share of a step's results."""

    is_asked_to_stop: bool = False
    own_s: float = 0.0
    """How long the step before took this rank, without waiting for others."""


NOTHING_TO_SAY = Note()


class StepResult(NamedTuple):
    """Of the whole global batch and the same on every rank. Still on the device; reading one waits for it."""

    loss: torch.Tensor
    grad_norm: torch.Tensor
    is_skipped: torch.Tensor
    stop_votes: torch.Tensor
    """How many ranks had been asked to stop when this step ended."""
    rank_s: torch.Tensor
    """By rank, how long the step before took it, without waiting for others."""


def train_step(run: Run, batch: Batch, step: int, note: Note = NOTHING_TO_SAY) -> StepResult:
    """`step` counts from 0; it is the number of steps finished before this one.

    The summed loss is weighted by one over the tokens of the whole global batch before backward, so gradients are only
    ever summed, and neither the layout nor the micro batch's size nor uneven masks can change the result.
    """
    if run.config.model.attention_probs_dropout_prob > 0.0:
        seed_generators(attention_dropout_key(run.config.global_.seed, step, run.parallel.at))
    batch = to_device(batch, run.process.device)
    targets = count_targets(run, batch)
    scale, optimizer = run.loss_scale.scale, run.config.optimizer
    summed_loss = run.parallel.execution.train(batch, scale / targets)
    gradients = run.optimizer.gradients()
    run.parallel.finish_gradients(gradients)
    counted = run.parallel.counted(gradients)
    summed_loss, squared, notes = sum_results(run, summed_loss, counted, note)
    norm = squared.sqrt() / scale
    is_skipped = ~torch.isfinite(norm)
    run.optimizer.step(learning_rate(step + 1, optimizer), scale * clip_divisor(norm, optimizer.grad_clip), is_skipped)
    run.loss_scale.update(is_skipped)
    return StepResult(summed_loss / targets, norm, is_skipped, notes[0], notes[1:])


def attention_dropout_key(seed: int, step: int, at: Coordinate) -> int:
    """Different for ranks that hold different heads or layers, the same for replicas of them."""
    return key_of(seed, "attention dropout", step, at.pp, at.mp)


def sum_results(
    run: Run, summed_loss: torch.Tensor, counted: list[torch.Tensor], note: Note
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss, squared gradient norm and notes, over all ranks, in one collective. Of the notes, first the votes to stop,
    then each rank's time, which the others add nothing to."""
    mine = torch.zeros(3 + run.process.world_size, device=run.process.device)
    if run.parallel.reports_loss:
        mine[0] = summed_loss[0]
    if counted:
        mine[1] = squared_norm(counted)
    if note.is_asked_to_stop:
        mine[2].fill_(1.0)
    mine[3 + run.process.rank].fill_(note.own_s)  # assigning a number to an element would wait for the device
    summed = sum_over_all(mine)
    return summed[0], summed[1], summed[2:]


def count_targets(run: Run, batch: Batch) -> torch.Tensor:
    """The positions of the whole global batch that count; of a batch on the device, so that nothing waits for it."""
    mine = (batch.targets_bt != IGNORED).sum()
    # ranks that differ in mp or pp alone hold the same rows
    return sum_over_all(mine) // (run.layout.mp * run.layout.pp)


def to_device(batch: Batch, device: torch.device) -> Batch:
    return batch.each(lambda tensor: tensor.to(device, non_blocking=True))
