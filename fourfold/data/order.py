"""Which samples exist, and in which order they are seen. Pure functions of integers; no text, no tensors.

A sample is a span of max_seq_len + 1 tokens, named by its start. The order is a function of (seed, step) alone: rank,
layout, worker count and what ran before do not enter, so a run resumes from one integer. Only arithmetic that numpy
keeps across versions is used (a bit generator's raw words and a stable sort, not `Generator.permutation`).
"""

from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise
from math import isfinite, lcm
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from fourfold.errors import DataError

Ints = npt.NDArray[np.int64]

# Streams of random words under one seed; a new use takes a new number, so that it never repeats another's draws.
STREAM_EPOCH_ORDER = 0
STREAM_SPLIT = 1
STREAM_DOCUMENTS = 2
STREAM_SAMPLES = 3


class Passes(NamedTuple):
    """How many samples a pass has: after e passes, (e * length - overlap) // stride have been seen.

    A list of n samples is Passes(n). Samples of seq + 1 tokens cut from a stream that repeats its T tokens, neighbours
    sharing one, are Passes(T, seq, 1): Megatron's rule for the number of epochs.
    """

    length: int
    stride: int = 1
    overlap: int = 0

    def samples(self, epochs: int) -> int:
        """Samples of the first so many passes."""
        return max(0, (epochs * self.length - self.overlap) // self.stride)

    def epoch_of(self, sample: int) -> int:
        """The pass in which a sample is seen, both counted from 0."""
        return -(-((sample + 1) * self.stride + self.overlap) // self.length) - 1


class Starts(NamedTuple):
    """Start positions of each part's samples, ascending."""

    train: Ints
    valid: Ints
    test: Ints


def split_samples(
    num_tokens: int,
    max_seq_len: int,
    stride: int,
    split: tuple[float, float, float],
    split_by: Literal["position", "window"],
    seed: int,
    needs_valid: bool,
) -> Starts:
    """The samples of training, validation and test.

    A part without a sample is refused for training, and for validation if it is needed; the test part may be empty.
    """
    needed = {"training": 0, "validation": 1} if needs_valid else {"training": 0}
    for name, part in needed.items():
        if not (split[part] > 0 and all(isfinite(share) for share in split)):
            raise DataError(
                f"data.split = {_shares(split)} gives {name} no share; write three shares such as 949,50,1{_OFF[name]}"
            )

    if split_by == "position":
        cuts = [0, *(round(share * num_tokens) for share in _cumulative(split))]
        parts = [_starts(low, high, max_seq_len, stride) for low, high in pairwise(cuts)]
    else:
        windows = _starts(0, num_tokens, max_seq_len, stride)
        # Rounded down, as minGPT does: 0.9 of 55,641 windows are 50,076.
        cuts = [0, *(int(share * len(windows)) for share in _cumulative(split))]
        dealt = windows[_permutation(len(windows), seed, STREAM_SPLIT, 0)]
        parts = [np.sort(dealt[low:high]) for low, high in pairwise(cuts)]

    for name, part in needed.items():
        if not len(parts[part]):
            if split_by == "position":
                sentence = _part_too_short(name, num_tokens, cuts[part + 1] - cuts[part], max_seq_len, split)
            else:
                sentence = _part_without_window(name, num_tokens, len(windows), max_seq_len, split)
            raise DataError(sentence + _OFF[name])
    return Starts(*parts)


def epoch_order(num_samples: int, seed: int, epoch: int) -> Ints:
    """The permutation in which an epoch sees the samples. 8 bytes a sample; keep it rather than ask twice."""
    return _permutation(num_samples, seed, STREAM_EPOCH_ORDER, epoch)


def samples_at(
    counters_b: Ints, num_samples: int, seed: int, order: Callable[[int, int, int], Ints] = epoch_order
) -> Ints:
    """The sample of each of these rows, counted through all steps.

    Epochs follow each other without a gap, so a batch may hold the end of one and the beginning of the next. `order` is
    `epoch_order`, or a caller's cache of it.
    """
    epochs, places = np.divmod(counters_b, num_samples)
    samples = np.empty(len(counters_b), dtype=np.int64)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        samples[here] = order(num_samples, seed, int(epoch))[places[here]]
    return samples


def sample_keys(seed: int, step: int, rows: range) -> Ints:
    """A 64-bit hash of (seed, step, global row), from which the model derives its dropout masks on any layout.

    The last round is a bijection of the row, so two rows of a step never share a key.
    """
    key_1 = np.array([seed], dtype=np.uint64)
    key_1 = _splitmix64(_splitmix64(key_1) + np.uint64(step))
    rows_b = np.arange(rows.start, rows.stop, rows.step, dtype=np.uint64)
    return _splitmix64(key_1 + rows_b).view(np.int64)


def steps_for_epochs(passes: Passes, global_batch_size: int, epochs: int) -> int:
    """Steps after which every sample has been seen `epochs` times."""
    return -(-passes.samples(epochs) // global_batch_size)


def epoch_of(passes: Passes, global_batch_size: int, step: int) -> int:
    """The epoch of the first row of a step, both counted from 0."""
    return passes.epoch_of(step * global_batch_size)


def batch_in_epoch(passes: Passes, global_batch_size: int, step: int) -> int:
    """How many steps began in the same epoch before this one."""
    epoch = epoch_of(passes, global_batch_size, step)
    return step - steps_for_epochs(passes, global_batch_size, epoch)


def document_order(num_documents: int, seed: int, epoch: int) -> Ints:
    """The permutation in which an epoch strings the documents together."""
    return _scattered(np.arange(num_documents, dtype=np.int64), num_documents, seed, STREAM_DOCUMENTS, epoch)


def shuffled(places: Ints, count: int, seed: int, epoch: int) -> Ints:
    """Which of an epoch's `count` samples, cut from its documents, stand at these places of its order."""
    return _scattered(places, count, seed, STREAM_SAMPLES, epoch)


def split_counts(count: int, split: tuple[float, float, float]) -> list[int]:
    """Where the three parts of so many documents (or tokens) begin and end: four numbers."""
    return [0, *(round(share * count) for share in _cumulative(split))]


def shares_text(split: tuple[float, float, float]) -> str:
    return _shares(split)


def blend_order(weights: list[Fraction], count: int) -> npt.NDArray[np.uint16]:
    """Which member of a blend each of the first `count` samples is of.

    After every sample each member has had its weight's share of them to within one sample. It is one processor's
    schedule of unit tasks by earliest deadline: the j-th sample of a member of weight w may not come before j / w and
    must not come after (j + 1) / w. All in whole numbers, so it never drifts.
    """
    scale = lcm(*(weight.denominator for weight in weights))
    shares = [int(weight * scale) for weight in weights]
    period = sum(shares)
    # chosen by the weights alone: a longer run goes on with the order of a shorter one
    if len(shares) == 2 and period <= LONGEST_FAST_PERIOD:
        return _order_of_two(shares[0], period, count)
    members = range(len(shares))
    releases, deadlines = [0] * len(shares), [-(-period // share) for share in shares]
    taken = [0] * len(shares)
    # the order repeats after a period, where every share has come out whole
    order = np.empty(min(count, period), dtype=np.uint16)
    for place in range(len(order)):
        pick = min((m for m in members if releases[m] <= place), key=deadlines.__getitem__)
        order[place] = pick
        taken[pick] += 1
        releases[pick] = taken[pick] * period // shares[pick]
        deadlines[pick] = -(-(taken[pick] + 1) * period // shares[pick])
    return np.resize(order, count)


def _order_of_two(share: int, period: int, count: int) -> npt.NDArray[np.uint16]:
    """Of two, the nearest whole number of the first at every point leaves the second as near."""
    order = np.empty(count, dtype=np.uint16)
    for low in range(0, count, ORDER_BLOCK):
        # from the block's own beginning, so that no product outgrows 64 bits
        _, rest = divmod(2 * share * low + period, 2 * period)
        places = np.arange(min(ORDER_BLOCK, count - low) + 1, dtype=np.int64)
        had = (2 * share * places + rest) // (2 * period)
        order[low : low + ORDER_BLOCK] = 1 - np.diff(had)
    return order


LONGEST_FAST_PERIOD = 1 << 42
ORDER_BLOCK = 1 << 19


def _starts(low: int, high: int, max_seq_len: int, stride: int) -> Ints:
    """Starts of the samples that lie wholly within tokens low to high."""
    return np.arange(low, max(low, high - max_seq_len), stride, dtype=np.int64)


def _cumulative(split: tuple[float, float, float]) -> tuple[Fraction, Fraction, Fraction]:
    # Through the decimal that was written, so that 0.9 is nine tenths and the parts end where the text ends.
    train, valid, test = (Fraction(repr(float(share))) for share in split)
    total = train + valid + test
    return train / total, (train + valid) / total, Fraction(1)


def _permutation(count: int, seed: int, stream: int, index: int) -> Ints:
    bits = np.random.Philox(key=np.array([seed, (stream << 56) + index], dtype=np.uint64))
    words = np.asarray(bits.random_raw(count), dtype=np.uint64)
    # Stable, because the default sort breaks ties by what the processor's vector unit prefers.
    return np.argsort(words, kind="stable").astype(np.int64, copy=False)


def _scattered(places: Ints, count: int, seed: int, stream: int, index: int) -> Ints:
    """The values of a permutation at some places, without the rest of it: a Feistel network on just enough bits, walked
    until it lands below `count`. A small one is made whole instead: on few bits the network mixes badly."""
    if count < FEWEST_TO_SCATTER:
        return _permutation(count, seed, stream, index)[places]
    bits = (count - 1).bit_length()
    high, low = np.uint64(bits // 2), np.uint64(bits - bits // 2)
    high_mask, low_mask = (np.uint64((1 << int(width)) - 1) for width in (high, low))
    seed_1 = np.array([seed], dtype=np.uint64)
    key_1 = _splitmix64(_splitmix64(seed_1) + np.uint64((stream << 56) + index))
    found = places.astype(np.uint64)
    walking = np.arange(len(found))
    while len(walking):
        left, right = found[walking] >> low, found[walking] & low_mask
        for turn in range(0, FEISTEL_ROUNDS, 2):
            left ^= _splitmix64(right + (key_1 ^ np.uint64(turn << 48))) & high_mask
            right ^= _splitmix64(left + (key_1 ^ np.uint64((turn + 1) << 48))) & low_mask
        found[walking] = (left << low) | right
        walking = walking[found[walking] >= count]
    return found.view(np.int64)


FEWEST_TO_SCATTER = 4096
FEISTEL_ROUNDS = 4


def _splitmix64(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """One output of SplitMix64 for the state x. Arrays only: numpy lets them wrap, and warns of scalars that do."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _part_too_short(
    name: str, num_tokens: int, part_tokens: int, max_seq_len: int, split: tuple[float, float, float]
) -> str:
    remedies = ["a longer text"]
    if part_tokens < num_tokens:
        remedies.append(f"a larger share for {name} in data.split")
    if part_tokens > 1:
        remedies.append(f"data.max_seq_len = {part_tokens - 1} or less")
    return (
        f"data.max_seq_len = {max_seq_len} needs {max_seq_len + 1} tokens for one sample, but "
        f"data.split = {_shares(split)} leaves {part_tokens} of the corpus's {num_tokens} tokens for {name}; "
        f"use {' or '.join(remedies)}"
    )


def _part_without_window(
    name: str, num_tokens: int, num_windows: int, max_seq_len: int, split: tuple[float, float, float]
) -> str:
    return (
        f"data.split = {_shares(split)} deals {name} none of the {num_windows} windows that a corpus of {num_tokens} "
        f"tokens has at data.max_seq_len = {max_seq_len}; use a longer text, a larger share for {name}, or a smaller "
        "data.max_seq_len or data.sample_stride"
    )


def _shares(split: tuple[float, float, float]) -> str:
    return ",".join(f"{share:g}" for share in split)


# How the sentence about a part that is too short ends: training cannot be done without, evaluation can.
_OFF = {"training": "", "validation": "; engine.eval_iters = 0 trains without evaluation"}
