"""Triton's code and the plain versions against float64: on a GPU where there is one, else by Triton's interpreter."""

import pytest
import torch

from fourfold.kernels import cross_entropy, float8, fused, update
from fourfold.model.linear import split_heads
from fourfold.model.loss import IGNORED
from tests.require import require_module

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def triton() -> None:
    require_module("triton")


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)


@pytest.mark.parametrize("statistics", [cross_entropy.row_statistics, cross_entropy.fast_row_statistics])
@pytest.mark.parametrize("first", [0, 5000])
def test_row_statistics(statistics, first: int) -> None:
    logits_nv = 30 * normal(6, 5120)
    width = 5003
    targets_n = torch.tensor([0, 5002, 5000, 9000, IGNORED, 10002], device=DEVICE)
    exact_nv = logits_nv[:, :width].double()
    top_n, total_n, picked_n = statistics(logits_nv, targets_n, first, width)
    log_sum_n = top_n.double() + total_n.double().log()
    torch.testing.assert_close(log_sum_n, exact_nv.logsumexp(1), rtol=1e-6, atol=0)
    here = [target - first if 0 <= target - first < width else None for target in targets_n.tolist()]
    expected = [0.0 if column is None else logits_nv[row, column].item() for row, column in enumerate(here)]
    assert picked_n.tolist() == expected and None in here


@pytest.mark.parametrize("statistics", [cross_entropy.row_statistics, cross_entropy.fast_row_statistics])
def test_a_share_that_is_all_padding_adds_nothing(statistics) -> None:
    top_n, total_n, picked_n = statistics(normal(3, 128), torch.tensor([1, 2, IGNORED], device=DEVICE), 200, 0)
    assert top_n.lt(-1e29).all() and total_n.eq(0).all() and picked_n.eq(0).all()


@pytest.mark.parametrize("gradient_", [cross_entropy.row_gradient_, cross_entropy.fast_row_gradient_])
def test_row_gradient(gradient_) -> None:
    logits_nv = normal(4, 5120)
    targets_n = torch.tensor([0, 5002, IGNORED, 9000], device=DEVICE)  # the last is in another share
    top_n, sum_n = logits_nv.amax(1), logits_nv[:, 0].exp() + 5000
    log_sum_n = top_n.double() + sum_n.double().log()
    statistics = cross_entropy.RowStatistics(top_n, sum_n, top_n)
    expected_nv = (logits_nv.double() - log_sum_n[:, None]).exp()
    expected_nv[0, 0] -= 1
    expected_nv[1, 5002] -= 1
    expected_nv[2] = 0
    expected_nv[:, 5003:] = 0
    expected_nv *= 0.37
    weight = torch.tensor(0.37, device=DEVICE)
    found_nv = gradient_(logits_nv, targets_n, statistics, weight, 0, 5003, IGNORED)
    assert found_nv is logits_nv
    torch.testing.assert_close(found_nv.double(), expected_nv, rtol=1e-5, atol=1e-9)
    assert found_nv[:, 5003:].eq(0).all() and found_nv[2].eq(0).all()


