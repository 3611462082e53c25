from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.data.order import (
    Passes,
    Starts,
    batch_in_epoch,
    blend_order,
    epoch_of,
    epoch_order,
    sample_keys,
    samples_at,
    split_samples,
    steps_for_epochs,
)
from fourfold.errors import DataError

seeds = st.integers(0, 2**63 - 1)
shares = st.tuples(st.floats(0.01, 1000), st.floats(0, 1000), st.floats(0, 1000))


def split(
    num_tokens: int = 1000,
    max_seq_len: int = 16,
    stride: int = 16,
    ratios: tuple[float, float, float] = (8, 1, 1),
    split_by: str = "position",
    seed: int = 1,
    needs_valid: bool = False,
) -> Starts:
    return split_samples(num_tokens, max_seq_len, stride, ratios, split_by, seed, needs_valid)  # type: ignore[arg-type]


@given(st.integers(1, 3000), st.integers(1, 20), st.integers(1, 25), shares)
def test_parts_cut_by_position_share_no_token(
    num_tokens: int, max_seq_len: int, stride: int, ratios: tuple[float, float, float]
) -> None:
    try:
        parts = split(num_tokens, max_seq_len, stride, ratios)
    except DataError:
        return
    spans = np.arange(max_seq_len + 1)
    train, valid, test = (set((starts[:, None] + spans).ravel().tolist()) for starts in parts)
    assert not train & valid
    assert not valid & test
    assert not train & test
    assert max(train | valid | test) < num_tokens


def test_parts_cut_by_position_have_the_sizes_of_the_shares() -> None:
    parts = split(num_tokens=100_000, max_seq_len=1, stride=1, ratios=(949, 50, 1))
    assert [len(part) for part in parts] == [94_900 - 1, 5_000 - 1, 100 - 1]
    assert [part[0] for part in parts] == [0, 94_900, 99_900]


@pytest.mark.parametrize("ratios", [(0.9, 0.1, 0), (9, 1, 0), (90, 10, 0), (900, 100, 0)])
def test_shares_mean_the_same_in_any_unit(ratios: tuple[float, float, float]) -> None:
    for split_by in ("position", "window"):
        parts = split(num_tokens=101, max_seq_len=1, stride=1, ratios=ratios, split_by=split_by)
        assert len(parts.train) == (90 if split_by == "window" else 91 - 1)
        assert not len(parts.test)


def test_neighbouring_samples_share_one_token_when_the_stride_is_the_sequence() -> None:
    starts = split(num_tokens=65, ratios=(1, 0, 0)).train
    assert starts.tolist() == [0, 16, 32, 48]  # the last sample is tokens 48 to 64, 17 of them


def test_the_windows_of_mingpts_corpus_are_dealt_as_mingpt_deals_them() -> None:
    parts = split(num_tokens=55_769, max_seq_len=128, stride=1, ratios=(90, 10, 0), split_by="window")
    assert [len(part) for part in parts] == [50_076, 55_641 - 50_076, 0]


@given(st.integers(17, 3000), st.integers(1, 25), shares, seeds)
def test_dealing_by_window_gives_every_window_to_one_part(
    num_tokens: int, stride: int, ratios: tuple[float, float, float], seed: int
) -> None:
    try:
        parts = split(num_tokens, 16, stride, ratios, "window", seed)
    except DataError:
        return
    assert sorted(np.concatenate(parts).tolist()) == list(range(0, num_tokens - 16, stride))
    assert all((np.diff(part) > 0).all() for part in parts)


def test_the_seed_decides_which_windows_are_dealt_where() -> None:
    one, again, other = (split(stride=1, split_by="window", seed=seed).train.tolist() for seed in (1, 1, 2))
    assert one == again != other


