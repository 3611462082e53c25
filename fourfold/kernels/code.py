"""Triton's code. What each function computes is said by the plain version beside its caller."""

import triton
import triton.language as tl

LOWEST = tl.constexpr(-1e30)  # in place of -inf, whose difference with itself is not a number
LOG2_E = tl.constexpr(1.4426950408889634)


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
def rows_at_once(
    logits,
    targets,
    top,
    total,
    picked,
    weight,
    stride,
    stored,
    WIDTH: tl.constexpr,
    IGNORED: tl.constexpr,
    LANES: tl.constexpr,
    EACH: tl.constexpr,
):
    """Statistics of one row per program, then its gradient in its place, from the end, of which the cache still has
    the most. What is not whole chunks of the row comes last and first."""
    CHUNK: tl.constexpr = LANES * EACH
    WHOLE: tl.constexpr = WIDTH // CHUNK * CHUNK
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    target = tl.load(targets + row)
    is_here = (target >= 0) & (target < WIDTH)
    # read by all before any may write over it: the reductions below wait for all
    found = tl.load(logits + target, mask=is_here, other=0.0).to(tl.float32)
    places = tl.arange(0, LANES)[:, None] * EACH + tl.arange(0, EACH)[None, :]
    tops = tl.full([LANES], LOWEST, tl.float32)
    sums = tl.zeros([LANES], tl.float32)
    for begin in range(0, WHOLE, CHUNK):
        x = tl.load(logits + begin + places).to(tl.float32) * LOG2_E
        new = tl.maximum(tops, tl.max(x, 1))
        sums = sums * tl.exp2(tops - new) + tl.sum(tl.exp2(x - new[:, None]), 1)
        tops = new
    at = WHOLE + places
    x = tl.load(logits + at, mask=at < WIDTH, other=LOWEST).to(tl.float32) * LOG2_E
    new = tl.maximum(tops, tl.max(x, 1))
    sums = sums * tl.exp2(tops - new) + tl.sum(tl.exp2(x - new[:, None]), 1)
    row_top = tl.max(new, 0)
    row_sum = tl.sum(sums * tl.exp2(new - row_top), 0)
    tl.store(top + row, row_top / LOG2_E)
    tl.store(total + row, row_sum)
    tl.store(picked + row, found)
    log_sum = row_top + tl.log2(row_sum)
    factor = tl.load(weight)
    counts = target != IGNORED  # where not, the gradient is zero even of what is not a number
    for begin in range(WHOLE, stored, CHUNK):
        at = begin + places
        x = tl.load(logits + at, mask=at < WIDTH, other=LOWEST).to(tl.float32) * LOG2_E
        gradient = tl.where(counts & (at < WIDTH), tl.exp2(x - log_sum) * factor, 0.0)
        tl.store(logits + at, gradient.to(logits.dtype.element_ty), mask=at < stored)
    for begin in range(0, WHOLE, CHUNK):
        at = (WHOLE - CHUNK - begin) + places
        x = tl.load(logits + at).to(tl.float32) * LOG2_E
        gradient = tl.where(counts, tl.exp2(x - log_sum) * factor, 0.0)
        tl.store(logits + at, gradient.to(logits.dtype.element_ty))
    tl.debug_barrier()  # one more number to be written, over what somebody wrote
    at_target = (tl.exp2(found * LOG2_E - log_sum) - 1.0) * factor
    tl.store(logits + target, at_target.to(logits.dtype.element_ty), mask=is_here)


@triton.jit
def gelu_gradient(
    dy,
    x,
    dx,
    sums,
    rows,
    columns,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_EVEN: tl.constexpr,
):
    """One program: ROWS rows of COLUMNS columns, STEP rows at a time. IS_EVEN: nothing is left over by these."""
    begin = tl.program_id(0).to(tl.int64) * ROWS
    first = begin * columns
    dy += first
    x += first
    dx += first
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([STEP, COLUMNS], tl.float32)
    for step in range(0, ROWS, STEP):
        r = step + tl.arange(0, STEP)
        at = r[:, None] * columns + c[None, :]
        if IS_EVEN:
            u = tl.load(x + at).to(tl.float32)
            g = tl.load(dy + at).to(tl.float32)
        else:
            mask = (begin + r < rows)[:, None] & (c < columns)[None, :]
            u = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
            g = tl.load(dy + at, mask=mask, other=0.0).to(tl.float32)
        gate = 1.0 / (1.0 + tl.exp(-1.5957691216057308 * (u + 0.044715 * u * u * u)))
        slope = gate + u * gate * (1.0 - gate) * 1.5957691216057308 * (1.0 + 0.134145 * u * u)
        out = (g * slope).to(dx.dtype.element_ty)
        if IS_EVEN:
            tl.store(dx + at, out)
        else:
            tl.store(dx + at, out, mask=mask)
        total += out.to(tl.float32)
    tl.store(sums + tl.program_id(0) * columns + c, tl.sum(total, 0), mask=c < columns)


