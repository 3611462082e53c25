import json
from pathlib import Path

import pytest

from tests.tiny import run_training, tiny_config


@pytest.mark.parametrize(("start", "stop", "steps"), [(1, 1, [1]), (3, 4, [3, 4]), (5, 9, [5, 6])])
def test_a_trace_of_exactly_the_steps_asked_for_is_written(
    tmp_path: Path, start: int, stop: int, steps: list[int]
) -> None:
    """Steps that the run does not reach are missing from the trace, and the trace is written all the same."""
    run_training(tiny_config(tmp_path, max_steps=6, num_layers=1, enable=True, start_step=start, stop_step=stop))
    trace = json.loads((tmp_path / "run" / "profile" / "trace_rank0.json").read_text())
    names = [event.get("name", "") for event in trace["traceEvents"]]
    updates = [name for name in names if name.startswith("Optimizer.step#AdamW.step")]
    assert len(updates) == len(steps)
    profiled = {int(name.removeprefix("ProfilerStep#")) + 1 for name in names if name.startswith("ProfilerStep#")}
    assert min(profiled) == start


def test_without_the_profiler_there_is_no_trace(tmp_path: Path) -> None:
    run_training(tiny_config(tmp_path, max_steps=1, num_layers=1))
    assert not (tmp_path / "run" / "profile").exists()
