"""From sample starts to batches: training in the order of steps, prepared ahead by threads; validation in fixed order.

Nothing here is random and nothing is saved: which rows a step holds is `order.py`'s, and the loader's whole state is
the number of its next step. Batches stay on the host; moving them is the trainer's business.
Shapes: b rows of this data rank, t tokens of a sequence.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch

from fourfold.data.order import Ints, epoch_order, rows_of_step, sample_keys

IGNORED_TARGET = -100  # what torch's cross entropy ignores by default


class Batch(NamedTuple):
    """This data rank's rows of one global batch, int64 on the host."""

    tokens_bt: torch.Tensor
    targets_bt: torch.Tensor
    sample_keys_b: torch.Tensor

    def pin_memory(self) -> "Batch":
        return Batch(*(tensor.pin_memory() for tensor in self))


class TrainLoader:
    """Training batches from `first_step` on, without end, each made by a thread up to `num_workers` steps ahead."""

    def __init__(
        self,
        tokens: npt.NDArray[Any],
        starts: Ints,
        seq: int,
        seed: int,
        global_batch_size: int,
        rows: range,
        first_step: int = 0,
        num_workers: int = 1,
        pin_memory: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        assert len(starts) > 0
        assert 0 <= min(rows) <= max(rows) < global_batch_size
        self.step = first_step  # of the batch that next_batch returns next
        self.wait_s = 0.0  # how long next_batch kept its caller waiting; the caller may set it back to 0
        self._tokens, self._starts, self._seq = tokens, starts, seq
        self._seed, self._global_batch_size, self._rows = seed, global_batch_size, rows
        self._pin_memory, self._clock = pin_memory, clock
        # Two, because workers on both sides of an epoch's end should not evict each other's.
        self._epoch_order = lru_cache(maxsize=2)(epoch_order)
        self._pool = ThreadPoolExecutor(num_workers, thread_name_prefix="data") if num_workers else None
        self._ahead: deque[Future[Batch]] = deque()
        self._closed = False
        if self._pool:
            self._ahead.extend(self._pool.submit(self._build, first_step + i) for i in range(num_workers))

    def next_batch(self) -> Batch:
        """The batch of `step`, which then moves on by one. What went wrong in a thread is raised here."""
        assert not self._closed, "next_batch after close"
        began_s = self._clock()
        if self._pool:
            batch = self._ahead[0].result()
            self._ahead.popleft()
            self._ahead.append(self._pool.submit(self._build, self.step + 1 + len(self._ahead)))
        else:
            batch = self._build(self.step)
        self.wait_s += self._clock() - began_s
        self.step += 1
        return batch

    def close(self) -> None:
        """Ends the threads; batches not yet asked for are dropped. Closing twice is harmless."""
        self._closed = True
        self._ahead.clear()
        if self._pool:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _build(self, step: int) -> Batch:
        samples = rows_of_step(
            len(self._starts), self._seed, self._global_batch_size, step, self._rows, self._epoch_order
        )
        keys_b = torch.from_numpy(sample_keys(self._seed, step, self._rows))
        batch = Batch(*_gather(self._tokens, self._starts[samples], self._seq), keys_b)
        return batch.pin_memory() if self._pin_memory else batch


def eval_batches(
    tokens: npt.NDArray[Any],
    starts: Ints,
    seq: int,
    global_batch_size: int,
    rows: range,
    iters: int,
    pin_memory: bool = False,
) -> Iterator[Batch]:
    """At most `iters` global batches of a part (-1: all of it), the same ones at every call.

    A part larger than that is sampled at even distances, so that a short evaluation sees all of the text and not only
    its beginning. A last batch that the part cannot fill is padded with rows whose targets are ignored: every data rank
    gets equally many batches, all of one shape.
    """
    wanted = len(starts) if iters < 0 else min(iters * global_batch_size, len(starts))
    # wanted <= len(starts), so the even distance is at least 1 and no sample is taken twice.
    chosen = starts[np.arange(wanted) * len(starts) // max(wanted, 1)]
    rows_b = np.arange(rows.start, rows.stop, rows.step)
    # Evaluation draws no dropout, so its keys mean nothing; the shape is kept.
    keys_b = torch.zeros(len(rows), dtype=torch.int64)
    for first in range(0, wanted, global_batch_size):
        is_padding_b = first + rows_b >= wanted
        tokens_bt, targets_bt = _gather(tokens, chosen[np.minimum(first + rows_b, wanted - 1)], seq)
        targets_bt[torch.from_numpy(is_padding_b)] = IGNORED_TARGET
        batch = Batch(tokens_bt, targets_bt, keys_b)
        yield batch.pin_memory() if pin_memory else batch


def _gather(tokens: npt.NDArray[Any], starts_b: Ints, seq: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets, the targets one token later."""
    spans = np.lib.stride_tricks.sliding_window_view(tokens, seq + 1)[starts_b]
    # Two copies rather than two views of one: each is contiguous, as pinning and kernels want it.
    return torch.from_numpy(spans[:, :-1].astype(np.int64)), torch.from_numpy(spans[:, 1:].astype(np.int64))
