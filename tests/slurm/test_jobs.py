"""Jobs on a real Slurm: two nodes of two processes each, with the losses of a plain run, to the last bit."""

import re
import sys
from pathlib import Path

import pytest

from fourfold.errors import LaunchError
from fourfold.launch.slurm import submit
from tests.slurm.cluster import Cluster, wait_until
from tests.tiny import curve

# Enough steps to be in the middle of, whatever the machine.
TINY = """
global: {device: cpu, global_batch_size: 8}
model: {num_layers: 2, hidden_size: 32, num_attention_heads: 2}
data: {input_dir: builtin:pydoc, truncate: 0.1, max_seq_len: 16, split: "90,10,0"}
distributed: {dp_degree: 4}
engine: {max_steps: 300, logging_freq: 1, eval_freq: 0, eval_iters: 0, save_steps: 0}
"""
PROGRAM = [sys.executable, "-m", "fourfold"]
JOB_S = 240
"""How long a job may take to get somewhere on a busy machine."""


@pytest.fixture(scope="session")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("jobs") / "config.yaml"
    path.write_text(TINY, encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def undisturbed(cluster: Cluster, config: Path) -> dict[int, float]:
    """The losses of the same run without Slurm. Asks for the cluster first: there is no need for it elsewhere."""
    output = config.parent / "undisturbed"
    cluster.call(*PROGRAM, "train", str(config), "--output_dir", str(output), timeout_s=JOB_S)
    return curve(output, "loss")


def start_job(cluster: Cluster, config: Path, output: Path) -> str:
    """The number of a job that `fourfold launch slurm` has written and submitted."""
    said = cluster.call(
        *PROGRAM, "launch", "slurm", str(config), "--nodes", "2", "--gpus_per_node", "2",
        "--set", f"output_dir={output}", "--time", "10", "--submit",
    )  # fmt: skip
    number = re.search(r"submitted as job (\d+)", said)
    assert number, said
    return number[1]


class Watched:
    """A job and what it has written so far."""

    def __init__(self, cluster: Cluster, number: str, output: Path) -> None:
        self.cluster, self.number, self.output = cluster, number, output

    def log(self) -> str:
        path = self.output / "logs" / f"slurm-{self.number}.out"
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def wait_for_steps(self, attempt: int) -> None:
        """Until this attempt has made a few steps."""

        def has_made_steps() -> bool:
            attempts = self.log().split("parameters, layout")
            return len(attempts) > attempt and attempts[attempt].count("global step") >= 3

        wait_until(has_made_steps, self.cluster, f"attempt {attempt} has made steps", JOB_S, self.log)

    def wait_for_state(self, *states: str) -> None:
        def is_there() -> bool:
            return self.cluster.job(self.number)["JobState"] in states

        wait_until(is_there, self.cluster, f"the job is {' or '.join(states)}", JOB_S, self.log)

    def start_again_now(self) -> None:
        """A requeued job is held for two minutes, so that the nodes can clean up."""
        self.wait_for_state("PENDING")
        self.cluster.call("scontrol", "update", f"JobId={self.number}", "StartTime=now")


def test_a_submitted_job_has_the_losses_of_a_plain_run(
    cluster: Cluster, config: Path, undisturbed: dict[int, float], tmp_path: Path
) -> None:
    job = Watched(cluster, start_job(cluster, config, tmp_path), tmp_path)
    job.wait_for_state("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
    state = cluster.job(job.number)
    assert (state["JobState"], state["NumNodes"], state["Restarts"]) == ("COMPLETED", "2", "0"), job.log()
    assert "layout pp1 x dp4" in job.log()
    assert curve(tmp_path, "loss") == undisturbed and len(undisturbed) == 300


def test_tasks_of_srun_are_ranks_without_torchrun(
    cluster: Cluster, config: Path, undisturbed: dict[int, float], tmp_path: Path
) -> None:
    command = [*PROGRAM, "train", str(config), "--output_dir", str(tmp_path)]
    said = cluster.call("srun", "--nodes=2", "--ntasks-per-node=2", *command, timeout_s=JOB_S)
    assert "300 steps done" in said
    assert curve(tmp_path, "loss") == undisturbed


@pytest.mark.slow
def test_a_job_that_is_requeued_goes_on_with_the_losses_it_would_have_had(
    cluster: Cluster, config: Path, undisturbed: dict[int, float], tmp_path: Path
) -> None:
    job = Watched(cluster, start_job(cluster, config, tmp_path), tmp_path)
    job.wait_for_steps(attempt=1)
    cluster.call("scancel", "--signal=USR1", job.number)  # what --signal sends before the time limit
    job.start_again_now()
    job.wait_for_steps(attempt=2)
    cluster.call("scontrol", "requeue", job.number)
    job.start_again_now()
    job.wait_for_state("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
    state = cluster.job(job.number)
    assert (state["JobState"], state["Restarts"]) == ("COMPLETED", "2"), job.log()
    # no checkpoint is due before the end, so those that it went on from were saved because it was asked to stop
    went_on = [int(step) for step in re.findall(r"going on from \S+, after step (\d+)", job.log())]
    assert len(went_on) == 2 and 3 <= went_on[0] < went_on[1] < 300, job.log()
    assert curve(tmp_path, "loss") == undisturbed


def test_what_sbatch_refuses_is_passed_on_as_a_sentence(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
    script = tmp_path / "job.sbatch"
    script.write_text("#!/bin/bash\n#SBATCH --partition=nowhere\ntrue\n", encoding="utf-8")
    with pytest.raises(LaunchError, match=r"sbatch refused .*job.sbatch: .*invalid partition"):
        submit(script)
