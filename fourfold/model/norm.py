"""The layer norm before each half of a block, and the fork in the residual stream that it sits on."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fourfold.kernels import backward
from fourfold.model.linear import sums_in_passing


class LayerNorm(nn.LayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)

    def fork(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The input, to go on with beside the norm, and its norm. Where the two gradients meet again they are added by
        the pass that makes the norm's."""
        if not sums_in_passing(x):
            return x, self(x)
        return _Fork.apply(x, self.weight, self.bias, self.eps)


class _Fork(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight_d: torch.Tensor, bias_d: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cast_d = weight_d.to(x.dtype)
        y, mean, rstd = torch.native_layer_norm(x, weight_d.shape, cast_d, bias_d.to(x.dtype), eps)
        ctx.save_for_backward(x, mean, rstd, weight_d)
        return x.view_as(x), y

    @staticmethod
    def backward(ctx: Any, beside: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, mean, rstd, weight_d = ctx.saved_tensors
        rows = (tensor.flatten(0, -2) for tensor in (dy, beside, x))
        dx_nd, sums_p2d = backward.norm_gradient(*rows, mean.flatten(), rstd.flatten(), weight_d.to(x.dtype))
        dweight_d, dbias_d = sums_p2d.sum(0)
        return dx_nd.view(x.shape), dweight_d, dbias_d, None
