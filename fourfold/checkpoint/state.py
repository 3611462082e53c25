"""What a checkpoint holds: named tensors, and a few numbers beside them. Nothing that could be derived.

The data order and hidden dropout are functions of (seed, step), so neither a loader's nor a generator's state is here.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fourfold.cost.params import saved_name
from fourfold.optim.adamw import AdamW, local_tensor
from fourfold.optim.scaler import LossScale
from fourfold.parallelize.apply import ParallelModel
from fourfold.parallelize.tied import EMBEDDING, HEAD, is_split


@dataclass(frozen=True)
class Progress:
    """Where a run stands, as numbers."""

    step: int
    """Steps finished: the next batch is that of this step, counted from 0."""
    updates: int
    """Steps that changed the weights; the others were skipped for gradients that were not finite."""
    loss_scale: dict[str, float]
    corpus: str
    """A fingerprint of the tokens, to tell that a text has changed."""


def tensors_of(parallel: ParallelModel, optimizer: AdamW) -> dict[str, torch.Tensor]:
    """The tensors themselves, by names that do not depend on the layout: reading into them restores them."""
    tensors: dict[str, torch.Tensor] = {}
    groups = {"model": {name: parameter.detach() for name, parameter in parallel.named_parameters().items()}}
    groups |= {f"optimizer.{moment}": named for moment, named in optimizer.moments().items()}
    for group, named in groups.items():
        for name, tensor in named.items():
            # where the embedding and its tied copy are both here, the first one stands for both
            tensors.setdefault(f"{group}.{saved_name(name, parallel.config.model)}", tensor)
    return tensors


@torch.no_grad()
def copy_tied(parallel: ParallelModel, optimizer: AdamW) -> None:
    """After reading: the tied copy that `tensors_of` left out, if this rank has both."""
    if not is_split(parallel.config.model, parallel.layout):
        return
    groups: list[Mapping[str, torch.Tensor]] = [parallel.named_parameters(), *optimizer.moments().values()]
    for named in groups:
        if EMBEDDING in named and HEAD in named:
            local_tensor(named[HEAD]).copy_(local_tensor(named[EMBEDDING]))


def progress_of(step: int, optimizer: AdamW, loss_scale: LossScale, corpus: str) -> Progress:
    return Progress(step, optimizer.updates, loss_scale.state(), corpus)


def restore_progress(progress: Progress, optimizer: AdamW, loss_scale: LossScale) -> None:
    optimizer.set_updates(progress.updates)
    loss_scale.load_state(progress.loss_scale)
