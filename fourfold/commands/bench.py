"""`fourfold bench`: tokens per second, TFLOP/s and peak memory of whole steps, beside peers in one run if asked."""

import json
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer
from rich.table import Table

from fourfold.commands.options import screen, take_options
from fourfold.config.flags import parse_flags
from fourfold.errors import ConfigError
from fourfold.mesh.failure import describe
from fourfold.mesh.process import join_processes, keep_compiled
from fourfold.train.bench import SIZES, Measured, bench_config, measure

PEERS = ("nanogpt", "hf")

HELP = """Usage: fourfold bench [--sizes 124M,345M] [--batch N] [--seq_len N] [--against nanogpt,hf] [--key value ...]

Times whole optimizer steps, each contender and size in a process of its own: on synthetic tokens, or on those of
--input_dir, read as a run reads them.

  --sizes A,B      of 124M, 345M, 1.3B, 2.7B, 6.7B (124M)
  --batch N        sequences per step; 0 takes each size's usual one (0)
  --seq_len N      tokens per sequence (1024)
  --fp8            short for --amp_dtype float8; peers compute in bfloat16 all the same
  --against A,B    peers in the same run: nanogpt (a clone at --peer_path), hf (transformers, installed)
  --peer_path DIR  where nanoGPT's model.py lies (.)
  --warmup N       steps before timing, at least 3 (5)
  --steps N        timed steps, of which the median counts (20)
  --json FILE      also write the figures there, with the spread of the steps and the last gradient norm

It ends with exit code 1 if a contender failed, or learnt nothing."""

DEFAULTS: dict[str, Any] = {
    "--debug": False,
    "--help": False,
    "--sizes": "124M",
    "--batch": 0,
    "--seq_len": 1024,
    "--fp8": False,
    "--against": "",
    "--peer_path": ".",
    "--warmup": 5,
    "--steps": 20,
    "--json": "",
    "--contender": "",
}


def bench_command(context: typer.Context) -> None:
    """Measure speed and memory: fourfold bench [--sizes 124M,345M] [--against nanogpt,hf] [--key value ...]"""
    flags, own = take_options(context.args, DEFAULTS)
    if own["--help"]:
        screen.print(HELP, markup=False, soft_wrap=True)
        return
    sizes, peers = split_words(own["--sizes"]), split_words(own["--against"])
    check_words("--sizes", sizes, list(SIZES))
    check_words("--against", peers, list(PEERS))
    if own["--contender"]:
        measure_one(own, flags, sizes[0])
        return
    asked = [(contender, size) for size in sizes for contender in ("fourfold", *peers)]
    found = [
        measured
        for contender, size in asked
        if (measured := measure_in_process(context.args, contender, size)) is not None
    ]
    if found:
        print_table(found)
    if own["--json"]:
        Path(own["--json"]).write_text(json.dumps([asdict(each) for each in found], indent=1), encoding="utf-8")
    idle = [each for each in found if not each.has_learnt]
    for each in idle:
        norm = "zero" if each.last_grad_norm == 0.0 else "not finite"
        screen.print(
            f"{each.name} {each.size}: the gradient norm of the last step is {norm}. Nothing is learnt, and the speed "
            "of these steps means nothing.",
            style="bold red",
            markup=False,
        )
    if idle or len(found) < len(asked):
        raise typer.Exit(1)


def split_words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def check_words(name: str, words: list[str], known: list[str]) -> None:
    wrong = [word for word in words if word not in known]
    if wrong:
        raise ConfigError(f"{name} = {', '.join(wrong)} is not known; it can be {', '.join(known)}")


def measure_one(own: dict[str, Any], flags: list[str], size: str) -> None:
    """In the process of one contender and one size: measure, and leave the figures in --json, or why there are none."""
    result = Path(own["--json"])
    _, overrides = parse_flags(flags)
    keys = [(name, str(value)) for name, value in overrides] + [("amp_dtype", "float8")] * own["--fp8"]
    keep_compiled()
    try:
        with join_processes("auto", timeout_s=600.0) as process:
            batch = own["--batch"] or SIZES[size][1]
            config = bench_config(size, batch, own["--seq_len"], keys, process.device)
            peer_path = Path(own["--peer_path"])
            measured = measure(own["--contender"], size, config, process, peer_path, own["--warmup"], own["--steps"])
    except Exception as error:
        result.write_text(json.dumps({"failure": describe(error).splitlines()[0]}), encoding="utf-8")
        raise
    result.write_text(json.dumps(asdict(measured)), encoding="utf-8")


def measure_in_process(arguments: list[str], contender: str, size: str) -> Measured | None:
    """None where it failed, which has then been told."""
    with tempfile.TemporaryDirectory() as folder, screen.status(f"{contender} {size}"):
        result = Path(folder) / "measured.json"
        own = ["--contender", contender, "--sizes", size, "--against", "", "--json", str(result)]
        done = subprocess.run(
            [sys.executable, "-m", "fourfold", "bench", *arguments, *own], capture_output=True, text=True, check=False
        )
        if done.returncode == 0:
            return Measured(**json.loads(result.read_text(encoding="utf-8")))
        screen.print(f"{contender} {size} failed: {failure_of(done, result)}", markup=False, soft_wrap=True)
        return None


def failure_of(done: subprocess.CompletedProcess[str], result: Path) -> str:
    """What the process has left, or, where it came to nothing of the kind, how it ended."""
    if result.exists():
        return str(json.loads(result.read_text(encoding="utf-8"))["failure"])
    if done.returncode < 0:
        return f"its process was ended by {signal.Signals(-done.returncode).name}"
    last = done.stderr.strip().splitlines()[-1:]
    return last[0] if last else f"its process ended with exit code {done.returncode}"


def print_table(found: list[Measured]) -> None:
    columns = ("size", "precision", "batch", "tokens/s", "step ms", "TFLOP/s", "MFU %", "peak GiB", "first step s")
    table = Table("", *columns, "speed", "memory", box=None)
    for each in found:
        ours = next(other for other in found if other.size == each.size)
        table.add_row(
            each.name,
            each.size,
            each.precision,
            str(each.batch),
            f"{each.tokens_per_s:,.0f}",
            f"{each.step_ms:.1f}",
            f"{each.tflops_per_s:.3g}",
            f"{100 * each.mfu:.1f}",
            f"{each.peak_gib:.1f}",
            f"{each.first_step_s:.1f}",
            f"{ours.tokens_per_s / each.tokens_per_s:.3f}x",
            f"{ours.peak_gib / each.peak_gib:.2f}x",
        )
    screen.print(table)
    screen.print("speed and memory: the first contender of a size against each", style="dim")
