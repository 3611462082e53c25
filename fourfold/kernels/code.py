"""Triton's code. What each function computes is said by the plain version beside its caller."""

import triton
import triton.language as tl

LOWEST = tl.constexpr(-1e30)  # in place of -inf, whose difference with itself is not a number


@triton.jit
def row_statistics(
    logits, targets, top, total, picked, stride, first, WIDTH: tl.constexpr, LANES: tl.constexpr, EACH: tl.constexpr
):
    """One row per program. Each lane keeps its own maximum and sum over what it reads, EACH neighbours at a time, so
    that lanes meet only once, at the end, and nearly one exponential per logit is enough."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    column = tl.load(targets + row) - first
    places = tl.arange(0, LANES)[:, None] * EACH + tl.arange(0, EACH)[None, :]
    tops = tl.full([LANES], LOWEST, tl.float32)
    sums = tl.zeros([LANES], tl.float32)
    for begin in range(0, WIDTH, LANES * EACH):
        at = begin + places
        x = tl.load(logits + at, mask=at < WIDTH, other=LOWEST).to(tl.float32)
        new = tl.maximum(tops, tl.max(x, 1))
        sums = sums * tl.exp(tops - new) + tl.sum(tl.exp(x - new[:, None]), 1)
        tops = new
    row_top = tl.max(tops, 0)
    tl.store(top + row, row_top)
    # lanes that saw nothing have LOWEST, and vanish here
    tl.store(total + row, tl.sum(sums * tl.exp(tops - row_top), 0))
    is_here = (column >= 0) & (column < WIDTH)
    tl.store(picked + row, tl.load(logits + column, mask=is_here, other=0.0).to(tl.float32))


@triton.jit
def row_gradient(
    logits, targets, top, total, weight, stride, first, width, stored, IGNORED: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    target = tl.load(targets + row)
    log_sum = tl.load(top + row) + tl.log(tl.load(total + row))
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + at, mask=at < width, other=LOWEST).to(tl.float32)
    gradient = tl.exp(x - log_sum) - tl.where(at == target - first, 1.0, 0.0)
    gradient = tl.where((at < width) & (target != IGNORED), gradient * tl.load(weight), 0.0)
    tl.store(logits + at, gradient.to(logits.dtype.element_ty), mask=at < stored)


@triton.jit
def adamw_update(weight, gradient, mean, square, numbers, size, beta1, beta2, epsilon, decay, BLOCK: tl.constexpr):
    """`numbers`: the divisor of gradients, the learning rate, two bias corrections, and 1 where the step is skipped."""
    if tl.load(numbers + 4) != 0.0:
        return
    divisor = tl.load(numbers)
    rate = tl.load(numbers + 1)
    correction1 = tl.load(numbers + 2)
    correction2 = tl.load(numbers + 3)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    w = tl.load(weight + at, mask=mask)
    g = tl.load(gradient + at, mask=mask).to(tl.float32) / divisor
    m = tl.load(mean + at, mask=mask)
    v = tl.load(square + at, mask=mask)
    w -= rate * decay * w
    m += (1.0 - beta1) * (g - m)
    v = beta2 * v + (1.0 - beta2) * g * g
    w -= rate / correction1 * m / (tl.sqrt(v / correction2) + epsilon)
    tl.store(weight + at, w, mask=mask)
    tl.store(mean + at, m, mask=mask)
    tl.store(square + at, v, mask=mask)


@triton.jit
def cast_both_ways(
    x,
    scale,
    out,
    turned,
    rows,
    columns,
    MOST: tl.constexpr,
    HAS_GELU: tl.constexpr,
    HAS_OUT: tl.constexpr,
    HAS_TURNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Scaled, cut off at the format's end and rounded; as it lies and turned, from one read."""
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (r < rows)[:, None] & (c < columns)[None, :]
    values = tl.load(x + r[:, None] * columns + c[None, :], mask=mask, other=0.0).to(tl.float32)
    if HAS_GELU:
        values *= tl.sigmoid(1.5957691216057308 * (values + 0.044715 * values * values * values))
    values *= tl.load(scale)
    values = tl.where(values > MOST, MOST, tl.where(values < -MOST, -MOST, values))  # a NaN stays one
    cast = values.to(out.dtype.element_ty)
    if HAS_OUT:
        tl.store(out + r[:, None] * columns + c[None, :], cast, mask=mask)
    if HAS_TURNED:
        tl.store(turned + c[:, None] * rows + r[None, :], tl.trans(cast), mask=tl.trans(mask))
