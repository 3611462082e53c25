import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

from fourfold.data.loader import Batch, TrainLoader
from fourfold.train.ahead import build_sender
from tests.tiny import run_training, tiny_config


def test_on_a_cpu_a_batch_is_there_already() -> None:
    batch = Batch(*(torch.zeros(2, 3) for _ in range(3)))
    assert build_sender(torch.device("cpu"))(batch) is batch


def test_on_a_gpu_it_is_copied_aside_and_the_step_waits_for_it_and_keeps_its_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[str] = []

    class Stream:
        def __init__(self, name: object) -> None:
            self.name = "aside" if isinstance(name, torch.device) else str(name)

        def wait_stream(self, other: "Stream") -> None:
            told.append(f"{self.name} waits for {other.name}")

    class Tensor:
        def to(self, device: torch.device, non_blocking: bool) -> "Tensor":
            told.append(f"copied {'without' if non_blocking else 'with'} waiting, on {current[-1].name}")
            return self

        def record_stream(self, stream: Stream) -> None:
            told.append(f"kept for {stream.name}")

    @contextlib.contextmanager
    def on(stream: Stream) -> Any:
        current.append(stream)
        yield
        current.pop()

    current = [Stream("computing")]
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    batch = Batch(*(Tensor() for _ in range(2)), None)  # type: ignore[arg-type]
    sent = build_sender(torch.device("cuda"))(batch)
    assert sent == batch
    copies = ["copied without waiting, on aside"] * 2
    assert told == [*copies, "computing waits for aside", "kept for computing", "kept for computing"]


def test_a_run_takes_a_batch_per_step_and_none_after_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, taken = TrainLoader.next_batch, []

    def counted(loader: TrainLoader) -> Batch:
        taken.append(loader.step)
        return real(loader)

    monkeypatch.setattr(TrainLoader, "next_batch", counted)
    run_training(tiny_config(tmp_path, max_steps=3))
    assert taken == [0, 1, 2]