@triton.jit
def joined_heads(
    dq,
    dk,
    dv,
    out,
    sums,
    rows,
    heads,
    length,
    q_b,
    q_h,
    q_t,
    k_b,
    k_h,
    k_t,
    v_b,
    v_h,
    v_t,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    IS_EVEN: tl.constexpr,
):
    """One program: ROWS rows of one head, STEP rows at a time. COLUMNS is the power of two that holds its WIDTH.
    IS_EVEN: each program's rows are of one sequence, and nothing is left over."""
    head = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0).to(tl.int64) * ROWS
    c = tl.arange(0, COLUMNS)
    q_total = tl.zeros([STEP, COLUMNS], tl.float32)
    k_total = tl.zeros([STEP, COLUMNS], tl.float32)
    v_total = tl.zeros([STEP, COLUMNS], tl.float32)
    for step in range(0, ROWS, STEP):
        if IS_EVEN:
            b = first // length
            t = (first % length) + step + tl.arange(0, STEP)[:, None]
            q = tl.load(dq + b * q_b + head * q_h + t * q_t + c[None, :])
            k = tl.load(dk + b * k_b + head * k_h + t * k_t + c[None, :])
            v = tl.load(dv + b * v_b + head * v_h + t * v_t + c[None, :])
            at = out + ((first + step + tl.arange(0, STEP)[:, None]) * heads + head) * (3 * WIDTH) + c[None, :]
            tl.store(at, q)
            tl.store(at + WIDTH, k)
            tl.store(at + 2 * WIDTH, v)
        else:
            r = first + step + tl.arange(0, STEP)
            b = (r // length)[:, None]
            t = (r % length)[:, None]
            mask = (r < rows)[:, None] & (c < WIDTH)[None, :]
            q = tl.load(dq + b * q_b + head * q_h + t * q_t + c[None, :], mask=mask, other=0.0)
            k = tl.load(dk + b * k_b + head * k_h + t * k_t + c[None, :], mask=mask, other=0.0)
            v = tl.load(dv + b * v_b + head * v_h + t * v_t + c[None, :], mask=mask, other=0.0)
            at = out + (r[:, None] * heads + head) * (3 * WIDTH) + c[None, :]
            tl.store(at, q, mask=mask)
            tl.store(at + WIDTH, k, mask=mask)
            tl.store(at + 2 * WIDTH, v, mask=mask)
        q_total += q.to(tl.float32)
        k_total += k.to(tl.float32)
        v_total += v.to(tl.float32)
    sums += (tl.program_id(0) * heads + head) * (3 * WIDTH)
    tl.store(sums + c, tl.sum(q_total, 0), mask=c < WIDTH)
    tl.store(sums + WIDTH + c, tl.sum(k_total, 0), mask=c < WIDTH)
    tl.store(sums + 2 * WIDTH + c, tl.sum(v_total, 0), mask=c < WIDTH)


@triton.jit
def added_norm(
    x,
    late,
    gain,
    bias,
    total,
    out,
    mean,
    rstd,
    rows,
    columns,
    eps,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):
    """One program: STEP rows. COLUMNS is the power of two that holds them all."""
    r = tl.program_id(0).to(tl.int64) * STEP + tl.arange(0, STEP)
    c = tl.arange(0, COLUMNS)
    mask = (r < rows)[:, None] & (c < columns)[None, :]
    at = r[:, None] * columns + c[None, :]
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    value += tl.load(late + at, mask=mask, other=0.0).to(tl.float32)
    rounded = value.to(total.dtype.element_ty)
    tl.store(total + at, rounded, mask=mask)
    value = rounded.to(tl.float32)
    m = tl.sum(value, 1) / columns
    centred = tl.where(mask, value - m[:, None], 0.0)
    s = tl.rsqrt(tl.sum(centred * centred, 1) / columns + eps)
    g = tl.load(gain + c, mask=c < columns, other=0.0).to(tl.float32)[None, :]
    b = tl.load(bias + c, mask=c < columns, other=0.0).to(tl.float32)[None, :]
    tl.store(out + at, (centred * s[:, None] * g + b).to(out.dtype.element_ty), mask=mask)
    tl.store(mean + r, m, mask=r < rows)
    tl.store(rstd + r, s, mask=r < rows)


@triton.jit
def norm_gradient(
    dy,
    beside,
    x,
    mean,
    rstd,
    gain,
    dx,
    sums,
    rows,
    columns,
    each,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """One program: `each` rows, STEP at a time, read AHEAD of their turn. COLUMNS is the power of two that holds
    them all."""
    begin = tl.program_id(0).to(tl.int64) * each
    end = tl.minimum(begin + each, rows)
    c = tl.arange(0, COLUMNS)
    is_column = (c < columns)[None, :]
    g = tl.load(gain + c, mask=c < columns, other=0.0).to(tl.float32)[None, :]
    gain_total = tl.zeros([STEP, COLUMNS], tl.float32)
    bias_total = tl.zeros([STEP, COLUMNS], tl.float32)
    for step in tl.range(0, each, STEP, num_stages=AHEAD):
        r = begin + step + tl.arange(0, STEP)
        is_row = r < end
        mask = is_row[:, None] & is_column
        at = r[:, None] * columns + c[None, :]
        value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        d = tl.load(dy + at, mask=mask, other=0.0).to(tl.float32)
        other = tl.load(beside + at, mask=mask, other=0.0).to(tl.float32)
        m = tl.load(mean + r, mask=is_row, other=0.0)[:, None]
        s = tl.load(rstd + r, mask=is_row, other=0.0)[:, None]
        unit = tl.where(mask, (value - m) * s, 0.0)
        scaled = d * g
        along = tl.sum(scaled * unit, 1)[:, None] / columns
        middle = tl.sum(scaled, 1)[:, None] / columns
        out = (scaled - middle - unit * along) * s + other
        tl.store(dx + at, out.to(dx.dtype.element_ty), mask=mask)
        gain_total += d * unit
        bias_total += d
    sums += tl.program_id(0).to(tl.int64) * (2 * columns)
    tl.store(sums + c, tl.sum(gain_total, 0), mask=c < columns)
    tl.store(sums + columns + c, tl.sum(bias_total, 0), mask=c < columns)


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
