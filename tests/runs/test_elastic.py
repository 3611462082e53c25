"""Ranks that are killed: the group is back within seconds, and ends as if nothing had happened."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.ports import free_port
from tests.runs.test_launch import is_alive, worker_pids

RECOVERY_S = 60
"""More than any machine needs: two idle cores need about a tenth. `pytest -m slow -s` on this file shows the times."""
CONFIG = """
global: {device: cpu, global_batch_size: 8}
model: {num_layers: 2, hidden_size: 32, num_attention_heads: 2, hidden_dropout_prob: 0.1}
data: {input_dir: builtin:pydoc, truncate: 0.1, max_seq_len: 16, split: "90,10,0"}
distributed: {dp_degree: 2}
engine: {logging_freq: 1, eval_freq: 0, eval_iters: 0, save_steps: 7}
"""


# a machine whose own name nobody knows, as laptops and containers are; only root can make one
NAMELESS = ("unshare", "--uts", "sh", "-c", 'hostname nobody-knows; exec "$0" "$@"') if os.geteuid() == 0 else ()


def start(tmp_path: Path, *flags: str, on: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    (tmp_path / "config.yaml").write_text(CONFIG, encoding="utf-8")
    return subprocess.Popen(
        [*on, sys.executable, "-m", "fourfold", "train", str(tmp_path / "config.yaml"), *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def losses(output: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def read_until(job: subprocess.Popen[str], said: list[str], words: str) -> str:
    """The next line of the job's that has these words."""
    assert job.stdout is not None
    for line in job.stdout:
        said.append(line)
        if words in line:
            return line
    pytest.fail(f"the job ended before it said '{words}':\n" + "".join(said[-20:]))


def next_step(job: subprocess.Popen[str], said: list[str]) -> int:
    """The number of the next step that the job tells of."""
    return int(read_until(job, said, "global step ").split("global step ")[1].split(",")[0])


def kill_ranks(tmp_path: Path, kills: int, seed: int) -> None:
    chance = random.Random(seed)
    steps = str(30 * kills + 90)
    undisturbed = start(tmp_path, "--max_steps", steps, "--output_dir", str(tmp_path / "undisturbed"))
    undisturbed.communicate(timeout=120)
    assert undisturbed.returncode == 0
    job = start(
        tmp_path, "--max_steps", steps, "--output_dir", str(tmp_path / "disturbed"), "--max_restarts", str(kills)
    )
    said: list[str] = []
    workers: list[int] = []
    noticed_s: list[float] = []
    took_s: list[float] = []
    for kill in range(kills):
        until = 30 * kill + chance.randrange(10, 29)
        while next_step(job, said) < until:
            pass
        time.sleep(chance.uniform(0.0, 0.05))  # anywhere inside a step or a save
        ranks = worker_pids(job)
        workers += ranks
        began_s = time.monotonic()
        os.kill(chance.choice(ranks), signal.SIGKILL)
        read_until(job, said, f"restart {kill + 1} of {kills}")
        noticed_s.append(time.monotonic() - began_s)
        next_step(job, said)
        took_s.append(time.monotonic() - began_s)
    for what, times_s in (("noticed", noticed_s), ("back in training", took_s)):
        print(f"{what} after", " ".join(f"{each:.2f}" for each in times_s), "s")
    assert max(took_s) < RECOVERY_S
    output, _ = job.communicate(timeout=120)
    assert job.returncode == 0, "".join(said[-20:]) + output
    assert losses(tmp_path / "disturbed") == losses(tmp_path / "undisturbed")
    assert len(losses(tmp_path / "disturbed")) == int(steps)
    assert not any(is_alive(pid) for pid in workers)


@pytest.mark.slow
def test_ten_killed_ranks_are_replaced_each_within_seconds(tmp_path: Path) -> None:
    kill_ranks(tmp_path, kills=10, seed=2)


def test_a_run_that_is_asked_to_stop_is_not_started_again_and_one_whose_launcher_is_killed_saves_and_ends(
    tmp_path: Path,
) -> None:
    flags = ("--max_steps", "100000", "--max_restarts", "3", "--save_steps", "0", "--output_dir", str(tmp_path / "o"))
    job, said = start(tmp_path, *flags, on=NAMELESS), []
    next_step(job, said)
    os.kill(job.pid, signal.SIGTERM)
    output, _ = job.communicate(timeout=60)
    assert job.returncode == 143 and "Stopped after step" in output and "restart" not in output

    job, said = start(tmp_path, *flags), []
    next_step(job, said)
    workers = worker_pids(job)
    job.kill()
    job.wait(timeout=10)
    deadline_s = time.monotonic() + 20
    while any(is_alive(pid) for pid in workers):
        assert time.monotonic() < deadline_s, "workers outlive their launcher"
        time.sleep(0.1)
    assert len(list((tmp_path / "o" / "checkpoints").glob("step_*/manifest.json"))) == 2  # one for each stop


def test_a_mistake_is_not_tried_again(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("too short", encoding="utf-8")
    flags = ("--max_restarts", "3", "--max_steps", "5", "--input_dir", str(tmp_path / "corpus.txt"))
    job = start(tmp_path, *flags, "--output_dir", str(tmp_path / "o"))
    output, _ = job.communicate(timeout=60)
    assert job.returncode == 2
    assert "restart" not in output and "Traceback" not in output and output.count("corpus.txt") >= 1


def test_torchruns_static_form_restarts_although_its_store_outlives_the_attempt(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG, encoding="utf-8")
    script = tmp_path / "failing_once.py"
    script.write_text(
        "import sys, torch.distributed as dist\n"
        "from pathlib import Path\n"
        "from fourfold.train import loop\n"
        "honest, marker = loop.train_step, Path(sys.argv[1])\n"
        "def failing(run, batch, step, note):\n"
        "    if step == 9 and dist.get_rank() == 1 and not marker.exists():\n"
        "        marker.touch()\n"
        "        raise ValueError('once')\n"
        "    return honest(run, batch, step, note)\n"
        "loop.train_step = failing\n"
        "from fourfold.cli import main\n"
        "sys.argv[1:2] = ['train']\n"
        "main()\n",
        encoding="utf-8",
    )
    form = ["--nnodes=1", "--node_rank=0", "--master_addr=127.0.0.1", f"--master_port={free_port()}"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *form, "--nproc_per_node=2", "--max_restarts=1"]
    arguments = [str(tmp_path / "marker"), str(tmp_path / "config.yaml"), "--max_steps", "12"]
    done = subprocess.run(
        [*torchrun, str(script), *arguments, "--output_dir", str(tmp_path / "o")],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "marker").exists() and list(losses(tmp_path / "o")) == list(range(1, 13))
