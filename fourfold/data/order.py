"""Which samples exist, and in which order they are seen. Pure functions of integers; no text, no tensors.

A sample is a span of max_seq_len + 1 tokens, named by its start. The order is a function of (seed, step) alone: rank,
layout, worker count and what ran before do not enter, so a run resumes from one integer. Only arithmetic that numpy
keeps across versions is used (a bit generator's raw words and a stable sort, not `Generator.permutation`).
"""

from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise
from math import isfinite
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from fourfold.errors import DataError

Ints = npt.NDArray[np.int64]

# Streams of random words under one seed; a new use takes a new number, so that it never repeats another's draws.
STREAM_EPOCH_ORDER = 0
STREAM_SPLIT = 1


class Splits(NamedTuple):
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
) -> Splits:
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
    return Splits(*parts)


def epoch_order(num_samples: int, seed: int, epoch: int) -> Ints:
    """The permutation in which an epoch sees the samples. 8 bytes a sample; keep it rather than ask twice."""
    return _permutation(num_samples, seed, STREAM_EPOCH_ORDER, epoch)


def rows_of_step(
    num_samples: int,
    seed: int,
    global_batch_size: int,
    step: int,
    rows: range,
    order: Callable[[int, int, int], Ints] = epoch_order,
) -> Ints:
    """The sample index of each of these rows of the step's global batch.

    Rows are counted through all steps; epochs follow each other without a gap, so a batch may hold the end of one and
    the beginning of the next. `order` is `epoch_order`, or a caller's cache of it.
    """
    counters = step * global_batch_size + np.arange(rows.start, rows.stop, rows.step, dtype=np.int64)
    epochs, places = np.divmod(counters, num_samples)
    samples = np.empty(len(counters), dtype=np.int64)
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


def steps_for_epochs(num_samples: int, global_batch_size: int, epochs: int) -> int:
    """Steps after which every sample has been seen `epochs` times."""
    return -(-epochs * num_samples // global_batch_size)


def epoch_of(num_samples: int, global_batch_size: int, step: int) -> int:
    """The epoch of the first row of a step, both counted from 0."""
    return step * global_batch_size // num_samples


def batch_in_epoch(num_samples: int, global_batch_size: int, step: int) -> int:
    """How many steps began in the same epoch before this one."""
    epoch = epoch_of(num_samples, global_batch_size, step)
    return step - steps_for_epochs(num_samples, global_batch_size, epoch)


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
