"""Where samples come from: windows of one text, documents strung together, or a blend of such sources.

All three answer the same questions: how long a pass is, what the n-th training sample is, what the n-th sample of an
evaluation is. Answers depend on the seed and on n, on nothing else. Shapes: b samples, s tokens of a span (seq + 1).
"""

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from math import lcm
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fourfold.data.index import cached_index, digest_of
from fourfold.data.order import Ints, Passes, blend_order, document_order, epoch_order, samples_at, shuffled
from fourfold.errors import DataError


class Spans(NamedTuple):
    tokens_bs: npt.NDArray[Any]
    documents_bs: Ints | None
    """A number per token that changes where a document ends; None if nobody knows where they do."""


class Windows:
    """Spans of one array of tokens, listed by their starts."""

    def __init__(self, tokens: npt.NDArray[Any], starts: Ints, seq: int, seed: int, eos: int | None = None) -> None:
        self.tokens, self.starts, self.seq, self.seed, self.eos = tokens, starts, seq, seed, eos
        # Two, because workers on both sides of an epoch's end should not evict each other's.
        self._epoch_order = lru_cache(maxsize=2)(epoch_order)

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def passes(self) -> Passes:
        return Passes(len(self.starts))

    def train(self, counters_b: Ints) -> Spans:
        """The samples at these places of the training order, which goes on without end."""
        return self.read(samples_at(counters_b, len(self.starts), self.seed, self._epoch_order))

    def read(self, samples_b: Ints) -> Spans:
        """Samples by their place in the text."""
        spans = np.lib.stride_tricks.sliding_window_view(self.tokens, self.seq + 1)[self.starts[samples_b]]
        return Spans(spans, None if self.eos is None else documents_by_eos(spans, self.eos))


class Range(NamedTuple):
    """The documents of one part of a corpus: where each begins, in tokens counted through all files."""

    starts: Ints
    lengths: Ints


