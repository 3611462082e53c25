"""Head and cross entropy in one: summed over tokens, in chunks, so that the full logits never exist.

Gradients are made in forward, while a chunk's logits are at hand, and in their place; backward at most scales them by
the one number that reaches a scalar. Peak memory is one chunk of logits plus the gradient of the head, for each micro
batch that waits for its backward: in a pipe, on the last stage, that can be several.
Shapes: n rows, r rows of a chunk, d hidden, v vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch

from fourfold.cost.activations import chunk_rows
from fourfold.kernels.cross_entropy import RowStatistics, row_gradient_, row_statistics, rows_at_once_
from fourfold.model.linear import HeadProducts, PlainHead

IGNORED = -100
"""The target of a position that does not count."""


class Vocabulary:
    """The rows of the head that are at hand: all of them here; parallelize/tensor.py has the one for a share."""

    first = 0

    def merge(self, statistics: RowStatistics) -> RowStatistics:
        """Of all shares, from those of each."""
        return statistics


WHOLE = Vocabulary()


class _SummedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_nd: torch.Tensor,
        weight_vd: torch.Tensor,
        targets_n: torch.Tensor,
        vocab_size: int,
        wants_grad: bool,
        vocabulary: Vocabulary,
        products: Callable[[torch.Tensor, torch.dtype, torch.Tensor], HeadProducts],
        weight: torch.Tensor | None,
    ) -> torch.Tensor:
        factor = torch.ones((), device=x_nd.device) if weight is None else weight
        head = products(weight_vd, x_nd.dtype, factor)
        if wants_grad:
            dx_nd, dw_vd = torch.empty_like(x_nd), torch.zeros_like(weight_vd, dtype=torch.float32)
        first, width = vocabulary.first, min(max(vocab_size - vocabulary.first, 0), len(weight_vd))
        step = chunk_rows(len(x_nd), len(weight_vd), x_nd.dtype == torch.float16)
        found = []
        for begin in range(0, len(x_nd), step):
            rows = slice(begin, begin + step)
            logits_rv = head.logits(x_nd[rows])
            # d loss / d logits = softmax - one-hot, zero where the target does not count, in the logits' place
            if wants_grad and vocabulary is WHOLE:
                statistics = rows_at_once_(logits_rv, targets_n[rows], factor, width, IGNORED)
            else:
                statistics = vocabulary.merge(row_statistics(logits_rv, targets_n[rows], first, width))
                if wants_grad:
                    row_gradient_(logits_rv, targets_n[rows], statistics, factor, first, width, IGNORED)
            found.append(torch.stack(statistics))
            if wants_grad:
                head.gradient(logits_rv, out=dx_nd[rows])
                head.add_weight_gradient_(dw_vd)
            del logits_rv  # before the next chunk's are made
        if wants_grad:
            ctx.save_for_backward(dx_nd, dw_vd)
            ctx.is_weighed = weight is not None
        top_n, sum_n, picked_n = torch.cat(found, 1)
        return torch.where(targets_n != IGNORED, top_n + sum_n.log() - picked_n, 0.0).sum(0, keepdim=True)

    @staticmethod
    def backward(ctx: Any, grad_total: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dx_nd, dw_vd = ctx.saved_tensors
        if not ctx.is_weighed:  # in float32 before rounding, as there
            dx_nd, dw_vd = (dx_nd * grad_total).to(dx_nd.dtype), dw_vd * grad_total
        return dx_nd, dw_vd, None, None, None, None, None, None


@torch.compiler.disable(reason="it has nothing to add to these kernels, and would trace every chunk")
def summed_cross_entropy(
    x_btd: torch.Tensor,
    weight_vd: torch.Tensor,
    targets_bt: torch.Tensor,
    vocab_size: int,
    vocabulary: Vocabulary = WHOLE,
    products: Callable[[torch.Tensor, torch.dtype, torch.Tensor], HeadProducts] = PlainHead,
    weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """Loss summed over all positions whose target is not IGNORED, in float32, of shape (1,).

    `weight_vd` may be a share of the rows: the gradient of `x_btd` is then that share's part of it. Where a `weight` is
    given, gradients are those of weight times the sum whatever reaches backward: they need no second pass then.
    """
    x_nd, targets_n = x_btd.flatten(0, 1), targets_bt.flatten()
    return _SummedCrossEntropy.apply(
        x_nd, weight_vd, targets_n, vocab_size, torch.is_grad_enabled(), vocabulary, products, weight
    )
