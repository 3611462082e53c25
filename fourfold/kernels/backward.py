"""Gradients that are written and summed in one pass: a bias's gradient is the sum over all rows of its output's, and
the kernel that writes that has it at hand.

Each gives the gradient and, in float32, its sum over rows. Shapes: n rows, f columns, b batch, h heads, t time, k head
width.
"""

import torch

from fourfold.kernels.available import HAS_TRITON, is_fast, power_of_two

if HAS_TRITON:
    from fourfold.kernels import code

GELU_SLOPE, GELU_CUBE = 1.5957691216057308, 0.044715
"""Of gelu(x) = x sigmoid(slope (x + cube x^3)), which is its approximation by tanh; slope = 2 sqrt(2 / pi)."""

PROGRAMS = 528
"""Four for each of the 132 processors of a Hopper GPU."""

Pair = tuple[torch.Tensor, torch.Tensor]


@torch.library.custom_op("fourfold::gelu_gradient", mutates_args=())
def gelu_gradient(dy_nf: torch.Tensor, x_nf: torch.Tensor) -> Pair:
    """From the gradient of gelu's output and its input."""
    return (fast_gelu_gradient if is_fast(x_nf) else plain_gelu_gradient)(dy_nf, x_nf)


@gelu_gradient.register_fake
def _(dy_nf: torch.Tensor, x_nf: torch.Tensor) -> Pair:
    return torch.empty_like(x_nf), x_nf.new_empty(x_nf.shape[1], dtype=torch.float32)


def plain_gelu_gradient(dy_nf: torch.Tensor, x_nf: torch.Tensor) -> Pair:
    wide_nf = x_nf.float()
    gate_nf = torch.sigmoid(GELU_SLOPE * (wide_nf + GELU_CUBE * wide_nf**3))
    slope_nf = gate_nf + wide_nf * gate_nf * (1.0 - gate_nf) * GELU_SLOPE * (1.0 + 3.0 * GELU_CUBE * wide_nf**2)
    dx_nf = (dy_nf.float() * slope_nf).to(x_nf.dtype)
    return dx_nf, dx_nf.sum(0, dtype=torch.float32)


