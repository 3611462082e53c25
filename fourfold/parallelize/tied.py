"""A tied head on another pipe stage than the embedding: two copies of one parameter that must stay one.

Both start equal, and after every backward both get the sum of their gradients, so they stay equal to the bit.
"""

from datetime import timedelta

import torch
import torch.distributed as dist

from fourfold.config.schema import Model
from fourfold.layout.layout import Coordinate, Layout

EMBEDDING, HEAD = "embedding.tokens.weight", "head.weight"


def is_split(model: Model, layout: Layout) -> bool:
    return model.tie_word_embeddings and layout.pp > 1


def build_tied_group(layout: Layout, at: Coordinate, timeout_s: float) -> dist.ProcessGroup | None:
    """The first and the last pipe rank at this place on the other axes. Every rank makes every group, as it must."""
    mine = None
    for rank in range(layout.world_size // layout.pp):  # the ranks of the first pipe stage
        last = rank + (layout.pp - 1) * (layout.world_size // layout.pp)
        group = dist.new_group([rank, last], timeout=timedelta(seconds=timeout_s))
        if layout.rank(at) in (rank, last):
            mine = group
    return mine


def sum_tied_gradients(gradients: dict[str, torch.Tensor], group: dist.ProcessGroup | None) -> None:
    if EMBEDDING in gradients and HEAD in gradients:  # both are here: the pipe is folded into a V
        gradients[EMBEDDING] += gradients[HEAD]
        gradients[HEAD].copy_(gradients[EMBEDDING])
    elif group is not None:
        for name in (EMBEDDING, HEAD):
            if name in gradients:
                dist.all_reduce(gradients[name], group=group)
