"""What cross entropy needs of a chunk of logits: a few numbers per row, then the gradient in the logits' place.

Shapes: n rows, v columns of logits, of which the first `width` count and the others pad the vocabulary. The logits may
be a share of the vocabulary that begins at `first`; `targets_n` are tokens, or `ignored`.
"""

from typing import NamedTuple

import torch

from fourfold.kernels.available import HAS_TRITON, is_fast, power_of_two

if HAS_TRITON:
    from fourfold.kernels import code


class RowStatistics(NamedTuple):
    """By row, in float32."""

    top_n: torch.Tensor
    """The largest logit."""
    sum_n: torch.Tensor
    """The sum of exp(logit - largest)."""
    picked_n: torch.Tensor
    """The target's logit, 0 where the target is not in this share."""


def row_statistics(logits_nv: torch.Tensor, targets_n: torch.Tensor, first: int, width: int) -> RowStatistics:
    if is_fast(logits_nv):
        return fast_row_statistics(logits_nv, targets_n, first, width)
    if width == 0:  # a share that is all padding
        nothing_n = torch.zeros(len(logits_nv), device=logits_nv.device)
        return RowStatistics(nothing_n - torch.inf, nothing_n, nothing_n)
    logits_nv = logits_nv[:, :width].float()
    top_n = logits_nv.amax(1)
    column_n = targets_n - first
    is_here_n = (column_n >= 0) & (column_n < width)
    picked_n = logits_nv.gather(1, column_n.clamp(0, width - 1)[:, None])[:, 0]
    sum_n = (logits_nv - top_n[:, None]).exp().sum(1)
    return RowStatistics(top_n, sum_n, torch.where(is_here_n, picked_n, 0.0))


def row_gradient_(
    logits_nv: torch.Tensor,
    targets_n: torch.Tensor,
    statistics: RowStatistics,
    weight: torch.Tensor,
    first: int,
    width: int,
    ignored: int,
) -> torch.Tensor:
    """Softmax minus one-hot, times a weight, written over the logits; zero in padding and where the target is ignored.
    The weight is multiplied in float32, before rounding: rounded itself, it would bias all gradients the same way."""
    if is_fast(logits_nv):
        return fast_row_gradient_(logits_nv, targets_n, statistics, weight, first, width, ignored)
    log_sum_n = statistics.top_n + statistics.sum_n.log()
    gradient_nv = (logits_nv[:, :width].float() - log_sum_n[:, None]).exp_()
    column_n = targets_n - first
    if width:
        is_here_n1 = ((column_n >= 0) & (column_n < width))[:, None]
        gradient_nv.scatter_add_(1, column_n.clamp(0, width - 1)[:, None], -is_here_n1.float())
    logits_nv[:, :width] = gradient_nv.mul_(weight).masked_fill_((targets_n == ignored)[:, None], 0.0)
    logits_nv[:, width:] = 0.0
    return logits_nv


def rows_at_once_(
    logits_nv: torch.Tensor, targets_n: torch.Tensor, weight: torch.Tensor, width: int, ignored: int
) -> RowStatistics:
    """Both of the above, where no other share of the vocabulary has to be heard in between."""
    if is_fast(logits_nv):
        return fast_rows_at_once_(logits_nv, targets_n, weight, width, ignored)
    statistics = row_statistics(logits_nv, targets_n, 0, width)
    row_gradient_(logits_nv, targets_n, statistics, weight, 0, width, ignored)
    return statistics


def fast_rows_at_once_(
    logits_nv: torch.Tensor, targets_n: torch.Tensor, weight: torch.Tensor, width: int, ignored: int
) -> RowStatistics:
    found = RowStatistics(*torch.empty(3, len(logits_nv), device=logits_nv.device).unbind())
    lanes = min(max(power_of_two(width) // 4, 32), 1024)
    code.rows_at_once[(len(logits_nv),)](
        logits_nv, targets_n, *found, weight, logits_nv.stride(0), logits_nv.shape[1], WIDTH=width, IGNORED=ignored,
        LANES=lanes, EACH=4, num_warps=lanes // 32,
    )  # fmt: skip
    return found


def fast_row_statistics(logits_nv: torch.Tensor, targets_n: torch.Tensor, first: int, width: int) -> RowStatistics:
    found = RowStatistics(*torch.empty(3, len(logits_nv), device=logits_nv.device).unbind())
    code.row_statistics[(len(logits_nv),)](
        logits_nv, targets_n, *found, logits_nv.stride(0), first, WIDTH=width, LANES=256, EACH=8, num_warps=8
    )
    return found


def fast_row_gradient_(
    logits_nv: torch.Tensor,
    targets_n: torch.Tensor,
    statistics: RowStatistics,
    weight: torch.Tensor,
    first: int,
    width: int,
    ignored: int,
) -> torch.Tensor:
    rows, stored = logits_nv.shape
    block = 1024
    code.row_gradient[(rows, -(-stored // block))](
        logits_nv, targets_n, *statistics[:2], weight, logits_nv.stride(0), first, width, stored, IGNORED=ignored,
        BLOCK=block, num_warps=4,
    )  # fmt: skip
    return logits_nv
