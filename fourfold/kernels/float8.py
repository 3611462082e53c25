"""Matrices in 8 bits: how they are scaled, rounded and multiplied.

Hopper's units multiply 8-bit matrices only along the dim that both store contiguously, so each is needed as it lies
for one product and turned for another: `cast` makes both from one read. A scale is a power of two, so that
scaling itself rounds nothing, and what another layout or micro batch scales otherwise is rounded the same, the very
smallest numbers aside.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from fourfold.kernels.available import HAS_TRITON, is_fast

if HAS_TRITON:
    from fourfold.kernels import code

FORWARD = torch.float8_e4m3fn
"""Weights and activations: three bits of mantissa."""
BACKWARD = torch.float8_e5m2
"""Gradients: one bit less, and a range like float16's."""

TILE = 128
"""Rows and columns that one program casts: enough for whole lines of memory in both directions."""


def scale_of(x_rc: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The power of two that brings the largest magnitude just below the format's end; 1 for zeros. First by row: the
    compiler makes that part of whatever wrote the rows."""
    return scale_up_to(x_rc.abs().amax(-1).amax().float(), dtype)


def scale_up_to(most: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The scale of numbers of which none is larger."""
    scale = torch.exp2(torch.floor(torch.log2(torch.finfo(dtype).max / most)))
    return torch.where(most != 0.0, scale.clamp(max=2.0**100), 1.0)  # 0 for infinity, which makes NaN of everything


class Casts(NamedTuple):
    """A matrix in 8 bits; what was not asked for is empty."""

    as_it_lies_rc: torch.Tensor
    turned_cr: torch.Tensor


def cast(
    x_rc: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype,
    as_it_lies: bool = True,
    turned: bool = True,
    has_gelu: bool = False,
) -> Casts:
    """`x_rc`, or gelu of it, times `scale`, in 8 bits."""
    return Casts(*_cast(x_rc, scale, dtype, as_it_lies, turned, has_gelu))


@torch.library.custom_op("fourfold::cast", mutates_args=())
def _cast(
    x_rc: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, as_it_lies: bool, turned: bool, has_gelu: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    return (fast_cast if is_fast(x_rc) else plain_cast)(x_rc, scale, dtype, as_it_lies, turned, has_gelu)


@_cast.register_fake
def _(
    x_rc: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, as_it_lies: bool, turned: bool, has_gelu: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    return _empty_casts(x_rc, dtype, as_it_lies, turned)


def _empty_casts(
    x_rc: torch.Tensor, dtype: torch.dtype, as_it_lies: bool, turned: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    r, c = x_rc.shape
    return (
        x_rc.new_empty((r, c) if as_it_lies else (0,), dtype=dtype),
        x_rc.new_empty((c, r) if turned else (0,), dtype=dtype),
    )


def plain_cast(
    x_rc: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, as_it_lies: bool, turned: bool, has_gelu: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    most, (out_rc, turned_cr) = torch.finfo(dtype).max, _empty_casts(x_rc, dtype, as_it_lies, turned)
    wide_rc = F.gelu(x_rc.float(), approximate="tanh") if has_gelu else x_rc.float()
    cast_rc = (wide_rc * scale).clamp(-most, most).to(dtype)
    return cast_rc if as_it_lies else out_rc, cast_rc.T.contiguous() if turned else turned_cr


def fast_cast(
    x_rc: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, as_it_lies: bool, turned: bool, has_gelu: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    # of four bytes each, Triton 3.6 turns them wrongly when it is to store them as they lie as well
    assert x_rc.element_size() == 2, x_rc.dtype
    x_rc, (r, c) = x_rc.contiguous(), x_rc.shape
    out_rc, turned_cr = _empty_casts(x_rc, dtype, as_it_lies, turned)
    code.cast_both_ways[(-(-r // TILE), -(-c // TILE))](
        x_rc, scale, out_rc, turned_cr, r, c, MOST=torch.finfo(dtype).max, HAS_GELU=has_gelu, HAS_OUT=as_it_lies,
        HAS_TURNED=turned, ROWS=TILE, COLUMNS=TILE, num_warps=8,
    )  # fmt: skip
    return out_rc, turned_cr


def multiply(
    a_rk: torch.Tensor,
    b_kc: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """a @ b, unscaled, in `dtype`; the columns of b lie contiguous. Partial sums stay in the matrix unit, with fewer
    bits than float32 has: a random product is off by 3.76 %, from rounding to 8 bits, with or without that."""
    assert b_kc.stride(0) == 1 or b_kc.shape[1] == 1
    if a_rk.is_cuda:
        return torch._scaled_mm(a_rk, b_kc, 1.0 / a_scale, 1.0 / b_scale, bias, out_dtype=dtype, use_fast_accum=True)
    product = (a_rk.float() @ b_kc.float()) / (a_scale * b_scale)
    return (product if bias is None else product + bias.float()).to(dtype)
