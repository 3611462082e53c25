"""One update: gradients of the whole global batch, their norm, the step. Nothing here waits for the device.

On one GPU the device's part is recorded once and then replayed (replay.py), so everything that differs between steps
goes into it as a tensor.
"""

from contextlib import nullcontext
from typing import NamedTuple

import torch

from fourfold.data.loader import Batch
from fourfold.layout.layout import Coordinate
from fourfold.mesh.mesh import sum_over_all
from fourfold.mesh.process import all_cores, seed_generators
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
    """`step` counts from 0; it is the number of steps finished before this one."""
    if run.config.model.attention_probs_dropout_prob > 0.0:
        seed_generators(attention_dropout_key(run.config.global_.seed, step, run.parallel.at))
    batch = to_device(batch, run.process.device)
    lr = learning_rate(step + 1, run.config.optimizer)
    said = numbers_on(run.process.device, lr, float(note.is_asked_to_stop), note.own_s)
    return run.replay(lambda *tensors: compute_step(run, *tensors), batch, said)


def compute_step(run: Run, batch: Batch, said: torch.Tensor) -> StepResult:
    """What the device does in a step: nothing here depends on anything but tensors. `said`: the learning rate, whether
    this rank was asked to stop, and its time.

    The summed loss is weighted by one over the tokens of the whole global batch before backward, so gradients are only
    ever summed, and neither the layout nor the micro batch's size nor uneven masks can change the result.
    """
    run.optimizer.drop_gradients()
    targets = count_targets(run, batch)
    scale = run.loss_scale.scale
    summed_loss = run.parallel.execution.train(batch, scale / targets)
    gradients = run.optimizer.gradients()
    run.parallel.finish_gradients(gradients)
    counted = run.parallel.counted(gradients)
    summed_loss, squared, notes = sum_results(run, summed_loss, counted, said[1:])
    norm = squared.sqrt() / scale
    is_skipped = ~torch.isfinite(norm) | (targets == 0)
    run.optimizer.step(said[0], scale * clip_divisor(norm, run.config.optimizer.grad_clip), is_skipped)
    run.loss_scale.update(is_skipped)
    return StepResult(summed_loss / targets, norm, is_skipped, notes[0], notes[1:])


def numbers_on(device: torch.device, *numbers: float) -> torch.Tensor:
    """In float32 on the device, without waiting for it."""
    on_host = torch.tensor(numbers, dtype=torch.float32)
    return on_host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else on_host


def attention_dropout_key(seed: int, step: int, at: Coordinate) -> int:
    """Different for ranks that hold different heads or layers, the same for replicas of them."""
    return key_of(seed, "attention dropout", step, at.pp, at.mp)


def sum_results(
    run: Run, summed_loss: torch.Tensor, counted: list[torch.Tensor], note: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss, squared gradient norm and notes, over all ranks, in one collective. Of the notes, first the votes to stop,
    then each rank's time, which the others add nothing to."""
    mine = torch.zeros(3 + run.process.world_size, device=run.process.device)
    if run.parallel.reports_loss:
        mine[0] = summed_loss[0]
    if counted:
        is_offloaded = mine.is_cuda and counted[0].is_cpu
        with all_cores() if is_offloaded else nullcontext():
            mine[1] = squared_norm(counted)
    mine[2] = note[0]
    mine[3 + run.process.rank] = note[1]
    summed = sum_over_all(mine)
    return summed[0], summed[1], summed[2:]


def count_targets(run: Run, batch: Batch) -> torch.Tensor:
    """The positions of the whole global batch that count; of a batch on the device, so that nothing waits for it."""
    mine = (batch.targets_bt != IGNORED).sum()
    # ranks that differ in mp or pp alone hold the same rows
    return sum_over_all(mine) // (run.layout.mp * run.layout.pp)


def to_device(batch: Batch, device: torch.device) -> Batch:
    return batch.each(lambda tensor: tensor.to(device, non_blocking=True))
