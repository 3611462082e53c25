"""Tokens per second that the loader delivers from the page cache.

    python benchmarks/data_loader.py [--workers 2] [--batch 64] [--seq 1024] [--steps 300]

A flat file of 2 * 10^8 tokens, mapped, in documents of 1,000 tokens on average and of 50 on average.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np

from fourfold.data.loader import Boundaries, TrainLoader
from fourfold.data.source import Documents, Range


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=300)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "tokens.bin"
        np.random.default_rng(0).integers(0, 50257, 2 * 10**8).astype(np.uint16).tofile(path)
        tokens = np.asarray(np.memmap(path, np.uint16, "r"))
        tokens.max()
        print(f"{asked.workers} workers, batches of {asked.batch} x {asked.seq}, {asked.steps} of them")
        for mean in (1000, 50):
            for boundaries in (Boundaries(), Boundaries(True, True, True)):
                lengths = np.full(len(tokens) // mean, mean)
                part = Range(np.cumsum(lengths) - lengths, lengths)
                source = Documents([tokens], [path], part, asked.seq, 1234, 50257)
                with TrainLoader(
                    source, 1234, asked.batch, range(asked.batch), 0, asked.workers, boundaries=boundaries
                ) as loader:
                    loader.next_batch()
                    began_s = time.perf_counter()
                    for _ in range(asked.steps):
                        loader.next_batch()
                    took_s = time.perf_counter() - began_s
                speed = asked.steps * asked.batch * asked.seq / took_s
                what = "with boundaries" if any(boundaries) else ""
                print(f"documents of {mean:>5} tokens {what:<16}{speed / 1e6:>8.1f} million tokens/s")


if __name__ == "__main__":
    main()
