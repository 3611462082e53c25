"""Signals to the launcher of several processes reach them all; they save together, and the exit code says which."""

import os
import signal
import time
from pathlib import Path

import pytest

from fourfold.checkpoint.store import complete_checkpoints, verify_checkpoint
from tests.runs.test_launch import is_alive, job, wait_for_step, worker_pids  # noqa: F401


def test_the_warning_of_a_queue_saves_on_all_ranks(job, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]  # noqa: F811
    wait_for_step(job)
    workers = worker_pids(job)
    os.kill(job.pid, signal.SIGUSR1)
    output, _ = job.communicate(timeout=60)
    assert job.returncode == 128 + signal.SIGUSR1, output[-3000:]
    assert "Stopped after step" in output and "Traceback" not in output
    [path] = complete_checkpoints(tmp_path / "output")
    verify_checkpoint(path)
    assert not any(is_alive(pid) for pid in workers)


@pytest.mark.slow
def test_a_second_interrupt_stops_all_at_once(job, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]  # noqa: F811
    wait_for_step(job)
    workers = worker_pids(job)
    os.kill(workers[1], signal.SIGSTOP)  # the other one waits for it, and hears nothing
    for _ in range(2):
        os.kill(job.pid, signal.SIGINT)
        time.sleep(0.5)
    job.communicate(timeout=10)
    assert job.returncode == 130
    assert not any(is_alive(pid) for pid in workers)
