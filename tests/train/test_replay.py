"""The order of things around a recorded step. The graph itself needs a GPU; here a stand-in takes its place."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from fourfold.data.loader import Batch
from fourfold.errors import ConfigError
from fourfold.mesh.process import Process
from fourfold.train.replay import STEPS_BEFORE, Replay, is_replayable
from tests.tiny import tiny_config


class Result(NamedTuple):
    total: torch.Tensor
    lr: torch.Tensor


def batch_of(number: int) -> Batch:
    return Batch(torch.full((2, 3), number), torch.full((2, 3), number), torch.zeros(2, dtype=torch.int64))


class Step:
    """Counts its calls, and adds to a state as an optimizer does."""

    def __init__(self) -> None:
        self.calls = 0
        self.state = torch.zeros(())

    def __call__(self, batch: Batch, numbers: torch.Tensor) -> Result:
        self.calls += 1
        self.state += batch.tokens_bt.sum()
        return Result(self.state.clone(), numbers[0])


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Graphs made during the test."""
    graphs: list[Any] = []

    class Graph:
        again: Callable[[], None]

        def __init__(self) -> None:
            graphs.append(self)

        def replay(self) -> None:
            self.again()

    @contextmanager
    def recording(graph: Graph, capture_error_mode: str) -> Iterator[None]:
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    yield graphs


def test_a_step_is_recorded_once_and_replayed_with_what_is_new(recorded: list[Any]) -> None:
    replay, step = Replay(is_possible=True), Step()
    results = []
    for number in range(1, STEPS_BEFORE + 1):
        results.append(replay(step, batch_of(number), torch.tensor([float(number)])))
    assert step.calls == STEPS_BEFORE and not recorded

    def again() -> None:  # what a graph does: the same tensors, without the function
        replay.result.total.copy_(replay.batch.tokens_bt.sum())
        replay.result.lr.copy_(replay.numbers[0])

    for number in range(STEPS_BEFORE + 1, STEPS_BEFORE + 4):
        if recorded:
            recorded[0].again = again
        else:
            torch.cuda.CUDAGraph.again = lambda self: again()  # type: ignore[attr-defined]
        results.append(replay(step, batch_of(number), torch.tensor([float(number)])))
    assert len(recorded) == 1 and step.calls == STEPS_BEFORE + 1  # once more, to record it
    assert [result.lr.item() for result in results] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert [result.total.item() for result in results[STEPS_BEFORE:]] == [18.0, 24.0, 30.0]  # none overwritten since


@pytest.mark.parametrize("kind", [torch.AcceleratorError, RuntimeError])
def test_a_step_that_cannot_be_recorded_ends_with_a_sentence(
    kind: type[RuntimeError], recorded: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def refusing(graph: Any, capture_error_mode: str) -> Iterator[None]:
        yield
        raise kind("operation not permitted when stream is capturing\nand much more")

    monkeypatch.setattr(torch.cuda, "graph", refusing)
    replay, step = Replay(is_possible=True), Step()
    for _ in range(STEPS_BEFORE):
        replay(step, batch_of(1), torch.tensor([0.5]))
    with pytest.raises(ConfigError, match=r"not permitted when stream is capturing\); write compile: false"):
        replay(step, batch_of(1), torch.tensor([0.5]))


def test_a_recording_for_which_memory_is_too_small_is_told_as_such(
    recorded: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def too_large(graph: Any, capture_error_mode: str) -> Iterator[None]:
        yield
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.cuda, "graph", too_large)
    replay, step = Replay(is_possible=True), Step()
    for _ in range(STEPS_BEFORE):
        replay(step, batch_of(1), torch.tensor([0.5]))
    with pytest.raises(torch.OutOfMemoryError):
        replay(step, batch_of(1), torch.tensor([0.5]))


def test_nothing_is_recorded_where_it_is_not_possible(recorded: list[Any]) -> None:
    replay, step = Replay(is_possible=False), Step()
    for _ in range(4):
        replay(step, batch_of(1), torch.tensor([0.5]))
    assert step.calls == 4 and not recorded


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, True),
        ({"compile": False}, False),
        ({"attention_probs_dropout_prob": 0.1}, True),
        ({"use_recompute": True}, False),  # which reads a generator's state
        ({"sharding_offload": True}, False),
    ],
)
def test_what_is_recorded(tmp_path: Path, keys: dict[str, Any], expected: bool) -> None:
    config = tiny_config(tmp_path, **({"compile": True} | keys))
    process = Process(0, 1, 0, torch.device("cuda"), 60.0)
    assert is_replayable(config, process) is expected
    assert not is_replayable(config, dataclasses.replace(process, world_size=2))
