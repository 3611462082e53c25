import math
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.config.schema import Optimizer
from fourfold.optim.schedule import learning_rate

Style = Literal["cosine", "linear", "constant"]
# the rates of seed 002: 1 % of 320,000 updates of warm-up, which are 3,200
SEED = Optimizer(max_lr=1.5e-4, min_lr=1e-5, warmup_rate=0.01, decay_steps=320_000)


def schedule(style: Style, warmup_rate: float = 0.1, decay_steps: int = 100) -> Optimizer:
    return Optimizer(max_lr=1e-3, min_lr=1e-4, warmup_rate=warmup_rate, decay_steps=decay_steps, lr_decay_style=style)


@pytest.mark.parametrize(
    ("update", "rate"),
    [
        (1, 1.5e-4 / 3200),
        (1600, 0.75e-4),
        (3200, 1.5e-4),
        (3201, 1e-5 + 1.4e-4 * (1 + math.cos(math.pi / 316_800)) / 2),
        (3200 + 158_400, (1.5e-4 + 1e-5) / 2),
        (320_000, 1e-5),
        (320_001, 1e-5),
        (10**9, 1e-5),
    ],
)
def test_cosine_is_the_published_formula(update: int, rate: float) -> None:
    assert learning_rate(update, SEED) == pytest.approx(rate, rel=1e-12)


@pytest.mark.parametrize(
    ("style", "rates"),
    [
        ("cosine", {1: 1e-4, 10: 1e-3, 55: 5.5e-4, 100: 1e-4, 101: 1e-4, 500: 1e-4}),
        ("linear", {1: 1e-4, 10: 1e-3, 28: 8.2e-4, 55: 5.5e-4, 91: 1.9e-4, 100: 1e-4, 101: 1e-4, 500: 1e-4}),
        ("constant", {1: 1e-4, 5: 5e-4, 10: 1e-3, 11: 1e-3, 100: 1e-3, 101: 1e-3, 500: 1e-3}),
    ],
)
def test_styles_differ_only_after_warm_up(style: Style, rates: dict[int, float]) -> None:
    assert {update: learning_rate(update, schedule(style)) for update in rates} == pytest.approx(rates, rel=1e-12)


@pytest.mark.parametrize("style", ["cosine", "linear", "constant"])
def test_no_warm_up_starts_next_to_the_full_rate(style: Style) -> None:
    first = learning_rate(1, schedule(style, warmup_rate=0.0))
    assert 0.99e-3 < first <= 1e-3


def test_a_warm_up_of_less_than_one_update_is_none() -> None:
    assert learning_rate(1, schedule("constant", warmup_rate=0.001)) == 1e-3


def test_a_run_that_only_warms_up_ends_at_the_full_rate() -> None:
    optimizer = schedule("constant", warmup_rate=1.0)
    assert learning_rate(50, optimizer) == pytest.approx(0.5e-3)
    assert learning_rate(100, optimizer) == learning_rate(101, optimizer) == 1e-3


@given(
    style=st.sampled_from(["cosine", "linear", "constant"]),
    warmup_rate=st.floats(0.0, 0.99),
    decay_steps=st.integers(1, 10**6),
    update=st.integers(1, 2 * 10**6),
)
def test_every_rate_lies_between_its_bounds_and_never_rises_after_warm_up(
    style: Style, warmup_rate: float, decay_steps: int, update: int
) -> None:
    optimizer = schedule(style, warmup_rate, decay_steps)
    now, then = learning_rate(update, optimizer), learning_rate(update + 1, optimizer)
    assert 0.0 < now <= 1e-3 * (1 + 1e-12)
    if update > warmup_rate * decay_steps:
        assert then <= now * (1 + 1e-12)
        assert now >= 1e-4 * (1 - 1e-12)
    elif update + 1 <= warmup_rate * decay_steps:
        assert then > now
