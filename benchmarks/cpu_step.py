"""A step on the CPU: what hidden dropout costs, what bfloat16 gains, and, if its folder is given, nanoGPT beside it.

    python benchmarks/cpu_step.py [--nanogpt DIR] [--hidden_size 128] [--steps 40]

Contenders take turns in one process and their own CPU time is counted, so that a busy machine disturbs all alike.
"""

import argparse
import statistics
import time
from pathlib import Path

from fourfold.mesh.process import join_processes
from fourfold.train.bench import bench_config, nanogpt_step, our_step, synthetic_batch

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--nanogpt", type=Path)
parser.add_argument("--hidden_size", type=int, default=128)
parser.add_argument("--steps", type=int, default=40)
options = parser.parse_args()

SHAPE = {
    "num_layers": "4",
    "hidden_size": str(options.hidden_size),
    "num_attention_heads": "4",
    "vocab_size": "65",
    "compile": "false",
}

with join_processes("cpu", timeout_s=60.0) as process:

    def config(**keys: str):
        flags = {**SHAPE, "use_amp": "false", **keys}
        return bench_config("124M", 12, 64, list(flags.items()), process.device)

    batch = synthetic_batch(config(), process.device)
    contenders = {
        "float32": our_step(config(), process, lambda: batch),
        "float32, dropout 0.1": our_step(config(hidden_dropout_prob="0.1"), process, lambda: batch),
        "bfloat16": our_step(config(use_amp="true"), process, lambda: batch),
    }
    if options.nanogpt:
        contenders["nanoGPT, float32"] = nanogpt_step(config(), process.device, lambda: batch, options.nanogpt)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(options.steps):
        for name, step in contenders.items():
            began_s = time.process_time()
            step(number)
            times[name].append(time.process_time() - began_s)

first = statistics.median(times["float32"][3:])
for name, taken in times.items():
    median = statistics.median(taken[3:])
    print(f"{name:24} {1000 * median:7.1f} ms of CPU time  {median / first:.2f} of float32's")
