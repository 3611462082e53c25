"""What a checkpoint holds: named tensors, and a few numbers beside them. Nothing that could be derived.

The data order and hidden dropout are functions of (seed, step), so neither a loader's nor a generator's state is here.
"""

from dataclasses import dataclass

import torch

from fourfold.model.gpt import GPT
from fourfold.optim.adamw import AdamW
from fourfold.optim.scaler import LossScale


@dataclass(frozen=True)
class Progress:
    """Where a run stands, as numbers."""

    step: int
    """Steps finished: the next batch is that of this step, counted from 0."""
    updates: int
    """Steps that changed the weights; the others were skipped for gradients that were not finite."""
    loss_scale: dict[str, float]


def tensors_of(gpt: GPT, optimizer: AdamW) -> dict[str, torch.Tensor]:
    """The tensors themselves, by a name that does not depend on the layout: reading into them restores them."""
    tensors = {f"model.{name}": parameter.detach() for name, parameter in gpt.named_parameters()}
    tensors |= {f"optimizer.{name}": moment for name, moment in optimizer.moments().items()}
    return tensors


def progress_of(step: int, optimizer: AdamW, loss_scale: LossScale) -> Progress:
    return Progress(step, optimizer.updates, loss_scale.state())


def restore_progress(progress: Progress, optimizer: AdamW, loss_scale: LossScale) -> None:
    optimizer.set_updates(progress.updates)
    loss_scale.load_state(progress.loss_scale)
