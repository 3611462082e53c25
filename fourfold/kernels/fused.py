"""Passes over activations that do more than one thing to them while they are at hand.

A bias's gradient is the sum over all rows of its output's: what writes that also sums it, in float32, over parts of the
rows, to be added up by whoever asked (the compiler does that well). And a layer norm sits where something was added to
the residual stream: one pass adds and norms, and one in backward makes the norm's gradient and adds what comes back
beside it. Shapes: n rows, f columns, d hidden, b batch, h heads, t time, k head width, p parts.
"""

import torch

from fourfold.kernels.available import HAS_TRITON, is_fast, power_of_two

if HAS_TRITON:
    from fourfold.kernels import code

GELU_SLOPE, GELU_CUBE = 1.5957691216057308, 0.044715
"""Of gelu(x) = x sigmoid(slope (x + cube x^3)), which is its approximation by tanh; slope = 2 sqrt(2 / pi)."""

WIDEST_NORM = 8192
"""A row of more has no room in registers."""

PART = 256
"""Rows that one program sums."""

Pair = tuple[torch.Tensor, torch.Tensor]


def parts_of(x: torch.Tensor, rows: int) -> int:
    """Plain versions sum all rows at once."""
    return -(-rows // PART) if is_fast(x) else 1


@torch.library.custom_op("fourfold::gelu_gradient", mutates_args=())
def gelu_gradient(dy_nf: torch.Tensor, x_nf: torch.Tensor) -> Pair:
    """From the gradient of gelu's output and its input."""
    return (fast_gelu_gradient if is_fast(x_nf) else plain_gelu_gradient)(dy_nf, x_nf)


@gelu_gradient.register_fake
def _(dy_nf: torch.Tensor, x_nf: torch.Tensor) -> Pair:
    n, f = x_nf.shape
    return x_nf.new_empty(n, f), x_nf.new_empty(parts_of(x_nf, n), f, dtype=torch.float32)


def plain_gelu_gradient(dy_nf: torch.Tensor, x_nf: torch.Tensor) -> Pair:
    dx_nf = gelu_backward(dy_nf, x_nf)
    return dx_nf, dx_nf.sum(0, keepdim=True, dtype=torch.float32)


def gelu_backward(dy_nf: torch.Tensor, x_nf: torch.Tensor) -> torch.Tensor:
    wide_nf = x_nf.float()
    gate_nf = torch.sigmoid(GELU_SLOPE * (wide_nf + GELU_CUBE * wide_nf**3))
    slope_nf = gate_nf + wide_nf * gate_nf * (1.0 - gate_nf) * GELU_SLOPE * (1.0 + 3.0 * GELU_CUBE * wide_nf**2)
    return (dy_nf.float() * slope_nf).to(dy_nf.dtype)


def fast_gelu_gradient(dy_nf: torch.Tensor, x_nf: torch.Tensor) -> Pair:
    (n, f), wide = x_nf.shape, 128
    dy_nf, x_nf = dy_nf.contiguous(), x_nf.contiguous()
    dx_nf, parts = torch.empty_like(x_nf), -(-n // PART)
    sums_pf = x_nf.new_empty(parts, f, dtype=torch.float32)
    code.gelu_gradient[(parts, -(-f // wide))](
        dy_nf, x_nf, dx_nf, sums_pf, n, f, ROWS=PART, STEP=16, COLUMNS=wide, num_warps=8,
        IS_EVEN=n % PART == 0 and f % wide == 0,
    )  # fmt: skip
    return dx_nf, sums_pf


@torch.library.custom_op("fourfold::joined_heads", mutates_args=())
def joined_heads(dq_bhtk: torch.Tensor, dk_bhtk: torch.Tensor, dv_bhtk: torch.Tensor) -> Pair:
    """From the gradients of queries, keys and values, that of the rows in which they lie head by head."""
    return (fast_joined_heads if is_fast(dq_bhtk) else plain_joined_heads)(dq_bhtk, dk_bhtk, dv_bhtk)


@joined_heads.register_fake
def _(dq_bhtk: torch.Tensor, dk_bhtk: torch.Tensor, dv_bhtk: torch.Tensor) -> Pair:
    b, h, t, k = dq_bhtk.shape
    f = h * 3 * k
    return dq_bhtk.new_empty(b * t, f), dq_bhtk.new_empty(parts_of(dq_bhtk, b * t), f, dtype=torch.float32)


def plain_joined_heads(dq_bhtk: torch.Tensor, dk_bhtk: torch.Tensor, dv_bhtk: torch.Tensor) -> Pair:
    dqkv_3bhtk = torch.stack((dq_bhtk, dk_bhtk, dv_bhtk))
    dqkv_nf = dqkv_3bhtk.permute(1, 3, 2, 0, 4).flatten(2).flatten(0, 1)
    return dqkv_nf, dqkv_nf.sum(0, keepdim=True, dtype=torch.float32)


def fast_joined_heads(dq_bhtk: torch.Tensor, dk_bhtk: torch.Tensor, dv_bhtk: torch.Tensor) -> Pair:
    b, h, t, k = dq_bhtk.shape
    gradients = [x if x.stride(3) == 1 else x.contiguous() for x in (dq_bhtk, dk_bhtk, dv_bhtk)]
    strides = [stride for x in gradients for stride in x.stride()[:3]]
    n, f, parts, wide = b * t, h * 3 * k, -(-b * t // PART), power_of_two(k)
    dqkv_nf = dq_bhtk.new_empty(n, f)
    sums_pf = dq_bhtk.new_empty(parts, f, dtype=torch.float32)
    code.joined_heads[(parts, h)](
        *gradients, dqkv_nf, sums_pf, n, h, t, *strides, WIDTH=k, COLUMNS=wide, ROWS=PART, STEP=16, num_warps=2,
        IS_EVEN=t % PART == 0 and wide == k,
    )  # fmt: skip
    return dqkv_nf, sums_pf


Four = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@torch.library.custom_op("fourfold::added_norm", mutates_args=())
def added_norm(
    x_nd: torch.Tensor, late_nd: torch.Tensor, gain_d: torch.Tensor, bias_d: torch.Tensor, eps: float
) -> Four:
    """A sum, its layer norm, and the mean and the reciprocal deviation of its rows."""
    return (fast_added_norm if is_fast(x_nd) else plain_added_norm)(x_nd, late_nd, gain_d, bias_d, eps)


@added_norm.register_fake
def _(x_nd: torch.Tensor, *_: object) -> Four:
    mean_n, rstd_n = (x_nd.new_empty(len(x_nd), dtype=torch.float32) for _ in range(2))
    return x_nd.new_empty(x_nd.shape), x_nd.new_empty(x_nd.shape), mean_n, rstd_n


def plain_added_norm(
    x_nd: torch.Tensor, late_nd: torch.Tensor, gain_d: torch.Tensor, bias_d: torch.Tensor, eps: float
) -> Four:
    sum_nd = x_nd + late_nd
    y_nd, mean_n1, rstd_n1 = torch.native_layer_norm(sum_nd, gain_d.shape, gain_d, bias_d, eps)
    return sum_nd, y_nd, mean_n1.flatten().float(), rstd_n1.flatten().float()


def fast_added_norm(
    x_nd: torch.Tensor, late_nd: torch.Tensor, gain_d: torch.Tensor, bias_d: torch.Tensor, eps: float
) -> Four:
    (n, d), wide = x_nd.shape, power_of_two(x_nd.shape[1])
    x_nd, late_nd = x_nd.contiguous(), late_nd.contiguous()
    sum_nd, y_nd = torch.empty_like(x_nd), torch.empty_like(x_nd)
    mean_n, rstd_n = (x_nd.new_empty(n, dtype=torch.float32) for _ in range(2))
    step = max(1, 4096 // wide)
    code.added_norm[(-(-n // step),)](
        x_nd, late_nd, gain_d, bias_d, sum_nd, y_nd, mean_n, rstd_n, n, d, eps, COLUMNS=wide, STEP=step,
        num_warps=max(4, wide // 1024),
    )  # fmt: skip
    return sum_nd, y_nd, mean_n, rstd_n


@torch.library.custom_op("fourfold::norm_gradient", mutates_args=())
def norm_gradient(
    dy_nd: torch.Tensor,
    beside_nd: torch.Tensor,
    x_nd: torch.Tensor,
    mean_n: torch.Tensor,
    rstd_n: torch.Tensor,
    gain_d: torch.Tensor,
) -> Pair:
    """Of a layer norm's input, with `beside_nd` added, from that of its output; summed are those of gain and bias."""
    compute = fast_norm_gradient if is_fast(x_nd) else plain_norm_gradient
    return compute(dy_nd, beside_nd, x_nd, mean_n, rstd_n, gain_d)


@norm_gradient.register_fake
def _(dy_nd: torch.Tensor, beside_nd: torch.Tensor, x_nd: torch.Tensor, *_: torch.Tensor) -> Pair:
    n, d = x_nd.shape
    parts = norm_parts(n, d)[0] if is_fast(x_nd) else 1
    return x_nd.new_empty(n, d), x_nd.new_empty(parts, 2, d, dtype=torch.float32)


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
    return dx_nd.to(x_nd.dtype), torch.stack(((wide_nd * unit_nd).sum(0), wide_nd.sum(0)))[None]


def norm_parts(n: int, d: int) -> tuple[int, int]:
    """How many programs share the rows, and how many each takes, two at a time. A Hopper GPU has 132 processors, and
    eight programs fit on one while a row is short."""
    each = max(2, -(-n // (1056 if d <= 1024 else 264)))
    each += each % 2
    return -(-n // each), each


def shared_bytes(x: torch.Tensor) -> int:
    """What a program may have for itself close to its processor."""
    return getattr(torch.cuda.get_device_properties(x.device), "shared_memory_per_block_optin", 0) if x.is_cuda else 0


def fast_norm_gradient(
    dy_nd: torch.Tensor,
    beside_nd: torch.Tensor,
    x_nd: torch.Tensor,
    mean_n: torch.Tensor,
    rstd_n: torch.Tensor,
    gain_d: torch.Tensor,
) -> Pair:
    (n, d), wide = x_nd.shape, power_of_two(x_nd.shape[1])
    dy_nd, beside_nd, x_nd = dy_nd.contiguous(), beside_nd.contiguous(), x_nd.contiguous()
    parts, each = norm_parts(n, d)
    step = 2 if 1024 < wide <= 4096 else 1
    read_bytes = 3 * step * wide * x_nd.element_size()
    dx_nd, sums_p2d = torch.empty_like(x_nd), x_nd.new_empty(parts, 2, d, dtype=torch.float32)
    code.norm_gradient[(parts,)](
        dy_nd, beside_nd, x_nd, mean_n, rstd_n, gain_d, dx_nd, sums_p2d, n, d, each, COLUMNS=wide,
        STEP=step, AHEAD=3 if 3 * read_bytes <= shared_bytes(x_nd) else 1, num_warps=2 if wide <= 1024 else 8,
    )  # fmt: skip
    return dx_nd, sums_p2d
