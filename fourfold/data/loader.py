"""From samples to batches: training in the order of steps, prepared ahead by threads; validation in fixed order.

Nothing here is random and nothing is saved: which rows a step holds is `source.py`'s, and the loader's whole state is
the number of its next step. Batches stay on the host; moving them is the trainer's business.
Shapes: b rows of this data rank, t tokens of a sequence.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Self

import numpy as np
import torch

from fourfold.config.schema import Data
from fourfold.data.order import Ints, sample_keys
from fourfold.data.source import Source, Spans

# What torch's cross entropy ignores by default; also in model/loss.py, because data and model may not import each other
IGNORED_TARGET = -100


class Batch(NamedTuple):
    """This data rank's rows of one global batch, int64 on the host."""

    tokens_bt: torch.Tensor
    targets_bt: torch.Tensor
    sample_keys_b: torch.Tensor
    positions_bt: torch.Tensor | None = None
    """Where positions start again with every document; otherwise they are 0, 1, 2 and so on."""
    documents_bt: torch.Tensor | None = None
    """A number per document, where attention is to stay within documents."""

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Batch":
        """Every tensor that is there, changed."""
        return Batch(*(None if tensor is None else change(tensor) for tensor in self))  # type: ignore[arg-type]

    def pin_memory(self) -> "Batch":
        return self.each(torch.Tensor.pin_memory)


class Boundaries(NamedTuple):
    """What becomes of the places where one document ends and the next begins."""

    masks_loss: bool = False
    resets_positions: bool = False
    resets_attention: bool = False


NO_BOUNDARIES = Boundaries()


def boundaries_of(data: Data) -> Boundaries:
    return Boundaries(data.eod_mask_loss, data.reset_position_ids, data.reset_attention_mask)


class TrainLoader:
    """Training batches from `first_step` on, without end, each made by a thread up to `num_workers` steps ahead."""

    def __init__(
        self,
        source: Source,
        seed: int,
        global_batch_size: int,
        rows: range,
        first_step: int = 0,
        num_workers: int = 1,
        pin_memory: bool = False,
        boundaries: Boundaries = NO_BOUNDARIES,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        assert len(source) > 0
        assert 0 <= min(rows) <= max(rows) < global_batch_size
        self.step = first_step  # of the batch that next_batch returns next
        self.wait_s = 0.0  # how long next_batch kept its caller waiting; the caller may set it back to 0
        self._source, self._boundaries = source, boundaries
        self._seed, self._global_batch_size, self._rows = seed, global_batch_size, rows
        self._pin_memory, self._clock = pin_memory, clock
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
        spans = self._source.train(counters_of(step, self._global_batch_size, self._rows))
        keys_b = torch.from_numpy(sample_keys(self._seed, step, self._rows))
        batch = build_batch(spans, keys_b, self._boundaries)
        return batch.pin_memory() if self._pin_memory else batch


def counters_of(step: int, global_batch_size: int, rows: range) -> Ints:
    """Places of these rows of a step in the training order: rows are counted through all steps."""
    return step * global_batch_size + np.arange(rows.start, rows.stop, rows.step, dtype=np.int64)


def eval_batches(
    source: Source,
    global_batch_size: int,
    rows: range,
    iters: int,
    pin_memory: bool = False,
    boundaries: Boundaries = NO_BOUNDARIES,
) -> Iterator[Batch]:
    """At most `iters` global batches of a part (-1: all of it), the same ones at every call.

    A part larger than that is sampled at even distances, so that a short evaluation sees all of the text and not only
    its beginning. A last batch that the part cannot fill is padded with rows whose targets are ignored: every data rank
    gets equally many batches, all of one shape.
    """
    size = len(source)
    wanted = size if iters < 0 else min(iters * global_batch_size, size)
    # wanted <= size, so the even distance is at least 1 and no sample is taken twice.
    chosen = np.arange(wanted, dtype=np.int64) * size // max(wanted, 1)
    rows_b = np.arange(rows.start, rows.stop, rows.step)
    # Evaluation draws no dropout, so its keys mean nothing; the shape is kept.
    keys_b = torch.zeros(len(rows), dtype=torch.int64)
    for first in range(0, wanted, global_batch_size):
        is_padding_b = first + rows_b >= wanted
        batch = build_batch(source.read(chosen[np.minimum(first + rows_b, wanted - 1)]), keys_b, boundaries)
        batch.targets_bt[torch.from_numpy(is_padding_b)] = IGNORED_TARGET
        yield batch.pin_memory() if pin_memory else batch


def build_batch(spans: Spans, keys_b: torch.Tensor, boundaries: Boundaries = NO_BOUNDARIES) -> Batch:
    """Tokens and targets, the targets one token later, and what is asked for at the ends of documents."""
    # Two copies rather than two views of one: each is contiguous, as pinning and kernels want it.
    tokens_bt = torch.from_numpy(spans.tokens_bs[:, :-1].astype(np.int64))
    targets_bt = torch.from_numpy(spans.tokens_bs[:, 1:].astype(np.int64))
    if not any(boundaries):
        return Batch(tokens_bt, targets_bt, keys_b)
    assert spans.documents_bs is not None
    ends_bt = spans.documents_bs[:, 1:] != spans.documents_bs[:, :-1]
    if boundaries.masks_loss:
        # what follows a document's end cannot be told from it
        targets_bt[torch.from_numpy(ends_bt)] = IGNORED_TARGET
    positions_bt = documents_bt = None
    if boundaries.resets_positions:
        places_bt = np.broadcast_to(np.arange(ends_bt.shape[1]), ends_bt.shape)
        begins_bt = np.where(np.pad(ends_bt[:, :-1], ((0, 0), (1, 0))), places_bt, 0)
        positions_bt = torch.from_numpy(places_bt - np.maximum.accumulate(begins_bt, axis=1))
    if boundaries.resets_attention:
        documents_bt = torch.from_numpy(np.ascontiguousarray(spans.documents_bs[:, :-1]))
    return Batch(tokens_bt, targets_bt, keys_b, positions_bt, documents_bt)