@pytest.mark.parametrize("split_by", ["position", "window"])
def test_a_corpus_too_short_for_one_sample_is_refused(split_by: str) -> None:
    with pytest.raises(DataError) as caught:
        split(num_tokens=16, ratios=(949, 50, 1), split_by=split_by)
    for part in ("data.max_seq_len = 16", "data.split = 949,50,1", "16 tokens", "training", "a longer text"):
        assert part in str(caught.value)


def test_the_remedy_for_a_short_training_part_works() -> None:
    with pytest.raises(DataError, match=r"needs 1025 tokens .* leaves 949 of the corpus's 1000 .* = 948 or less"):
        split(max_seq_len=1024, ratios=(949, 50, 1))
    assert len(split(max_seq_len=948, ratios=(949, 50, 1)).train) == 1


@pytest.mark.parametrize("split_by", ["position", "window"])
@pytest.mark.parametrize("ratios", [(999, 0.5, 0.5), (1, 0, 0)])
def test_a_missing_validation_part_is_refused_only_if_it_is_needed(
    split_by: str, ratios: tuple[float, float, float]
) -> None:
    assert not len(split(ratios=ratios, split_by=split_by).valid)
    with pytest.raises(DataError, match=r"validation.*engine.eval_iters = 0 trains without"):
        split(ratios=ratios, split_by=split_by, needs_valid=True)


@pytest.mark.parametrize("ratios", [(0, 0, 0), (0, 1, 1), (float("inf"), 1, 1)])
def test_a_split_without_a_training_share_is_refused(ratios: tuple[float, float, float]) -> None:
    with pytest.raises(DataError, match=r"data\.split = .* gives training no share"):
        split(ratios=ratios)


def test_a_test_part_may_be_too_short() -> None:
    assert not len(split(ratios=(949, 50, 1), needs_valid=True).test)


def rows_of_step(num_samples: int, seed: int, size: int, step: int, rows: range) -> np.ndarray:
    return samples_at(step * size + np.arange(rows.start, rows.stop), num_samples, seed)


@given(seeds, st.integers(1, 200), st.integers(1, 70), st.integers(0, 2**40))
def test_data_ranks_of_any_number_make_up_the_same_global_batch(
    seed: int, num_samples: int, per_rank: int, step: int
) -> None:
    size = 12 * per_rank
    whole = rows_of_step(num_samples, seed, size, step, range(size))
    keys = sample_keys(seed, step, range(size))
    for ranks in (2, 3, 4, 12):
        share = size // ranks
        rows = [range(rank * share, (rank + 1) * share) for rank in range(ranks)]
        assert np.array_equal(np.concatenate([rows_of_step(num_samples, seed, size, step, r) for r in rows]), whole)
        assert np.array_equal(np.concatenate([sample_keys(seed, step, r) for r in rows]), keys)


@given(seeds, st.integers(1, 100), st.integers(1, 130), st.integers(0, 20))
def test_every_epoch_sees_every_sample_once_wherever_batches_end(
    seed: int, num_samples: int, global_batch_size: int, epoch: int
) -> None:
    first = epoch * num_samples // global_batch_size
    last = (epoch + 1) * num_samples // global_batch_size
    seen = np.concatenate(
        [
            rows_of_step(num_samples, seed, global_batch_size, step, range(global_batch_size))
            for step in range(first, last + 1)
        ]
    )
    begin = epoch * num_samples - first * global_batch_size
    assert sorted(seen[begin : begin + num_samples].tolist()) == list(range(num_samples))


def test_epochs_and_seeds_differ_in_their_order() -> None:
    orders = {tuple(epoch_order(50, seed, epoch).tolist()) for seed in (0, 1, 2**63 - 1) for epoch in range(4)}
    assert len(orders) == 12


def test_every_sample_is_equally_likely_at_every_place() -> None:
    counts = np.zeros((6, 6))
    for epoch in range(6000):
        counts[np.arange(6), epoch_order(6, 1234, epoch)] += 1
    assert abs(counts - 1000).max() < 5 * np.sqrt(1000 * 5 / 6)


