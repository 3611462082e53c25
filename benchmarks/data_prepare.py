"""Tokenizing speed and memory of `fourfold prepare`, and of Megatron-LM's preprocess_data with the same tokenizer.

    python benchmarks/data_prepare.py TOKENIZER [--megabytes 1000] [--workers 1] [--megatron CHECKOUT]

The input is this Python's own documentation as JSON lines, over and over. Speed is megabytes of text per second over
the whole command, start-up included; memory is the largest sum of proportional set sizes of the command's processes.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from pydoc_data.topics import topics


def write_input(path: Path, megabytes: float) -> int:
    lines = [json.dumps({"text": topics[name]}) + "\n" for name in sorted(topics)]
    text_bytes = sum(len(topics[name].encode()) for name in topics)
    rounds = max(1, round(megabytes * 1e6 / text_bytes))
    with path.open("w", encoding="utf-8") as stream:
        for _ in range(rounds):
            stream.writelines(lines)
    return rounds * text_bytes


def proportional_bytes(root: int) -> int:
    """Of a process and its children: pages they share count once each, as proportional set size."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
        except (OSError, IndexError):
            continue
    total, waiting = 0, [root]
    while waiting:
        process = waiting.pop()
        waiting += children.get(process, [])
        try:
            for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
                total += 1024 * int(line.split()[1]) if line.startswith("Pss:") else 0
        except OSError:
            continue
    return total


def measure(command: list[str], cwd: Path | None = None) -> tuple[float, int]:
    began_s, most = time.perf_counter(), 0
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, cwd=cwd, stdout=output, stderr=subprocess.STDOUT)
        while process.poll() is None:
            most = max(most, proportional_bytes(process.pid))
            time.sleep(0.2)
        took_s = time.perf_counter() - began_s
        if process.returncode:
            output.seek(0)
            sys.exit(output.read()[-3000:])
    return took_s, most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", type=Path, help="a Hugging Face tokenizer.json, in a folder of its own")
    parser.add_argument("--megabytes", type=float, default=1000)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--megatron", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text_bytes = write_input(folder / "corpus.jsonl", asked.megabytes)
        print(f"{text_bytes / 1e6:,.0f} MB of text, {asked.workers} workers")
        commands: dict[str, tuple[list[str], list[str], Path | None]] = {
            "fourfold prepare": (
                [sys.executable, "-m", "fourfold", "prepare", "corpus.jsonl", "--output_prefix", "ours/corpus"],
                ["--tokenizer", str(asked.tokenizer.resolve()), "--workers", str(asked.workers)],
                folder,
            )
        }
        if asked.megatron:
            commands["Megatron preprocess_data"] = (
                [sys.executable, "tools/preprocess_data.py", "--input", str(folder / "corpus.jsonl"), "--append-eod"],
                [
                    *("--output-prefix", str(folder / "theirs"), "--tokenizer-type", "HuggingFaceTokenizer"),
                    *("--tokenizer-model", str(asked.tokenizer.resolve().parent), "--workers", str(asked.workers)),
                ],
                asked.megatron,
            )
        print(f"{'':<26}{'seconds':>10}{'MB/s':>10}{'MB/s per worker':>18}{'memory, MiB':>14}")
        for title, (command, options, cwd) in commands.items():
            took_s, most = measure([*command, *options], cwd)
            speed = text_bytes / 1e6 / took_s
            print(f"{title:<26}{took_s:>10.1f}{speed:>10.2f}{speed / asked.workers:>18.2f}{most / 2**20:>14.0f}")


if __name__ == "__main__":
    main()
