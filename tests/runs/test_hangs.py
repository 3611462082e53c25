"""Real processes that stop making progress: reported with every rank's stack in time, and the job ends."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fourfold.launch.torchrun import LOCAL_ENVIRONMENT
from fourfold.train.watch import HUNG
from tests.runs.test_launch import TINY, is_alive

HANG_TIMEOUT_S = 3.0
BAR_S = 15.0
"""On two idle cores the report is there 2 s after the timeout; here other tests share them."""

# rank 1 computes more than the others from its first step on; rank 2 falls asleep over its 41st batch
MISHAPS = """
import sys, time, torch.distributed as dist
from fourfold.data.loader import TrainLoader
from fourfold.train import step

next_batch, to_device = TrainLoader.next_batch, step.to_device

def falls_asleep(self):
    if self.step == 40 and dist.get_rank() == 2:
        time.sleep(1000)
    return next_batch(self)

def takes_long(batch, device):
    began_s = time.thread_time()
    while dist.get_rank() == 1 and time.thread_time() - began_s < 0.15:
        pass
    return to_device(batch, device)

TrainLoader.next_batch, step.to_device = falls_asleep, takes_long
from fourfold.cli import main
main()
"""


class Job:
    """A run whose output is read as it comes, each line with its time."""

    def __init__(self, command: list[str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=LOCAL_ENVIRONMENT | os.environ,
            cwd=Path(__file__).parents[2],
            start_new_session=True,
        )
        self.lines: list[tuple[float, str]] = []
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line))

    def wait_for(self, text: str, longest_s: float = 90.0) -> float:
        """When the first line with this text came."""
        until_s = time.monotonic() + longest_s
        while time.monotonic() < until_s:
            found = [at_s for at_s, line in list(self.lines) if text in line]
            if found:
                return found[0]
            if not self.reader.is_alive():
                break
            time.sleep(0.02)
        pytest.fail(f"no line has {text!r} in it:\n{self.output}")

    @property
    def output(self) -> str:
        return "".join(line for _, line in self.lines)

    def ranks(self) -> dict[int, int]:
        """Rank to process id, of all workers below this job."""
        found = {}
        listing = subprocess.run(["ps", "-s", str(self.process.pid), "-o", "pid="], capture_output=True, text=True)
        workers = subprocess.run(
            ["ps", "--ppid", str(self.process.pid), "-o", "pid="], capture_output=True, text=True, check=False
        )
        for pid in (listing.stdout + workers.stdout).split():
            try:
                environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            for each in environment:
                if each.startswith(b"RANK="):
                    found[int(each[5:])] = int(pid)
        return found


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    started: list[Job] = []
    yield started
    for job in started:
        pids = job.ranks().values() if job.process.poll() is None else []
        for pid in [*pids, job.process.pid]:
            if job.process.poll() is None:
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("rank", [1, 0])
def test_a_suspended_rank_is_reported_with_all_stacks_in_time_and_nothing_is_left(
    rank: int, tmp_path: Path, jobs: list[Job]
) -> None:
    """The first rank is a case of its own: the others talk through a store that lives in it, and it has the console."""
    (tmp_path / "config.yaml").write_text(TINY, encoding="utf-8")
    keys = f"--output_dir {tmp_path}/output --hang_timeout {HANG_TIMEOUT_S}"
    job = Job(["-m", "fourfold", "train", str(tmp_path / "config.yaml"), *keys.split()])
    jobs.append(job)
    job.wait_for("global step 3,")
    pids = job.ranks()
    assert sorted(pids) == [0, 1]
    os.kill(pids[rank], signal.SIGSTOP)
    began_s = time.monotonic()
    told_s = job.wait_for("all threads of each rank are in", 60.0) - began_s
    job.process.wait(60)
    job.reader.join(10)
    assert HANG_TIMEOUT_S - 1.0 < told_s < HANG_TIMEOUT_S + BAR_S
    step = re.search(rf"rank {rank} on \S+ \(pid {pids[rank]}\) is suspended in step (\d+) while training", job.output)
    assert step and int(step[1]) >= 3, job.output
    blocks = re.findall(r"ranks? ([0-9, ]+), in step \d+ while training:\n.*?\n.*? in train_alone", job.output, re.S)
    assert sorted(int(each) for block in blocks for each in block.split(",")) == [0, 1], job.output
    assert job.process.returncode == HUNG
    assert not any(is_alive(pid) for pid in pids.values())
    for each in (0, 1):
        log = (tmp_path / "output" / "logs" / f"workerlog.{each}").read_text(encoding="utf-8")
        assert "most recent call first" in log and "train_alone" in log


def test_a_sleeping_rank_is_found_and_a_slow_one_is_named_but_is_no_hang(tmp_path: Path, jobs: list[Job]) -> None:
    """Forty steps with evaluations and saves take several times the timeout."""
    (tmp_path / "config.yaml").write_text(TINY, encoding="utf-8")
    (tmp_path / "worker.py").write_text(MISHAPS, encoding="utf-8")
    torchrun = "-m torch.distributed.run --standalone --nproc_per_node=4"
    keys = f"--output_dir {tmp_path}/output --hang_timeout {HANG_TIMEOUT_S} --mp_degree 2"
    work = "--eval_freq 10 --eval_iters 2 --save_steps 40"
    worker = [str(tmp_path / "worker.py"), "train", str(tmp_path / "config.yaml")]
    job = Job([*torchrun.split(), *worker, *keys.split(), *work.split()])
    jobs.append(job)
    due_s = job.wait_for("saving step 40:") + HANG_TIMEOUT_S
    pids = job.ranks()
    assert job.wait_for("all threads of each rank are in", 60.0) < due_s + BAR_S
    job.process.wait(60)
    job.reader.join(10)
    assert re.search(r"rank 2 on \S+ \(pid \d+\) waits for no other rank in step 41 while training", job.output)
    suspect = job.output[job.output.index("\nrank 2, in step 41") : job.output.index("\nranks 0, 1, 3, in step 41")]
    assert "time.sleep(1000)" in suspect and "in falls_asleep" in suspect
    assert job.output.count("nothing has moved for 3 s") >= 1 and job.process.returncode != 0
    assert not any(is_alive(pid) for pid in pids.values())
    assert (tmp_path / "output" / "checkpoints" / "step_00000040" / "manifest.json").exists()

    assert re.search(r"\[ WARNING\] - rank 1 on \S+ takes [\d.]+ times as long as the median rank", job.output)
    lines = [json.loads(text) for text in (tmp_path / "output" / "metrics.jsonl").read_text().splitlines()]
    own = [values for values in lines if "rank_s" in values]
    assert [values["step"] for values in own] == list(range(2, 41))
    assert all(len(values["rank_s"]) == 4 and min(values["rank_s"]) > 0.0 for values in own)
    slow = sum(values["slowest_rank"] == 1 and values["slowest_rank_s"] >= 0.15 for values in own)
    assert slow > 35 and all(values["median_rank_s"] in values["rank_s"] for values in own)
