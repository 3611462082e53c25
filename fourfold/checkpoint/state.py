"""What a checkpoint holds: named tensors, and a few numbers beside them. Nothing that could be derived.

The data order and hidden dropout are functions of (seed, step), so neither a loader's nor a generator's state is here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fourfold.cost.params import saved_name, shard_of
from fourfold.layout.layout import Coordinate, Layout
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
    eval_loss: float | None = None
    """The evaluation of these very weights, if there was one."""


class Piece(NamedTuple):
    """The block of a named tensor that lies on this rank."""

    tensor: torch.Tensor
    """The memory itself: reading into it restores it."""
    shape: tuple[int, ...]
    """Of the whole tensor, which no layout changes."""
    offsets: tuple[int, ...]
    """Where in the whole this block begins."""
    is_written_here: bool
    """Of the ranks that hold the same block, one writes it."""


def whole_piece(tensor: torch.Tensor) -> Piece:
    return Piece(tensor, tuple(tensor.shape), (0,) * tensor.dim(), True)


def pieces_of(parallel: ParallelModel, optimizer: AdamW | None) -> dict[str, Piece]:
    """By names that do not depend on the layout. Weights alone where no optimizer is given."""
    model, layout, at = parallel.config.model, parallel.layout, parallel.at
    groups: dict[str, Mapping[str, torch.Tensor]] = {
        "model": optimizer.placed if optimizer else parallel.named_parameters()
    }
    if optimizer:
        groups |= {f"optimizer.{moment}": named for moment, named in optimizer.moments().items()}
    pieces: dict[str, Piece] = {}
    for number, parameter in enumerate(parallel.table()):
        saved = saved_name(parameter.name, model)
        is_mine = saved == parameter.name and is_writer(number, parameter.mp_dim is None, layout, at)
        offsets, shape = shard_of(parameter, layout, at)
        for group, named in groups.items():
            local = local_tensor(named[parameter.name].detach())
            assert tuple(local.shape) == shape, (
                f"{group}.{parameter.name}: {tuple(local.shape)} is not the shard {shape}"
            )
            # where the embedding and its tied copy are both here, the first one stands for both
            pieces.setdefault(f"{group}.{saved}", Piece(local, parameter.shape, offsets, is_mine))
    return pieces


def is_writer(number: int, is_whole_on_mp: bool, layout: Layout, at: Coordinate) -> bool:
    """Replicas hold the same bytes; they take turns by the parameter's number, so that each writes a share."""
    return at.dp == number % layout.dp and (not is_whole_on_mp or at.mp == number % layout.mp)


@torch.no_grad()
def copy_tied(parallel: ParallelModel, optimizer: AdamW) -> None:
    """After reading: the tied copy that `pieces_of` left out, if this rank has both."""
    if not is_split(parallel.config.model, parallel.layout):
        return
    groups: list[Mapping[str, torch.Tensor]] = [parallel.named_parameters(), *optimizer.moments().values()]
    for named in groups:
        if EMBEDDING in named and HEAD in named:
            local_tensor(named[HEAD]).copy_(local_tensor(named[EMBEDDING]))


def progress_of(
    step: int, optimizer: AdamW, loss_scale: LossScale, corpus: str, eval_loss: float | None = None
) -> Progress:
    return Progress(step, optimizer.updates, loss_scale.state(), corpus, eval_loss)


def restore_progress(progress: Progress, optimizer: AdamW, loss_scale: LossScale) -> None:
    optimizer.set_updates(progress.updates)
    loss_scale.load_state(progress.loss_scale)
