"""The layer norm before each half of a block, where the residual stream forks."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fourfold.kernels import fused
from fourfold.model.linear import sums_in_passing


class LayerNorm(nn.LayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)

    def fork(self, x: torch.Tensor, late: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The stream with what was still to be added to it, to go on with, and its norm. On a GPU that is one pass, and
        so is its backward, where the gradients of the two meet again."""
        if late is not None and sums_in_passing(x) and x.shape[-1] <= fused.WIDEST_NORM:
            return _Fork.apply(x, late, self.weight, self.bias, self.eps)
        if late is not None:
            x = x + late
        return x, self(x)


class Nothing(torch.autograd.Function):
    """Zeros like a tensor, to be added to it. They take a gradient, so that what they go into is the same code as for
    something, and drop it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> None:
        return None


class _Fork(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, late: torch.Tensor, weight_d: torch.Tensor, bias_d: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        sum_nd, y_nd, mean_n, rstd_n = fused.added_norm(
            x.flatten(0, -2), late.flatten(0, -2), weight_d.to(x.dtype), bias_d.to(x.dtype), eps
        )
        ctx.save_for_backward(sum_nd, mean_n, rstd_n, weight_d)
        return sum_nd.view(x.shape), y_nd.view(x.shape)

    @staticmethod
    def backward(ctx: Any, beside: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        sum_nd, mean_n, rstd_n, weight_d = ctx.saved_tensors
        rows = dy.flatten(0, -2), beside.flatten(0, -2), sum_nd
        dsum_nd, sums_p2d = fused.norm_gradient(*rows, mean_n, rstd_n, weight_d.to(sum_nd.dtype))
        dweight_d, dbias_d = sums_p2d.sum(0)
        dsum = dsum_nd.view(dy.shape)
        return dsum, dsum, dweight_d, dbias_d, None
