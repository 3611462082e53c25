"""What the trainer costs beside its steps: a whole run, logging every step, against the bare step loop.

    python benchmarks/trainer_overhead.py [--size 124M] [--batch 64] [--seq_len 1024] [--steps 100] [--key value ...]

One process trains on real text for --warmup and --steps steps, as `fourfold train` does: loader, log, metrics.jsonl,
TensorBoard, hang watch. Then the same model takes as many steps again with nothing around them, on batches that are at
hand. Means count what happens at a few steps alone; on a machine that does other work too, medians say more. Every key
of the schema is a flag. The run saves one checkpoint, to a temporary folder in --folder.
"""

import argparse
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from rich.console import Console

from fourfold.config.flags import parse_flags
from fourfold.mesh.process import Process, join_processes, keep_compiled
from fourfold.train.bench import SIZES, bench_config
from fourfold.train.build import Run
from fourfold.train.loop import train
from fourfold.train.metrics import METRICS_FILE, start_log
from fourfold.train.step import train_step

BATCHES_AT_HAND = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="124M", choices=list(SIZES))
    parser.add_argument("--batch", type=int, default=0, help="sequences per step; 0 takes the size's usual one")
    parser.add_argument("--seq_len", type=int, default=1024)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--folder", default=None)
    given, rest = parser.parse_known_args()
    keep_compiled()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder, join_processes("auto", 600.0) as process:
        keys = {"input_dir": "builtin:pydoc", "output_dir": folder, "max_steps": str(given.warmup + given.steps)}
        keys |= {"logging_freq": "1", "save_steps": "0", "eval_iters": "0"}
        flags = [*keys.items(), *((name, str(value)) for name, value in parse_flags(rest)[1])]
        batch = given.batch or SIZES[given.size][1]
        config = bench_config(given.size, batch, given.seq_len, flags, process.device)
        start_log(Path(folder) / "logs", 0, None)
        run = train(config, process, Console()).run
        trained_s = [
            json.loads(line)["step_s"]
            for line in (Path(folder) / METRICS_FILE).read_text(encoding="utf-8").splitlines()
        ][given.warmup :]
        bare_s = time_bare(run, process, given.steps)
    for name, mean in (("mean", statistics.fmean), ("median", statistics.median)):
        trained, bare = mean(trained_s), mean(bare_s)
        print(
            f"{given.size}, {name:6} of {given.steps} steps: trainer {1000 * trained:.2f} ms, bare loop "
            f"{1000 * bare:.2f} ms, ratio {trained / bare:.4f}, so {1000 * (trained - bare):.2f} ms per step"
        )


def time_bare(run: Run, process: Process, steps: int) -> list[float]:
    """Seconds between the ends of steps. On a GPU by the device's clock, so that nothing waits in between."""
    with run.open_loader() as loader:
        batches = [loader.next_batch() for _ in range(BATCHES_AT_HAND)]
    if process.device.type == "cuda":
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 3)]
        for number, mark in enumerate(marks):
            train_step(run, batches[number % len(batches)], number)
            mark.record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) / 1000 for a, b in itertools.pairwise(marks[2:])]
    times = [time.perf_counter()]
    for number in range(steps):
        train_step(run, batches[number % len(batches)], number)
        times.append(time.perf_counter())
    return [b - a for a, b in itertools.pairwise(times)]


if __name__ == "__main__":
    main()
