"""Products with weights, in the dtype that flows through the model or in 8 bits.

In 8 bits an input, a weight and a gradient are each scaled as a whole by a power of two, found when it is cast. Sums
leave the matrix units in the wider dtype, and what is added to the residual stream is never less than bfloat16.
Shapes: n rows (all positions of a micro batch), d inputs, f outputs, v vocabulary.
"""

from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from fourfold.cost.activations import GELU_AGAIN_FROM
from fourfold.kernels import float8, fused
from fourfold.kernels.available import is_fast
from fourfold.kernels.fused import GELU_CUBE, GELU_SLOPE


def gelu(x: torch.Tensor) -> torch.Tensor:
    """With tanh's approximation. Compiled, it is written with the sigmoid that it equals, which costs a GPU less."""
    if not torch.compiler.is_compiling():
        return F.gelu(x, approximate="tanh")
    wide = x.float()
    return (wide * torch.sigmoid(GELU_SLOPE * (wide + GELU_CUBE * wide**3))).to(x.dtype)


def multiply(x: torch.Tensor, weight_fd: torch.Tensor, bias_f: torch.Tensor | None) -> torch.Tensor:
    """x @ weight.T + bias in the dtype of x, whatever the weight's."""
    if x.is_cuda and weight_fd.dtype == torch.float32 != x.dtype:
        return _WideGradient.apply(x, weight_fd, bias_f)
    return F.linear(x, weight_fd.to(x.dtype), None if bias_f is None else bias_f.to(x.dtype))


class _WideGradient(torch.autograd.Function):
    """A product whose weight gets its gradient in float32 from the matrix unit itself: as many bytes written as a
    rounded one that is then cast, and two passes over memory saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight_fd: torch.Tensor, bias_f: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight_fd)
        ctx.has_bias = bias_f is not None
        return F.linear(x, weight_fd.to(x.dtype), None if bias_f is None else bias_f.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight_fd = ctx.saved_tensors
        dy_nf = dy.flatten(0, -2)
        dweight_fd = torch.mm(dy_nf.T, x.flatten(0, -2), out_dtype=torch.float32)
        dbias_f = dy_nf.sum(0, dtype=torch.float32) if ctx.has_bias else None
        return dy @ weight_fd.to(dy.dtype), dweight_fd, dbias_f


def multiply_then_gelu(x: torch.Tensor, weight_fd: torch.Tensor, bias_f: torch.Tensor) -> torch.Tensor:
    if not sums_in_passing(x):
        return gelu(multiply(x, weight_fd, bias_f))
    y = multiply(x, weight_fd, bias_f.detach())
    # not in the function that has the gradient: PyTorch 2.11 makes nothing again that lies in one
    if x.shape[-1] < GELU_AGAIN_FROM:
        out = gelu(y.detach())
    else:
        out = checkpoint(gelu, y.detach(), use_reentrant=False, preserve_rng_state=False)
    return _SummedGelu.apply(y, bias_f, out)


def multiply_then_split(
    x_btd: torch.Tensor, weight_fd: torch.Tensor, bias_f: torch.Tensor, head_width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values, of shape (b, h, t, k) each, from rows in which they lie head by head."""
    if not sums_in_passing(x_btd):
        return split_heads(multiply(x_btd, weight_fd, bias_f), head_width)
    return _SummedHeads.apply(multiply(x_btd, weight_fd, bias_f.detach()), bias_f, head_width)


def sums_in_passing(x: torch.Tensor) -> bool:
    """Whether a bias's gradient is summed by what writes the gradient of its output, which has own kernels. Only where
    backward is compiled: pipes that take it apart run both halves of such a function, and PyTorch before its change
    175705 mixes up the gradients of several outputs there."""
    return is_fast(x) and x.dtype != torch.float32 and torch.is_grad_enabled() and torch.compiler.is_compiling()


