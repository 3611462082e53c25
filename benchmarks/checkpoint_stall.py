"""How long training waits for an asynchronous save, against a synchronous one, in one run on one process.

    python benchmarks/checkpoint_stall.py [--model gpt3-350M] [--folder DIR] [--saves 3]

The state is that of the model under AdamW (weights and two moments in float32) in host memory. It prints the seconds of
each kind of save and their ratio. Writing goes to --folder, by default a temporary one: take the disk you train on. It
needs twice the state in memory and once on disk: 8.5 GiB and 4 GiB for 350M.
"""

import argparse
import resource
import statistics
import tempfile
import time
from pathlib import Path

import torch

from fourfold.checkpoint.saver import Saver
from fourfold.checkpoint.state import Piece, Progress, whole_piece
from fourfold.config.load import load_config
from fourfold.config.resolve import resolve
from fourfold.config.schema import Engine, Model
from fourfold.cost.params import parameters
from fourfold.mesh.process import join_processes


def state_of(model: Model) -> dict[str, Piece]:
    groups = ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq")
    return {
        f"{group}.{parameter.name}": whole_piece(torch.full(parameter.shape, 0.5))
        for group in groups
        for parameter in parameters(model)
    }


def timed_saves(folder: Path, pieces: dict[str, Piece], is_async: bool, saves: int) -> tuple[list[float], list[float]]:
    """Seconds that training waited, and seconds until the checkpoint was complete, of each save."""
    waited_s, took_s = [], []
    engine = Engine(output_dir=str(folder), keep_last=1, async_save=is_async)
    with Saver(engine, folder) as saver:
        saver.reserve(pieces)
        saver.wait()  # a run has its first steps for this
        for step in range(1, saves + 1):
            began_s = time.perf_counter()
            waited_s.append(saver.save(pieces, Progress(step, step, {}, ""), {}))
            saver.wait()
            took_s.append(time.perf_counter() - began_s)
    return waited_s, took_s


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--model", default="gpt3-350M")
    arguments.add_argument("--folder", default=None)
    arguments.add_argument("--saves", type=int, default=3)
    given = arguments.parse_args()
    model = resolve(load_config(None, [("model_name_or_path", given.model)]), 1, has_gpu=False).model
    pieces = state_of(model)
    size_gib = sum(piece.tensor.nbytes for piece in pieces.values()) / 2**30
    with join_processes("cpu", 60.0), tempfile.TemporaryDirectory(dir=given.folder) as folder:
        _, sync_s = timed_saves(Path(folder) / "sync", pieces, False, given.saves)
        stall_s, total_s = timed_saves(Path(folder) / "async", pieces, True, given.saves)
    peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{given.model}: {size_gib:.2f} GiB of state, peak host memory {peak_gib:.2f} GiB")
    print(f"synchronous save   {[f'{each:.2f}' for each in sync_s]} s, median {statistics.median(sync_s):.2f}")
    print(f"asynchronous save  {[f'{each:.2f}' for each in total_s]} s until complete")
    print(f"  training waited  {[f'{each:.2f}' for each in stall_s]} s, median {statistics.median(stall_s):.2f}")
    print(f"stall / synchronous: first save {stall_s[0] / sync_s[0]:.1%}, median {ratio(stall_s, sync_s):.1%}")


def ratio(stall_s: list[float], sync_s: list[float]) -> float:
    return statistics.median(stall_s) / statistics.median(sync_s)


if __name__ == "__main__":
    main()
