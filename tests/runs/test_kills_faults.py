"""Real runs whose disk is full, read-only or taken by another run: a sentence, exit code 2, nothing saved is lost."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fourfold.checkpoint.store import complete_checkpoints, verify_checkpoint
from tests.runs.forked import Forks
from tests.tiny import write_text

TINY = """
global: {{device: cpu, global_batch_size: 8}}
model: {{num_layers: 2, hidden_size: 64, num_attention_heads: 2}}
data: {{input_dir: {text}, max_seq_len: 16, split: "90,10,0"}}
distributed: {{sharding: {{sharding_degree: 2, sharding_stage: 1}}}}
engine:
  max_steps: {steps}
  logging_freq: 1
  eval_freq: 0
  eval_iters: 0
  save_steps: 10
  keep_last: 0
  output_dir: {output}
  async_save: {is_async}
  max_time: {max_time}
"""


def write_config(
    folder: Path, output: Path, steps: int = 100_000, is_async: bool = True, max_time: str = "null"
) -> Path:
    if not (folder / "text.txt").exists():
        write_text(folder)
    text = folder / "text.txt"
    path = folder / "config.yaml"
    path.write_text(
        TINY.format(text=text, output=output, steps=steps, is_async=str(is_async).lower(), max_time=max_time),
        encoding="utf-8",
    )
    return path


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("only root can mount a small disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def wait_for_checkpoint(output: Path, pids: list[int], log: Path, count: int = 1) -> None:
    patience_s = time.monotonic() + 60
    while len(complete_checkpoints(output)) < count:
        assert time.monotonic() < patience_s, log.read_text()[-3000:]
        time.sleep(0.01)


@pytest.mark.parametrize("is_async", [True, False], ids=["behind", "waiting"])
def test_a_disk_that_fills_up_stops_the_run_with_a_sentence(tmp_path: Path, forks: Forks, is_async: bool) -> None:
    log = tmp_path / "log"
    with small_disk(tmp_path / "disk", "6m") as disk:
        config = write_config(tmp_path, disk / "run", is_async=is_async)
        codes = forks.wait(forks.start(config, 2, log))
        assert codes == [2, 2] or sorted(codes) == [1, 2], log.read_text()[-3000:]
        said = log.read_text()
        assert "No space left on device" in said and "Traceback" not in said
        complete = complete_checkpoints(disk / "run")
        assert len(complete) >= 1
        for path in complete:
            verify_checkpoint(path)
        if codes == [2, 2]:
            assert not list((disk / "run" / "checkpoints").glob(".*")), "what was begun is not in the way"


def test_a_disk_that_becomes_read_only_stops_the_run_with_a_sentence(tmp_path: Path, forks: Forks) -> None:
    log = tmp_path / "log"
    with small_disk(tmp_path / "disk", "60m") as disk, small_disk(tmp_path / "saved", "60m") as saved:
        (disk / "run").mkdir()
        (disk / "run" / "checkpoints").symlink_to(saved)  # so that it is the checkpoints alone that cannot be written
        pids = forks.start(write_config(tmp_path, disk / "run"), 2, log)
        wait_for_checkpoint(disk / "run", pids, log)
        for _ in range(500):  # refused while a file is open for writing
            done = subprocess.run(["mount", "-o", "remount,ro", str(saved)], capture_output=True)
            if done.returncode == 0:
                break
            time.sleep(0.002)
        assert done.returncode == 0
        assert forks.wait(pids) == [2, 2], log.read_text()[-3000:]
        assert "could not be saved" in log.read_text() and "Read-only file system" in log.read_text()
        for path in complete_checkpoints(disk / "run"):
            verify_checkpoint(path)


def test_a_read_only_output_dir_is_refused_at_once(tmp_path: Path, forks: Forks) -> None:
    log = tmp_path / "log"
    with small_disk(tmp_path / "disk", "1m") as disk:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        assert 2 in forks.wait(forks.start(write_config(tmp_path, disk / "run"), 2, log))
    assert "cannot be written to (Read-only file system)" in log.read_text()


def test_two_runs_on_one_output_dir_are_refused_and_a_dead_one_gives_way(tmp_path: Path, forks: Forks) -> None:
    output = tmp_path / "run"
    config = write_config(tmp_path, output)
    first = forks.start(config, 2, tmp_path / "first.log")
    wait_for_checkpoint(output, first, tmp_path / "first.log")
    second = forks.start(config, 2, tmp_path / "second.log")
    assert forks.wait(second) == [2, 2]
    assert (
        f"in use by another run, process {first[0]} on {socket.gethostname()}" in (tmp_path / "second.log").read_text()
    )
    for pid in first:
        os.kill(pid, signal.SIGKILL)
    assert forks.wait(first) == [-9, -9]
    third = forks.start(config, 2, tmp_path / "third.log")
    steps = len(complete_checkpoints(output))
    wait_for_checkpoint(output, third, tmp_path / "third.log", steps + 1)
    os.kill(third[1], signal.SIGTERM)  # one rank is asked, all stop
    assert forks.wait(third) == [143, 143], (tmp_path / "third.log").read_text()[-3000:]
    assert f"process {first[0]} on" in (output / "logs" / "workerlog.0").read_text(), "the takeover is told"


def test_max_time_stops_all_ranks_together_and_says_so_by_its_exit_code(tmp_path: Path, forks: Forks) -> None:
    began_s = time.monotonic()
    config = write_config(tmp_path, tmp_path / "run", max_time="00:06")
    assert forks.wait(forks.start(config, 2, tmp_path / "log")) == [75, 75], (tmp_path / "log").read_text()[-3000:]
    assert time.monotonic() - began_s < 12
    newest = complete_checkpoints(tmp_path / "run")[-1]
    assert f"Stopped after step {int(newest.name.removeprefix('step_')):,} of" in (tmp_path / "log").read_text()
