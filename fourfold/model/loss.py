"""Head and cross entropy in one: summed over tokens, in chunks, so that the full logits never exist.

Gradients are made in forward, while a chunk's logits are at hand; backward only scales them by the one number that
reaches a scalar. Peak memory is one chunk of logits plus the gradient of the head, for each micro batch that waits for
its backward: in a pipe, on the last stage, that can be several.
"""

from typing import Any

import torch

IGNORED = -100
"""The target of a position that does not count."""


class Vocabulary:
    """The rows of the head that are at hand: all of them here; parallelize/tensor.py has the one for a share."""

    first = 0

    def max(self, x: torch.Tensor) -> torch.Tensor:
        """Elementwise over all shares."""
        return x

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return x


WHOLE = Vocabulary()

_CHUNK_LOGITS = 2**29  # 1 GiB of bfloat16 logits at a time, at most: large enough for full-speed products

_FLOAT16_ROWS = 4096  # a sum over more rows could leave float16's range, and no loss scale would help


def chunk_rows(num_rows: int, vocab: int) -> int:
    """Rows per chunk: a power of two, which suits matrix units, or all of them."""
    most = max(1, _CHUNK_LOGITS // vocab)
    return num_rows if num_rows <= most else 1 << (most.bit_length() - 1)


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
    ) -> torch.Tensor:
        w_vd = weight_vd.to(x_nd.dtype)
        total = torch.zeros(1, dtype=torch.float32, device=x_nd.device)
        # What is saved for backward is not written in place: PyTorch 2.11's compiler would save what was there before.
        dx_chunks: list[torch.Tensor] = []
        dw_vd = torch.zeros_like(weight_vd, dtype=torch.float32) if wants_grad else None
        step = chunk_rows(x_nd.shape[0], weight_vd.shape[0])
        if x_nd.dtype == torch.float16:
            step = min(step, _FLOAT16_ROWS)
        for first in range(0, x_nd.shape[0], step):
            rows = slice(first, first + step)
            # Nothing of this size is kept in float32: the compiler fuses each line into one pass over the logits.
            logits_nv = x_nd[rows] @ w_vd.T
            logits_nv[:, max(0, vocab_size - vocabulary.first) :] = -torch.inf  # padding of the vocabulary
            valid_n1 = targets_n[rows, None] != IGNORED
            column_n1 = targets_n[rows, None] - vocabulary.first
            is_here_n1 = (column_n1 >= 0) & (column_n1 < logits_nv.shape[1])
            picked_n1 = logits_nv.gather(1, column_n1.clamp(0, logits_nv.shape[1] - 1)).float()
            top_n1 = vocabulary.max(logits_nv.amax(1, keepdim=True).float())
            sums_n1 = (logits_nv.float() - top_n1).exp().sum(1, keepdim=True)
            sums_n2 = vocabulary.sum(torch.cat((sums_n1, torch.where(is_here_n1, picked_n1, 0.0)), 1))
            log_sum_n1 = top_n1 + sums_n2[:, :1].log()
            total = total + torch.where(valid_n1, log_sum_n1 - sums_n2[:, 1:], 0.0).sum()
            if dw_vd is not None:
                # d loss / d logits = softmax - one-hot, zero where the target does not count
                is_target_nv = torch.arange(logits_nv.shape[1], device=column_n1.device) == column_n1
                grad_nv = ((logits_nv.float() - log_sum_n1).exp() - is_target_nv.float()) * valid_n1
                grad_nv = grad_nv.to(x_nd.dtype)
                dx_chunks.append(grad_nv @ w_vd)
                dw_vd = dw_vd + grad_nv.T @ x_nd[rows]
        if wants_grad:
            ctx.save_for_backward(torch.cat(dx_chunks), dw_vd)
        return total

    @staticmethod
    def backward(ctx: Any, grad_total: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dx_nd, dw_vd = ctx.saved_tensors
        # in float32 before rounding: a rounded factor would bias every gradient the same way
        return (dx_nd * grad_total).to(dx_nd.dtype), dw_vd * grad_total, None, None, None, None


def summed_cross_entropy(
    x_btd: torch.Tensor,
    weight_vd: torch.Tensor,
    targets_bt: torch.Tensor,
    vocab_size: int,
    vocabulary: Vocabulary = WHOLE,
) -> torch.Tensor:
    """Loss summed over all positions whose target is not IGNORED, in float32, of shape (1,).

    `weight_vd` may be a share of the rows: the gradient of `x_btd` is then that share's part of it.
    """
    x_nd, targets_n = x_btd.flatten(0, 1), targets_bt.flatten()
    return _SummedCrossEntropy.apply(x_nd, weight_vd, targets_n, vocab_size, torch.is_grad_enabled(), vocabulary)