def split_heads(qkv_btf: torch.Tensor, head_width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    b, t, _ = qkv_btf.shape
    q_bhtk, k_bhtk, v_bhtk = qkv_btf.view(b, t, -1, 3, head_width).permute(3, 0, 2, 1, 4).unbind(0)
    return q_bhtk, k_bhtk, v_bhtk


class _SummedGelu(torch.autograd.Function):
    """gelu of something that a bias was added to; given the result, it has the gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias_f: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        dx_nf, sums_pf = fused.gelu_gradient(dy.flatten(0, -2), x.flatten(0, -2))
        return dx_nf.view(x.shape), sums_pf.sum(0), None


class _SummedHeads(torch.autograd.Function):
    """`split_heads` of something that a bias was added to."""

    @staticmethod
    def forward(ctx: Any, qkv_btf: torch.Tensor, bias_f: torch.Tensor, head_width: int) -> tuple[torch.Tensor, ...]:
        return split_heads(qkv_btf, head_width)

    @staticmethod
    def backward(ctx: Any, *gradients_bhtk: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dqkv_nf, sums_pf = fused.joined_heads(*gradients_bhtk)
        b, _, t, _ = gradients_bhtk[0].shape
        return dqkv_nf.view(b, t, -1), sums_pf.sum(0), None


class WeightCasts(NamedTuple):
    as_it_lies_fd: torch.Tensor
    turned_df: torch.Tensor
    scale: torch.Tensor


def cast_weight(weight_fd: torch.Tensor, as_it_lies: bool = True, turned: bool = True) -> WeightCasts:
    """By way of bfloat16: the compiler finds the scale in the pass that rounds, and the rest reads half the bytes."""
    weight_fd = weight_fd.to(torch.bfloat16)
    scale = float8.scale_of(weight_fd, float8.FORWARD)
    return WeightCasts(*float8.cast(weight_fd, scale, float8.FORWARD, as_it_lies, turned), scale)


class Float8Product(nn.Module):
    """One layer's products in 8 bits. The weight is cast in every forward, unless its casts are kept for a step."""

    def __init__(self, has_gelu: bool, keeps_input: bool, frees_weight: bool) -> None:
        super().__init__()
        self.flags = Float8Flags(has_gelu, keeps_input, frees_weight)
        self.kept: WeightCasts | None = None

    @torch.no_grad()
    def keep(self, weight_fd: torch.Tensor) -> None:
        """Cast now, for all products until this is called again."""
        new = cast_weight(weight_fd)
        if self.kept is None:
            self.kept = new
        else:  # in place: the compiled model knows these tensors
            for kept, fresh in zip(self.kept, new, strict=True):
                kept.copy_(fresh)

    def forward(self, x: torch.Tensor, weight_fd: torch.Tensor, bias_f: torch.Tensor | None) -> torch.Tensor:
        wants_grad = torch.is_grad_enabled()
        casts = self.kept or cast_weight(weight_fd.detach(), turned=wants_grad and not self.flags.frees_weight)
        return _Float8Linear.apply(x, weight_fd, bias_f, *casts, wants_grad, self.flags)


class Float8Flags(NamedTuple):
    has_gelu: bool
    """The input goes through gelu first."""
    keeps_input: bool
    """Backward casts the input again, from what is kept anyway by whoever made it."""
    frees_weight: bool
    """Sharding frees the weight after forward: its casts must not outlive it, and backward makes them again."""


class _Float8Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight_fd: torch.Tensor,
        bias_f: torch.Tensor | None,
        cast_fd: torch.Tensor,
        turned_df: torch.Tensor,
        weight_scale: torch.Tensor,
        wants_grad: bool,
        flags: Float8Flags,
    ) -> torch.Tensor:
        x_nd = x.flatten(0, -2)
        scale = float8.scale_of(gelu(x_nd) if flags.has_gelu else x_nd, float8.FORWARD)
        is_turned = wants_grad and not flags.keeps_input
        casts = float8.cast(x_nd, scale, float8.FORWARD, turned=is_turned, has_gelu=flags.has_gelu)
        bias = None if bias_f is None else bias_f.to(x.dtype)
        y_nf = float8.multiply(casts.as_it_lies_rc, cast_fd.T, scale, weight_scale, x.dtype, bias)
        # as backward multiplies with them: `.T` there, of what is saved, would be kept until the graph is gone
        ctx.save_for_backward(
            x_nd if flags.keeps_input else casts.turned_cr.t(),  # empty where there is no backward
            scale,
            weight_fd if flags.frees_weight else turned_df.t(),
            weight_scale,
        )
        ctx.flags, ctx.weight_dtype, ctx.has_bias = flags, weight_fd.dtype, bias_f is not None
        return y_nf.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, x_scale, weight_fd, weight_scale = ctx.saved_tensors
        x_nd, flags = x, ctx.flags
        if flags.keeps_input:
            x_nd = float8.cast(x, x_scale, float8.FORWARD, as_it_lies=False, has_gelu=flags.has_gelu).turned_cr.T
        if flags.frees_weight:
            weight_fd = cast_weight(weight_fd, as_it_lies=False).turned_df.T
        dy_nf = dy.flatten(0, -2)
        scale = float8.scale_of(dy_nf, float8.BACKWARD)
        cast_nf, turned_fn = float8.cast(dy_nf, scale, float8.BACKWARD)
        dx_nd = float8.multiply(cast_nf, weight_fd, scale, weight_scale, dy.dtype)
        if flags.has_gelu:
            dx_nd = fused.gelu_backward(dx_nd, x)
        dweight_fd = float8.multiply(turned_fn, x_nd, scale, x_scale, ctx.weight_dtype)
        dbias_f = dy_nf.sum(0, dtype=torch.float32) if ctx.has_bias else None
        return dx_nd.view(*dy.shape[:-1], -1), dweight_fd, dbias_f, None, None, None, None, None