def fast_gelu_gradient(dy_nf: torch.Tensor, x_nf: torch.Tensor) -> Pair:
    (rows, columns), each, wide = x_nf.shape, 256, 128
    dy_nf, x_nf = dy_nf.contiguous(), x_nf.contiguous()
    dx_nf, parts = torch.empty_like(x_nf), -(-rows // each)
    sums_pf = torch.empty(parts, columns, dtype=torch.float32, device=x_nf.device)
    code.gelu_gradient[(parts, -(-columns // wide))](
        dy_nf, x_nf, dx_nf, sums_pf, rows, columns, ROWS=each, STEP=8, COLUMNS=wide, AHEAD=1,
        IS_EVEN=rows % each == 0 and columns % wide == 0, num_warps=4,
    )  # fmt: skip
    return dx_nf, sums_pf.sum(0)


@torch.library.custom_op("fourfold::joined_heads", mutates_args=())
def joined_heads(dq_bhtk: torch.Tensor, dk_bhtk: torch.Tensor, dv_bhtk: torch.Tensor) -> Pair:
    """From the gradients of queries, keys and values, that of the rows in which they lie head by head."""
    return (fast_joined_heads if is_fast(dq_bhtk) else plain_joined_heads)(dq_bhtk, dk_bhtk, dv_bhtk)


@joined_heads.register_fake
def _(dq_bhtk: torch.Tensor, dk_bhtk: torch.Tensor, dv_bhtk: torch.Tensor) -> Pair:
    b, h, t, k = dq_bhtk.shape
    return dq_bhtk.new_empty(b * t, h * 3 * k), dq_bhtk.new_empty(h * 3 * k, dtype=torch.float32)


def plain_joined_heads(dq_bhtk: torch.Tensor, dk_bhtk: torch.Tensor, dv_bhtk: torch.Tensor) -> Pair:
    dqkv_3bhtk = torch.stack((dq_bhtk, dk_bhtk, dv_bhtk))
    dqkv_nf = dqkv_3bhtk.permute(1, 3, 2, 0, 4).flatten(2).flatten(0, 1)
    return dqkv_nf, dqkv_nf.sum(0, dtype=torch.float32)


def fast_joined_heads(dq_bhtk: torch.Tensor, dk_bhtk: torch.Tensor, dv_bhtk: torch.Tensor) -> Pair:
    (b, h, t, k), each = dq_bhtk.shape, 256
    gradients = [x if x.stride(3) == 1 else x.contiguous() for x in (dq_bhtk, dk_bhtk, dv_bhtk)]
    rows, parts = b * t, -(-b * t // each)
    dqkv_nf = dq_bhtk.new_empty(rows, h * 3 * k)
    sums_pf = dq_bhtk.new_empty(parts, h * 3 * k, dtype=torch.float32)
    strides = [stride for x in gradients for stride in x.stride()[:3]]
    columns = power_of_two(k)
    code.joined_heads[(parts, h)](
        *gradients, dqkv_nf, sums_pf, rows, h, t, *strides, WIDTH=k, COLUMNS=columns, ROWS=each, STEP=16,
        IS_EVEN=t % each == 0 and columns == k, num_warps=2,
    )  # fmt: skip
    return dqkv_nf, sums_pf.sum(0)


@torch.library.custom_op("fourfold::norm_gradient", mutates_args=())
def norm_gradient(
    dy_nd: torch.Tensor,
    beside_nd: torch.Tensor,
    x_nd: torch.Tensor,
    mean_n: torch.Tensor,
    rstd_n: torch.Tensor,
    gain_d: torch.Tensor,
) -> Pair:
    """Of a layer norm's input, with `beside_nd` added, from that of its output; and of its gain and its bias, stacked."""
    compute = fast_norm_gradient if is_fast(x_nd) else plain_norm_gradient
    return compute(dy_nd, beside_nd, x_nd, mean_n, rstd_n, gain_d)


@norm_gradient.register_fake
def _(
    dy_nd: torch.Tensor,
    beside_nd: torch.Tensor,
    x_nd: torch.Tensor,
    mean_n: torch.Tensor,
    rstd_n: torch.Tensor,
    gain_d: torch.Tensor,
) -> Pair:
    return torch.empty_like(x_nd), x_nd.new_empty(2, x_nd.shape[1], dtype=torch.float32)


def plain_norm_gradient(
    dy_nd: torch.Tensor,
    beside_nd: torch.Tensor,
    x_nd: torch.Tensor,
    mean_n: torch.Tensor,
    rstd_n: torch.Tensor,
    gain_d: torch.Tensor,
) -> Pair:
    wide_nd = dy_nd.float()
    unit_nd = (x_nd.float() - mean_n[:, None]) * rstd_n[:, None]
    scaled_nd = wide_nd * gain_d.float()
    along_n1 = (scaled_nd * unit_nd).mean(1, keepdim=True)
    centred_nd = scaled_nd - scaled_nd.mean(1, keepdim=True) - unit_nd * along_n1
    dx_nd = centred_nd * rstd_n[:, None] + beside_nd
    return dx_nd.to(x_nd.dtype), torch.stack(((wide_nd * unit_nd).sum(0), wide_nd.sum(0)))


def fast_norm_gradient(
    dy_nd: torch.Tensor,
    beside_nd: torch.Tensor,
    x_nd: torch.Tensor,
    mean_n: torch.Tensor,
    rstd_n: torch.Tensor,
    gain_d: torch.Tensor,
) -> Pair:
    rows, columns = x_nd.shape
    dy_nd, beside_nd, x_nd = dy_nd.contiguous(), beside_nd.contiguous(), x_nd.contiguous()
    wide = power_of_two(columns)
    step = max(1, 2048 // wide)
    each = -(-rows // PROGRAMS)
    each += -each % step
    parts = -(-rows // each)
    dx_nd = torch.empty_like(x_nd)
    sums_p2d = torch.empty(parts, 2, columns, dtype=torch.float32, device=x_nd.device)
    code.norm_gradient[(parts,)](
        dy_nd, beside_nd, x_nd, mean_n, rstd_n, gain_d, dx_nd, sums_p2d, rows, columns, each, COLUMNS=wide, STEP=step,
        AHEAD=1, num_warps=max(4, wide * step // 512),
    )  # fmt: skip
    return dx_nd, sums_p2d.sum(0)
