"""Start-up on a large corpus: the index of 10^9 tokens in 10^6 documents, made, and found again.

    python benchmarks/data_index.py [--tokens 1000000000] [--documents 1000000] [--seq 1024] [--megatron CHECKOUT]

Writes a Megatron pair (uint16, about 2 GB at the default size, in a folder that is removed). "start-up" is all of
`load_corpus` and the first batch. With --megatron, its compiled helper builds the sample index of the same documents;
compile it first in the checkout: make -C megatron/core/datasets.
"""

import argparse
import struct
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from fourfold.config.schema import Data
from fourfold.data.corpus import load_corpus
from fourfold.data.loader import build_batch, counters_of
from fourfold.data.order import document_order


def write_corpus(prefix: Path, num_tokens: int, num_documents: int) -> np.ndarray:
    draw = np.random.default_rng(0)
    lengths = np.maximum(1, draw.exponential(num_tokens / num_documents, num_documents)).astype(np.int32)
    with Path(f"{prefix}.bin").open("wb") as stream:
        left = int(lengths.sum())
        block = draw.integers(0, 50257, 1 << 24).astype(np.uint16)
        while left:
            stream.write(block[:left].data)
            left -= min(left, len(block))
    pointers = (np.cumsum(lengths, dtype=np.int64) - lengths) * 2
    with Path(f"{prefix}.idx").open("wb") as stream:
        stream.write(struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, num_documents, num_documents + 1))
        for array in (lengths, pointers, np.arange(num_documents + 1)):
            stream.write(array.data)
    return lengths


def timed(work, *args) -> tuple[float, object]:  # type: ignore[no-untyped-def]
    began_s = time.perf_counter()
    result = work(*args)
    return time.perf_counter() - began_s, result


def best_s(work, *args) -> float:  # type: ignore[no-untyped-def]
    return min(timed(work, *args)[0] for _ in range(5))


def start(prefix: Path, seq: int, cache: Path) -> object:
    data = Data(input_dir=str(prefix), max_seq_len=seq, cache_dir=str(cache))
    corpus = load_corpus(data, seed=1234, needs_valid=True, vocab_size=50257)
    return build_batch(corpus.splits.train.train(counters_of(0, 512, range(512))), torch.zeros(512, dtype=torch.int64))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=10**9)
    parser.add_argument("--documents", type=int, default=10**6)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--megatron", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lengths = write_corpus(folder / "corpus", asked.tokens, asked.documents)
        print(f"{int(lengths.sum()):,} tokens in {len(lengths):,} documents, sequences of {asked.seq}")
        for title in ("start-up, first time", "start-up, second time"):
            print(f"{title:<42}{timed(start, folder / 'corpus', asked.seq, folder / 'cache')[0]:>8.2f} s")

    given = document_order(len(lengths), 1234, 0)

    def index() -> None:
        order = document_order(len(lengths), 1234, 0)
        np.cumsum(lengths[order], dtype=np.int64)

    def cut() -> None:
        np.cumsum(lengths[given], dtype=np.int64)

    print(f"{'index of an epoch, its shuffles included':<42}{best_s(index):>8.3f} s")
    print(f"{'  of it, where documents end':<42}{best_s(cut):>8.3f} s")
    if asked.megatron:
        sys.path.insert(0, str(asked.megatron / "megatron" / "core" / "datasets"))
        import helpers_cpp  # type: ignore[import-not-found]

        order = np.random.default_rng(0).permutation(len(lengths)).astype(np.int32)
        call = (lengths, order, asked.seq, 1, int(lengths.sum()), True, 1)
        print(f"{'Megatron: build_sample_idx alone':<42}{best_s(helpers_cpp.build_sample_idx_int32, *call):>8.3f} s")

        def theirs() -> None:
            draw = np.random.RandomState(1234)
            documents = np.arange(len(lengths), dtype=np.int32)
            draw.shuffle(documents)
            helpers_cpp.build_sample_idx_int32(lengths, documents, asked.seq, 1, int(lengths.sum()), True, 1)
            samples = np.arange((int(lengths.sum()) - 1) // asked.seq, dtype=np.uint32)
            draw.shuffle(samples)

        print(f"{'Megatron: with both of its shuffles':<42}{best_s(theirs):>8.3f} s")


if __name__ == "__main__":
    main()