def test_the_order_is_the_same_in_every_version() -> None:
    assert epoch_order(8, seed=1234, epoch=0).tolist() == [7, 3, 0, 1, 4, 2, 5, 6]
    assert epoch_order(8, seed=1234, epoch=1).tolist() == [0, 5, 6, 4, 2, 1, 7, 3]
    assert sample_keys(1234, 5, range(2)).tolist() == [-3571186561123708948, 7300967417487721821]


def splitmix64(state: int) -> int:
    """The published algorithm, in Python's unbounded integers."""
    mask = 2**64 - 1
    state = (state + 0x9E3779B97F4A7C15) & mask
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
    return state ^ (state >> 31)


def test_the_reference_hash_gives_the_published_numbers() -> None:
    assert splitmix64(1234567) == 6457827717110365317
    assert splitmix64(1234567 + 0x9E3779B97F4A7C15) == 3203168211198807973


@given(seeds, st.integers(0, 2**40), st.integers(0, 2**20))
def test_a_sample_key_is_the_hash_of_seed_step_and_row(seed: int, step: int, row: int) -> None:
    expected = splitmix64((splitmix64((splitmix64(seed) + step) % 2**64) + row) % 2**64)
    assert sample_keys(seed, step, range(row, row + 1)).view(np.uint64).tolist() == [expected]


def test_sample_keys_do_not_collide_over_seeds_steps_and_rows() -> None:
    keys = np.concatenate([sample_keys(seed, step, range(64)) for seed in range(20) for step in range(100)])
    assert keys.dtype == np.int64
    assert len(np.unique(keys)) == len(keys)
    bits = (keys[:, None].view(np.uint64) >> np.arange(64, dtype=np.uint64)) & np.uint64(1)
    assert abs(bits.mean(axis=0) - 0.5).max() < 5 * 0.5 / np.sqrt(len(keys))


@given(st.integers(1, 100), st.integers(1, 130), st.integers(0, 50))
def test_epochs_end_with_the_step_that_shows_their_last_sample(
    num_samples: int, global_batch_size: int, epochs: int
) -> None:
    steps = steps_for_epochs(Passes(num_samples), global_batch_size, epochs)
    assert steps * global_batch_size >= epochs * num_samples
    assert (steps - 1) * global_batch_size < epochs * num_samples


@given(st.integers(1, 40), st.integers(1, 60))
def test_batches_are_counted_from_zero_in_each_epoch(num_samples: int, global_batch_size: int) -> None:
    previous_epoch, expected = 0, 0
    for step in range(60):
        epoch = epoch_of(Passes(num_samples), global_batch_size, step)
        expected = expected if epoch == previous_epoch else 0
        assert batch_in_epoch(Passes(num_samples), global_batch_size, step) == expected
        previous_epoch, expected = epoch, expected + 1


@pytest.mark.parametrize("first", ["0.7", "0.123456789012", "0.987654321098", "0.12345678901234567"])
def test_a_longer_run_goes_on_with_the_order_of_a_shorter_one(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = [Fraction(first), 1 - Fraction(first)]
    # as if 64 bits were reached a thousand times sooner
    monkeypatch.setattr("fourfold.data.order.ORDER_BLOCK", 512)
    longest = blend_order(weights, 20_000)
    for count in (1, 511, 512, 513, 9_999):
        assert np.array_equal(blend_order(weights, count), longest[:count])
    due = np.arange(1, 20_001) * float(weights[1])
    assert abs(np.cumsum(longest) - due).max() < 1


def test_a_blend_of_two_with_long_weights_does_not_overflow() -> None:
    weights = [Fraction("0.123456789012"), 1 - Fraction("0.123456789012")]
    order = blend_order(weights, 5_000_000)  # beyond 2**63 with the old products
    share, period = 123456789012, 10**12
    for count in (4_611_686, 4_700_001, 5_000_000):
        assert count - int(order[:count].sum()) == (2 * share * count + period) // (2 * period)
