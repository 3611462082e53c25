"""Real processes that end badly: the whole job ends within seconds, and the rank that failed first is the one shown."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

TINY = """
global: {device: cpu, global_batch_size: 8}
model: {num_layers: 2, hidden_size: 32, num_attention_heads: 2}
data: {input_dir: builtin:pydoc, truncate: 0.1, max_seq_len: 16, split: "90,10,0"}
distributed: {dp_degree: 2}
engine: {max_steps: 100000, logging_freq: 1, eval_freq: 0, save_steps: 0}
"""


@pytest.fixture
def job(tmp_path: Path) -> subprocess.Popen[str]:
    (tmp_path / "config.yaml").write_text(TINY, encoding="utf-8")
    command = [sys.executable, "-m", "fourfold", "train", str(tmp_path / "config.yaml")]
    process = subprocess.Popen(
        [*command, "--output_dir", str(tmp_path / "output")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    yield process  # type: ignore[misc]
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


def wait_for_step(job: subprocess.Popen[str]) -> None:
    assert job.stdout is not None
    for line in job.stdout:
        if "global step 3," in line:
            return
    pytest.fail("the job ended before its third step")


def worker_pids(job: subprocess.Popen[str]) -> list[int]:
    found = subprocess.run(["ps", "--ppid", str(job.pid), "-o", "pid="], capture_output=True, text=True, check=False)
    return [int(pid) for pid in found.stdout.split()]


def is_alive(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and state.read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0] != "Z"


def test_killed_rank_ends_the_job_within_seconds_and_is_named(job: subprocess.Popen[str]) -> None:
    wait_for_step(job)
    workers = worker_pids(job)
    assert len(workers) == 2
    os.kill(workers[1], signal.SIGKILL)
    began_s = time.monotonic()
    output, _ = job.communicate(timeout=60)
    assert time.monotonic() - began_s < 30
    assert job.returncode == 1
    assert "rank 1 on " in output and "failed first" in output and "SIGKILL" in output
    assert "Traceback" not in output
    assert not any(is_alive(pid) for pid in workers)


def test_interrupt_saves_on_all_ranks_together_and_leaves_no_process(
    job: subprocess.Popen[str], tmp_path: Path
) -> None:
    wait_for_step(job)
    workers = worker_pids(job)
    os.kill(job.pid, signal.SIGINT)
    output, _ = job.communicate(timeout=60)
    assert job.returncode == 130
    assert "Stopped after step" in output and "To go on from there" in output
    assert len(list((tmp_path / "output" / "checkpoints").glob("step_*/manifest.json"))) == 1
    assert not any(is_alive(pid) for pid in workers)


def test_rank_that_raises_is_shown_before_the_others(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(TINY, encoding="utf-8")
    code = (
        "import sys, torch.distributed as dist\n"
        "from fourfold.train import loop\n"
        "honest = loop.train_step\n"
        "def failing(run, batch, step, asked):\n"
        "    if step == 2 and dist.get_rank() == 1: raise ValueError('the third step went wrong here')\n"
        "    return honest(run, batch, step, asked)\n"
        "loop.train_step = failing\n"
        "from fourfold.cli import main\n"
        f"sys.argv = ['fourfold', 'train', '{tmp_path}/config.yaml', '--output_dir', '{tmp_path}/o']\n"
        "main()\n"
    )
    script = tmp_path / "worker.py"
    script.write_text(code, encoding="utf-8")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script)]
    done = subprocess.run(torchrun, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    root_cause = done.stderr[done.stderr.index("Root Cause") :]
    assert "rank      : 1" in root_cause and "the third step went wrong here" in root_cause
    assert "the third step went wrong here" in (tmp_path / "o" / "logs" / "workerlog.1").read_text(encoding="utf-8")