@pytest.mark.parametrize("at_once_", [cross_entropy.rows_at_once_, cross_entropy.fast_rows_at_once_])
@pytest.mark.parametrize(("width", "stored"), [(20003, 20480), (65, 128), (100, 10000)])
def test_rows_at_once(at_once_, width: int, stored: int) -> None:
    """With more than lanes read at a time, less, and more padding than that."""
    logits_nv = 30 * normal(4, stored)
    targets_n = torch.tensor([0, width - 1, IGNORED, width // 2], device=DEVICE)
    exact_nv = logits_nv[:, :width].double().requires_grad_()
    logits_nv[2, 7] = torch.inf  # which does not count
    losses_n = torch.nn.functional.cross_entropy(exact_nv, targets_n, reduction="none", ignore_index=IGNORED)
    (0.37 * losses_n.sum()).backward()
    weight = torch.tensor(0.37, device=DEVICE)
    top_n, total_n, picked_n = at_once_(logits_nv, targets_n, weight, width, IGNORED)
    counts_n = targets_n != IGNORED
    found_n = (top_n.double() + total_n.double().log() - picked_n)[counts_n]
    torch.testing.assert_close(found_n, losses_n.detach()[counts_n], rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(logits_nv[:, :width].double(), exact_nv.grad, rtol=1e-4, atol=1e-9)
    assert logits_nv[:, width:].eq(0).all() and logits_nv[2].eq(0).all() and picked_n[2] == 0


@pytest.mark.parametrize("gradient", [fused.plain_gelu_gradient, fused.fast_gelu_gradient])
@pytest.mark.parametrize("shape", [(600, 200), (256, 128), (3, 500)])
def test_gelu_gradient(gradient, shape: tuple[int, int]) -> None:
    x_nf, dy_nf = 3 * normal(*shape), normal(*shape[::-1]).T
    exact_nf = x_nf.double().requires_grad_()
    torch.nn.functional.gelu(exact_nf, approximate="tanh").backward(dy_nf.double())
    dx_nf, sums_pf = gradient(dy_nf, x_nf)
    torch.testing.assert_close(dx_nf.double(), exact_nf.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(sums_pf.double().sum(0), exact_nf.grad.sum(0), rtol=1e-5, atol=1e-4)
    assert gradient(dy_nf.bfloat16(), x_nf.bfloat16())[0].dtype == torch.bfloat16


@pytest.mark.parametrize("norm", [fused.plain_added_norm, fused.fast_added_norm])
@pytest.mark.parametrize("shape", [(131, 48), (3, 1100)])
def test_added_norm(norm, shape: tuple[int, int]) -> None:
    x_nd, late_nd = normal(2, *shape).unbind()
    gain_d, bias_d = normal(2, shape[1]).unbind()
    found = norm(x_nd, late_nd, gain_d, bias_d, 1e-3)
    sum_nd = x_nd.double() + late_nd
    y_nd, mean_n1, rstd_n1 = torch.native_layer_norm(sum_nd, [shape[1]], gain_d.double(), bias_d.double(), 1e-3)
    for one, exact in zip(found, (sum_nd, y_nd, mean_n1[:, 0], rstd_n1[:, 0]), strict=True):
        torch.testing.assert_close(one.double(), exact, rtol=1e-5, atol=1e-5)
    # the norm is of the sum as it is rounded
    rounded_nd, y_nd, *_ = norm(*(tensor.bfloat16() for tensor in (x_nd, late_nd, gain_d, bias_d)), 1e-3)
    again_nd, *_ = torch.native_layer_norm(rounded_nd, [shape[1]], gain_d.bfloat16(), bias_d.bfloat16(), 1e-3)
    torch.testing.assert_close(y_nd, again_nd)


@pytest.mark.parametrize("gradient", [fused.plain_norm_gradient, fused.fast_norm_gradient])
@pytest.mark.parametrize("shape", [(2115, 48), (64, 256), (530, 1100)])
def test_norm_gradient(gradient, shape: tuple[int, int]) -> None:
    x_nd, dy_nd, beside_nd = normal(3, *shape).unbind()
    x_nd, gain_d = 2 * x_nd + 1, normal(shape[1])
    exact_nd, exact_gain_d = x_nd.double().requires_grad_(), gain_d.double().requires_grad_()
    exact_bias_d = torch.zeros_like(exact_gain_d, requires_grad=True)
    y_nd, mean_n1, rstd_n1 = torch.native_layer_norm(exact_nd, [shape[1]], exact_gain_d, exact_bias_d, 1e-5)
    y_nd.backward(dy_nd.double())
    statistics = mean_n1.detach().float()[:, 0], rstd_n1.detach().float()[:, 0]
    dx_nd, sums_p2d = gradient(dy_nd, beside_nd, x_nd, *statistics, gain_d)
    torch.testing.assert_close(dx_nd.double(), exact_nd.grad + beside_nd, rtol=1e-4, atol=1e-5)
    expected_2d = torch.stack((exact_gain_d.grad, exact_bias_d.grad))
    torch.testing.assert_close(sums_p2d.double().sum(0), expected_2d, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("join", [fused.plain_joined_heads, fused.fast_joined_heads])
@pytest.mark.parametrize(("b", "h", "t", "k"), [(2, 3, 150, 16), (1, 2, 7, 24), (2, 2, 256, 16)])
def test_joined_heads(join, b: int, h: int, t: int, k: int) -> None:
    as_made = normal(b, h, t, k), normal(b, t, h, k).transpose(1, 2), normal(b, h, k, t).transpose(2, 3)
    qkv_btf = torch.zeros(b, t, h * 3 * k, device=DEVICE, requires_grad=True)
    torch.autograd.backward(split_heads(qkv_btf, k), as_made)
    dqkv_nf, sums_pf = join(*as_made)
    assert dqkv_nf.equal(qkv_btf.grad.flatten(0, 1))
    torch.testing.assert_close(sums_pf.double().sum(0), dqkv_nf.double().sum(0), rtol=1e-5, atol=1e-4)


def test_what_the_compiler_is_told_of_the_kernels_is_so() -> None:
    x_nd, gain_d = normal(600, 48).bfloat16(), normal(48).bfloat16()
    statistics = normal(2, 600).unbind()
    heads = normal(3, 2, 3, 150, 16).bfloat16().unbind()
    for operation, given in (
        (fused.gelu_gradient, (x_nd, x_nd)),
        (fused.joined_heads, heads),
        (fused.added_norm, (x_nd, x_nd, gain_d, gain_d, 1e-5)),
        (fused.norm_gradient, (x_nd, x_nd, x_nd, *statistics, gain_d)),
    ):
        torch.library.opcheck(operation, given, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("is_skipped", [False, True])
def test_update_is_adamw(is_skipped: bool) -> None:
    weight, gradient, mean, square = normal(4, 3000).unbind()
    square = square.abs()
    before = [tensor.clone() for tensor in (weight, mean, square)]
    beta1, beta2, epsilon, decay, lr, divisor, step = 0.9, 0.95, 1e-8, 0.1, 1e-2, 3.0, 7
    numbers = torch.tensor([divisor, lr, 1 - beta1**step, 1 - beta2**step, float(is_skipped)], device=DEVICE)
    update.update_(weight, gradient, mean, square, numbers, (beta1, beta2), epsilon, decay)
    g, (w, m, v) = gradient.double() / divisor, (tensor.double() for tensor in before)
    m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
    w = w * (1 - lr * decay) - lr * (m / (1 - beta1**step)) / ((v / (1 - beta2**step)).sqrt() + epsilon)
    for found, expected, old in zip((weight, mean, square), (w, m, v), before, strict=True):
        if is_skipped:
            assert found.equal(old)
        else:
            torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("cast", [float8.plain_cast, float8.fast_cast])
@pytest.mark.parametrize("dtype", [float8.FORWARD, float8.BACKWARD], ids=str)
@pytest.mark.parametrize("wide", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(48, 80), (130, 70), (256, 384)])
def test_casts_are_the_nearest_numbers_of_eight_bits(
    cast, dtype: torch.dtype, wide: torch.dtype, shape: tuple[int, int]
) -> None:
    x_rc = 100 * normal(*shape).to(wide)
    if cast is float8.fast_cast and DEVICE == "cpu":
        x_rc = x_rc.to(dtype).to(wide)  # the interpreter rounds to eight bits wrongly, so nothing is left to round
    scale = float8.scale_of(x_rc, dtype)
    cast_rc, turned_cr = cast(x_rc, scale, dtype, True, True, False)
    assert cast_rc.dtype == turned_cr.dtype == dtype and turned_cr.is_contiguous()
    assert turned_cr.float().equal(cast_rc.float().T)
    exact_rc = x_rc.double() * scale.double()
    assert exact_rc.abs().max() <= torch.finfo(dtype).max < 2 * exact_rc.abs().max()
    assert (cast_rc.double() - exact_rc).abs().le(half_step(exact_rc, dtype)).all()
    cut_off_rc, _ = cast(x_rc, scale * 8, dtype, True, False, False)
    assert cut_off_rc.float().abs().max() == torch.finfo(dtype).max


def half_step(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Half of what neighbouring numbers of a format differ by."""
    kind = torch.finfo(dtype)
    power = torch.ldexp(torch.ones_like(exact), exact.abs().clamp(kind.smallest_normal).frexp().exponent - 1)
    return power * kind.eps / 2


@pytest.mark.parametrize("cast", [float8.plain_cast, float8.fast_cast])
def test_casts_with_gelu(cast) -> None:
    x_rc, dtype = normal(32, 48).bfloat16(), float8.FORWARD
    scale = torch.tensor(64.0, device=DEVICE)
    empty, turned_cr = cast(x_rc, scale, dtype, False, True, True)
    exact_rc = torch.nn.functional.gelu(x_rc.double(), approximate="tanh") * 64
    # the interpreter may round to the wrong neighbour, or at worst to half the number
    allowed = exact_rc.abs() * 0.55 + 1 if DEVICE == "cpu" else 1.01 * half_step(exact_rc, dtype)
    assert (turned_cr.double().T - exact_rc).abs().le(allowed).all() and empty.numel() == 0


def test_products_in_eight_bits_are_near_those_in_float64() -> None:
    a_rk, b_ck = normal(64, 256), normal(32, 256)
    bias_c = normal(32)
    scales = float8.scale_of(a_rk, float8.FORWARD), float8.scale_of(b_ck, float8.FORWARD)
    casts = [
        float8.cast(x.bfloat16(), s, float8.FORWARD).as_it_lies_rc for x, s in zip((a_rk, b_ck), scales, strict=True)
    ]
    found_rc = float8.multiply(casts[0], casts[1].T, *scales, torch.bfloat16, bias_c.bfloat16())
    expected_rc = a_rk.double() @ b_ck.double().T + bias_c
    assert (found_rc - expected_rc).norm() / expected_rc.norm() < 0.05
    exact_rc = (casts[0].double() / scales[0]) @ (casts[1].double() / scales[1]).T
    found_rc = float8.multiply(casts[0], casts[1].T, *scales, torch.float32)
    # a matrix unit for 8 bits adds up with fewer bits than float32 has
    assert (found_rc - exact_rc).norm() / exact_rc.norm() < (1e-6 if DEVICE == "cpu" else 1e-3)


def test_zeros_are_not_scaled() -> None:
    assert float8.scale_of(torch.zeros(2, 16, device=DEVICE), float8.FORWARD).item() == 1.0