class Documents:
    """Documents in a new order for every epoch, strung together and cut into spans that share one token; then the
    spans of an epoch in an order of their own. A span may reach from one epoch into the next."""

    def __init__(
        self,
        files: Sequence[npt.NDArray[Any]],
        paths: Sequence[Path],
        part: Range,
        seq: int,
        seed: int,
        vocab_size: int,
        eos: int | None = None,
        has_documents: bool = True,
        cache: Sequence[Path] = (),
    ) -> None:
        kept = part.lengths > 0
        self.part = part if kept.all() else Range(part.starts[kept], part.lengths[kept])
        self.files, self.paths, self.seq, self.seed, self.vocab_size = files, paths, seq, seed, vocab_size
        self.eos, self.has_documents, self.cache = eos, has_documents, cache
        self.num_tokens = int(self.part.lengths.sum())
        self.file_sizes = np.array([len(file) for file in files], dtype=np.int64)
        self.file_ends = np.cumsum(self.file_sizes)
        self._digest = digest_of(self.part.lengths) if cache else ""
        self._epoch = lru_cache(maxsize=3)(self._build_epoch)

    @property
    def passes(self) -> Passes:
        return Passes(self.num_tokens, self.seq, 1)

    def __len__(self) -> int:
        return self.passes.samples(1)

    def train(self, counters_b: Ints) -> Spans:
        samples, passes = np.empty(len(counters_b), dtype=np.int64), self.passes
        epochs = -(-((counters_b + 1) * self.seq + 1) // self.num_tokens) - 1
        for epoch in np.unique(epochs).tolist():
            here, first = epochs == epoch, passes.samples(epoch)
            samples[here] = first + shuffled(
                counters_b[here] - first, passes.samples(epoch + 1) - first, self.seed, epoch
            )
        return self._read(samples, is_shuffled=True)

    def read(self, samples_b: Ints) -> Spans:
        """Samples of the documents as they lie in the files."""
        return self._read(samples_b, is_shuffled=False)

    def _build_epoch(self, epoch: int, is_shuffled: bool) -> tuple[Ints, Ints]:
        """The order of an epoch's documents, and where each ends in it."""
        if not is_shuffled:
            return np.arange(len(self.part.lengths)), np.cumsum(self.part.lengths)

        def build() -> dict[str, npt.NDArray[Any]]:
            order = document_order(len(self.part.lengths), self.seed, epoch)
            return {"order": order, "ends": np.cumsum(self.part.lengths[order])}

        key: dict[str, object] = {"what": "document order", "lengths": self._digest, "seed": self.seed, "epoch": epoch}
        made = cached_index(self.cache, key, 2 * len(self.part.lengths), build)
        return made["order"], made["ends"]

    def _read(self, samples_b: Ints, is_shuffled: bool) -> Spans:
        size, total = self.seq + 1, self.num_tokens
        begins = samples_b * self.seq
        epochs, lows = np.divmod(begins, total)
        # a span that reaches into the next epoch is two segments
        heads = np.minimum(size, total - lows)
        goes_on = np.flatnonzero(heads < size)
        rows = np.concatenate((np.arange(len(samples_b)), goes_on))
        places = rows * size + np.concatenate((np.zeros(len(samples_b), np.int64), heads[goes_on]))
        lows = np.concatenate((lows, np.zeros(len(goes_on), np.int64)))
        counts = np.concatenate((heads, size - heads[goes_on]))
        epochs = np.concatenate((epochs, epochs[goes_on] + 1))
        pieces = [
            self._pieces(*self._epoch(epoch if is_shuffled else 0, is_shuffled), places[here], lows[here], counts[here])
            for epoch in np.unique(epochs).tolist()
            for here in [epochs == epoch]
        ]
        places, starts, counts = (np.concatenate(each) for each in zip(*pieces, strict=True))
        in_order = np.argsort(places, kind="stable")
        starts, counts = starts[in_order], counts[in_order]
        tokens_bs = self._gather(starts, counts).reshape(len(samples_b), size)
        self._check(tokens_bs, starts, counts)
        if self.has_documents:
            documents_bs = np.repeat(np.arange(len(counts)), counts).reshape(len(samples_b), size)
            return Spans(tokens_bs, documents_bs - documents_bs[:, :1])
        return Spans(tokens_bs, None if self.eos is None else documents_by_eos(tokens_bs, self.eos))

    def _pieces(self, order: Ints, ends: Ints, places: Ints, lows: Ints, counts: Ints) -> tuple[Ints, Ints, Ints]:
        """Segments of an epoch, cut where documents end: where each piece goes, where its tokens begin, how many."""
        first = np.searchsorted(ends, lows, "right")
        num_pieces = np.searchsorted(ends, lows + counts - 1, "right") - first + 1
        segment = np.repeat(np.arange(len(lows)), num_pieces)
        nth = np.arange(len(segment)) - np.repeat(np.cumsum(num_pieces) - num_pieces - first, num_pieces)
        document = order[nth]
        document_low = ends[nth] - self.part.lengths[document]
        low = np.maximum(lows[segment], document_low)
        high = np.minimum(lows[segment] + counts[segment], ends[nth])
        return places[segment] + low - lows[segment], self.part.starts[document] + low - document_low, high - low

    def _gather(self, starts: Ints, counts: Ints) -> npt.NDArray[Any]:
        out = np.empty(int(counts.sum()), dtype=np.result_type(*(file.dtype for file in self.files)))
        of_file = np.searchsorted(self.file_ends, starts, "right")
        starts = starts - (self.file_ends[of_file] - self.file_sizes[of_file])
        if len(counts) * SHORT_PIECE > len(out):
            # many short pieces: one index per token costs less than one copy per piece
            places = np.repeat(starts - np.cumsum(counts) + counts, counts) + np.arange(len(out))
            needed = np.unique(of_file).tolist()
            if len(needed) == 1:
                return self.files[needed[0]][places]
            of_token = np.repeat(of_file, counts)
            for file in needed:
                here = of_token == file
                out[here] = self.files[file][places[here]]
            return out
        end = 0
        for file, start, count in zip(of_file.tolist(), starts.tolist(), counts.tolist(), strict=True):
            out[end : end + count] = self.files[file][start : start + count]
            end += count
        return out

    def _check(self, tokens_bs: npt.NDArray[Any], starts: Ints, counts: Ints) -> None:
        """Every token is looked at when it is first used, not before: reading all of a corpus would take minutes."""
        if tokens_bs.max() < self.vocab_size and (tokens_bs.dtype.kind == "u" or tokens_bs.min() >= 0):
            return
        flat = tokens_bs.reshape(-1)
        place = int(np.argmax((flat >= self.vocab_size) | (flat < 0)))
        piece = int(np.searchsorted(np.cumsum(counts), place, "right"))
        position = int(starts[piece] + place - (counts[:piece].sum()))
        raise DataError(bad_token(self.files, self.paths, self.file_ends, position, int(flat[place]), self.vocab_size))


def bad_token(
    files: Sequence[npt.NDArray[Any]], paths: Sequence[Path], file_ends: Ints, position: int, token: int, vocab: int
) -> str:
    file = int(np.searchsorted(file_ends, position, "right"))
    place = position - int(file_ends[file]) + len(files[file])
    return (
        f"'{paths[file]}': token {place:,} is {token}, which is not in the "
        f"vocabulary of {vocab} tokens (ids 0 to {vocab - 1}); set model.vocab_size or data.tokenizer to what the file "
        "was made with"
    )


class Blend:
    """Several sources by weight. After every sample each has had its share to within one sample."""

    def __init__(
        self, sources: Sequence["Windows | Documents"], weights: Sequence[Fraction], cache: Sequence[Path] = ()
    ) -> None:
        total = sum(weights)
        self.sources, self.weights, self.cache = list(sources), [weight / total for weight in weights], cache
        self.num_samples = sum(len(source) for source in sources)
        scale = lcm(*(weight.denominator for weight in self.weights))
        self._shares = np.array([int(weight * scale) for weight in self.weights], dtype=object)
        # the order repeats where every share has come out whole; one that does so late is made as far as it is needed
        self._period = scale if scale <= LONGEST_PERIOD else None
        self._lock = Lock()
        self._order, self._before = np.empty(0, np.uint16), np.zeros((0, len(sources)), np.int64)

    @property
    def passes(self) -> Passes:
        """A pass is as many samples as the members have together, whatever their shares."""
        return Passes(self.num_samples)

    def __len__(self) -> int:
        """Samples of an evaluation: as many as the scarcest member lasts for at its weight."""
        return min(int(len(source) / weight) for source, weight in zip(self.sources, self.weights, strict=True))

    def train(self, counters_b: Ints) -> Spans:
        members, nth = self.members_of(counters_b)
        return self._join(members, [(m, self.sources[m].train(nth[members == m])) for m in np.unique(members).tolist()])

    def read(self, samples_b: Ints) -> Spans:
        members, nth = self.members_of(samples_b)
        nth %= np.array([len(source) for source in self.sources])[members]
        return self._join(members, [(m, self.sources[m].read(nth[members == m])) for m in np.unique(members).tolist()])

    def members_of(self, counters_b: Ints) -> tuple[Ints, Ints]:
        """Which member each sample is of, and how many of that member came before it."""
        rounds, places = (
            np.divmod(counters_b, self._period) if self._period else (np.zeros_like(counters_b), counters_b)
        )
        order, before = self._made(int(places.max()) + 1)
        members = order[places].astype(np.int64)
        nth = np.empty(len(places), np.int64)
        for row, place in enumerate(places.tolist()):
            since = order[place // BLOCK * BLOCK : place]
            nth[row] = before[place // BLOCK, members[row]] + np.count_nonzero(since == members[row])
        return members, nth + rounds * self._shares[members].astype(np.int64)

    def _made(self, count: int) -> tuple[npt.NDArray[np.uint16], Ints]:
        """The order, at least so far, and how many of each member come before each block of it."""
        with self._lock:
            if count > len(self._order):
                # twice as far as asked, so that it is seldom made again
                size = -(-(self._period or max(2 * count, LONGEST_PERIOD)) // BLOCK) * BLOCK
                key: dict[str, object] = {"what": "blend", "weights": list(map(str, self.weights)), "size": size}
                made = cached_index(self.cache, key, size, lambda: {"order": blend_order(self.weights, size)})
                blocks = made["order"].reshape(-1, BLOCK)
                per_block = np.stack([(blocks == member).sum(1) for member in range(len(self.sources))], 1)
                self._order, self._before = made["order"], np.cumsum(per_block, 0) - per_block
            return self._order, self._before

    def _join(self, members: Ints, parts: list[tuple[int, Spans]]) -> Spans:
        back = np.argsort(np.argsort(members, kind="stable"), kind="stable")
        documents = [spans.documents_bs for _, spans in parts if spans.documents_bs is not None]
        return Spans(
            np.concatenate([spans.tokens_bs for _, spans in parts])[back],
            np.concatenate(documents)[back] if len(documents) == len(parts) else None,
        )


SHORT_PIECE = 200
BLOCK = 1024
LONGEST_PERIOD = 1 << 20

Source = Windows | Documents | Blend


def documents_by_eos(tokens_bs: npt.NDArray[Any], eos: int) -> Ints:
    """A document's last token is its end-of-document token."""
    ended = np.cumsum(tokens_bs == eos, axis=1)
    return np.concatenate((np.zeros((len(ended), 1), ended.dtype), ended[:, :-1]), axis=1).astype(np.int64)
