"""TensorBoard's file of curves.

It is written here and now: TensorBoard's own writer has a thread for it, which makes checksums in Python, and so takes
the interpreter from the step that is being launched.
"""

import json
import math
import os
import socket
import time
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[import-untyped]
from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]

# metrics.jsonl key -> TensorBoard tag; what is not here is not a curve
CURVES = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "lr": "train/lr",
    "loss_scale": "train/loss_scale",
    "skipped_steps": "train/skipped_steps",
    "tokens_per_s": "speed/tokens_per_s",
    "mfu": "speed/mfu",
    "reader_s": "speed/reader_s",
    "memory_gib": "speed/memory_gib",
    "slowest_rank_s": "speed/slowest_rank_s",
    "median_rank_s": "speed/median_rank_s",
    "eval_loss": "eval/loss",
}

FLUSH_S = 30.0
"""How much of the curves a kill may take; they are drawn again from metrics.jsonl."""


class Curves:
    """Open for the length of a run."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # a process may hold several runs within a second
        name = f"events.out.tfevents.{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}.{time.time_ns()}"
        self.records = RecordWriter((folder / name).open("wb"))
        self.records.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
        self.flush()

    def add(self, values: dict[str, Any]) -> None:
        """The points of a line of metrics.jsonl, in one record."""
        points = [
            Summary.Value(tag=tag, simple_value=math.nan if values[key] is None else values[key])
            for key, tag in CURVES.items()
            if key in values
        ]
        now_s = time.time()
        event = Event(wall_time=values.get("time", now_s), step=values["step"], summary=Summary(value=points))
        self.records.write(event.SerializeToString())
        if now_s - self.flushed_s > FLUSH_S:
            self.flush()

    def flush(self) -> None:
        self.records.flush()
        self.flushed_s = time.time()

    def close(self) -> None:
        self.records.close()


def reopen_curves(folder: Path, metrics: Path) -> Curves:
    """Curves are drawn again from metrics.jsonl: a kill can take their last half minute, and TensorBoard reads files in
    the order of the clocks that named them."""
    old = list(folder.glob("events.out.tfevents.*"))
    curves = Curves(folder)
    for text in metrics.read_text(encoding="utf-8").splitlines():
        curves.add(json.loads(text))
    curves.flush()
    for file in old:
        file.unlink()
    return curves