class HeadProducts(Protocol):
    """The head's three products for one chunk of rows after the other. Made of the weight, the dtype of what goes in,
    and the largest that an element of the logits' gradient can be."""

    def logits(self, x_nd: torch.Tensor) -> torch.Tensor: ...

    def gradient(self, dlogits_nv: torch.Tensor, out: torch.Tensor) -> None:
        """Of the last chunk's rows."""

    def add_weight_gradient_(self, dweight_vd: torch.Tensor) -> None:
        """Add that of the last chunk to a float32 tensor."""


class PlainHead:
    def __init__(self, weight_vd: torch.Tensor, dtype: torch.dtype, most: torch.Tensor) -> None:
        self.weight_vd = weight_vd.to(dtype)

    def logits(self, x_nd: torch.Tensor) -> torch.Tensor:
        self.x_nd = x_nd
        return x_nd @ self.weight_vd.T

    def gradient(self, dlogits_nv: torch.Tensor, out: torch.Tensor) -> None:
        self.dlogits_nv = dlogits_nv
        torch.mm(dlogits_nv, self.weight_vd, out=out)

    def add_weight_gradient_(self, dweight_vd: torch.Tensor) -> None:
        if self.x_nd.is_cuda and self.x_nd.dtype != torch.float32:  # the matrix unit adds
            torch.addmm(dweight_vd, self.dlogits_nv.T, self.x_nd, out_dtype=torch.float32, out=dweight_vd)
        else:
            dweight_vd += self.dlogits_nv.T @ self.x_nd
        del self.dlogits_nv


class Float8Head:
    def __init__(self, weight_vd: torch.Tensor, dtype: torch.dtype, most: torch.Tensor) -> None:
        self.weight = cast_weight(weight_vd)
        self.dtype = dtype
        self.gradient_scale = float8.scale_up_to(most, float8.BACKWARD)

    def logits(self, x_nd: torch.Tensor) -> torch.Tensor:
        self.x_scale = float8.scale_of(x_nd, float8.FORWARD)
        cast_nd, self.x_turned_dn = float8.cast(x_nd, self.x_scale, float8.FORWARD)
        return float8.multiply(cast_nd, self.weight.as_it_lies_fd.T, self.x_scale, self.weight.scale, self.dtype)

    def gradient(self, dlogits_nv: torch.Tensor, out: torch.Tensor) -> None:
        cast_nv, self.turned_vn = float8.cast(dlogits_nv, self.gradient_scale, float8.BACKWARD)
        out.copy_(float8.multiply(cast_nv, self.weight.turned_df.T, self.gradient_scale, self.weight.scale, self.dtype))

    def add_weight_gradient_(self, dweight_vd: torch.Tensor) -> None:
        dweight_vd += float8.multiply(
            self.turned_vn, self.x_turned_dn.T, self.gradient_scale, self.x_scale, torch.float32
        )
        del self.turned_vn, self.x_turned_dn
