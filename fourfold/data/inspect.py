"""What is in a corpus: counts, lengths of documents, decoded samples, the rows of a step. Numbers only; no printing."""

from typing import NamedTuple

import numpy as np

from fourfold.data.corpus import Corpus
from fourfold.data.loader import counters_of
from fourfold.data.order import Ints
from fourfold.data.source import Blend, Documents, Windows


class Member(NamedTuple):
    """One source of a part, with its weight in a blend (1 without one)."""

    source: Windows | Documents
    weight: float


class Row(NamedTuple):
    row: int
    member: int
    """Which member of a blend it is of."""
    tokens: Ints
    documents: int
    """How many documents it touches; 0 if nobody knows."""


def members(part: Windows | Documents | Blend) -> list[Member]:
    if isinstance(part, Blend):
        return [Member(source, float(weight)) for source, weight in zip(part.sources, part.weights, strict=True)]
    return [Member(part, 1.0)]


def document_lengths(corpus: Corpus) -> Ints:
    """Of all three parts; nothing where documents are not known."""
    found = [
        member.source.part.lengths
        for part in corpus.splits
        for member in members(part)
        if isinstance(member.source, Documents) and member.source.has_documents
    ]
    return np.concatenate(found) if found else np.empty(0, np.int64)


def histogram(lengths: Ints) -> list[tuple[int, int, int]]:
    """Documents by length in powers of two: from, below, how many."""
    if not len(lengths):
        return []
    powers = np.floor(np.log2(np.maximum(lengths, 1))).astype(np.int64)
    counts = np.bincount(powers)
    return [(1 << power, 2 << power, int(counts[power])) for power in range(int(powers.min()), len(counts))]


def rows_of_step(corpus: Corpus, step: int, global_batch_size: int) -> list[Row]:
    """What training sees in its step-th step, counted from 1 as the log does."""
    counters = counters_of(step - 1, global_batch_size, range(global_batch_size))
    spans = corpus.splits.train.train(counters)
    of = (
        corpus.splits.train.members_of(counters)[0]
        if isinstance(corpus.splits.train, Blend)
        else np.zeros_like(counters)
    )
    return [
        Row(
            row,
            int(of[row]),
            spans.tokens_bs[row].astype(np.int64),
            0 if spans.documents_bs is None else len(np.unique(spans.documents_bs[row])),
        )
        for row in range(global_batch_size)
    ]


def sample_texts(corpus: Corpus, count: int) -> list[str]:
    """Decoded training samples at even distances."""
    size = len(corpus.splits.train)
    chosen = np.arange(min(count, size), dtype=np.int64) * size // max(1, min(count, size))
    return [corpus.tokenizer.decode(row) for row in corpus.splits.train.read(chosen).tokens_bs] if len(chosen) else []
