"""The batch script, without a Slurm: what it asks for, what is refused before it is written, and what a step tells."""

import subprocess
from pathlib import Path

import pytest

from fourfold.commands.launch import slurm_command, torchrun_command
from fourfold.errors import ConfigError, FourfoldError, LaunchError
from fourfold.launch.slurm import adopt_ranks, check_time, read_step, role_in

CONFIG = """
global: {{device: {device}, global_batch_size: 64}}
model: {{num_layers: 4, hidden_size: 64, num_attention_heads: 4}}
data: {{input_dir: builtin:pydoc, max_seq_len: 16}}
distributed: {{{degrees}}}
engine: {{max_steps: 3, output_dir: output/small run}}
"""
FIXED = "mp_degree: 2, pp_degree: 2, dp_degree: 4, sharding: {sharding_degree: 1}"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_config()
    return tmp_path


def write_config(device: str = "gpu", degrees: str = FIXED) -> None:
    Path("run.yaml").write_text(CONFIG.format(device=device, degrees=degrees), encoding="utf-8")


def script_of(**options: object) -> str:
    slurm_command("run.yaml", **options)  # type: ignore[arg-type]
    return Path("output/small run/job.sbatch").read_text(encoding="utf-8")


def directives(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]


def test_the_script_asks_for_what_the_layout_needs(folder: Path) -> None:
    script = script_of(gpus_per_node=8, time="1-12:00:00", partition="gpu", account="lab")
    assert directives(script) == [
        "--job-name='small run'",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--cpus-per-task=32",
        "--gpus-per-node=8",
        "--time=1-12:00:00",
        "--partition=gpu",
        "--account=lab",
        f"--chdir={folder}",
        "--output='output/small run/logs/slurm-%j.out'",
        "--open-mode=append",
        "--requeue",
        "--signal=USR1@300",
    ]
    # a directive after the first command is a comment to Slurm
    assert script.rindex("#SBATCH") < script.index("PYTHON=")
    assert Path("output/small run/logs").is_dir()
    assert subprocess.run(["bash", "-n", "output/small run/job.sbatch"], check=False).returncode == 0


def test_the_script_says_nothing_of_what_was_not_asked_for() -> None:
    write_config(device="cpu")
    script = script_of(gpus_per_node=4)
    assert not [word for word in ("--gpus", "--time", "--partition", "--account", "--container") if word in script]
    assert "#SBATCH --nodes=4" in script and "#SBATCH --cpus-per-task=4" in script


def test_settings_reach_the_run_as_they_were_written() -> None:
    script = script_of(settings=["max_steps=7", "input_dir=my data; rm -rf ~"], max_restarts=1)
    line = "train run.yaml -o max_steps=7 -o 'input_dir=my data; rm -rf ~' --max_restarts 1"
    assert f'"$PYTHON" -m fourfold {line}\n' in script


def test_a_degree_that_follows_from_the_nodes_is_written_down() -> None:
    write_config(degrees="mp_degree: 4")
    assert "-o dp_degree=4" in script_of(nodes=2, gpus_per_node=8)
    write_config(degrees="dp_degree: 2, mp_degree: 2, pp_degree: 1")
    assert "-o sharding_degree=4" in script_of(nodes=2, gpus_per_node=8)
    write_config(degrees="dp_degree: 16, mp_degree: 1, pp_degree: 1")
    assert "-o sharding_degree=1" in script_of(gpus_per_node=8)
    write_config()
    assert "_degree=" not in script_of(gpus_per_node=8)


def test_an_image_brings_its_own_python() -> None:
    script = script_of(container="registry/image:1")
    assert "srun" in script and "--container-image=registry/image:1" in script and "PYTHON=python3" in script


@pytest.mark.parametrize(
    ("degrees", "options", "sentence"),
    [
        (FIXED, {"nodes": 3}, "--nodes 3 with --gpus_per_node 8 makes 24 processes, but .* needs 16; write --nodes 2"),
        (FIXED, {"gpus_per_node": 6}, "--gpus_per_node 6 does not divide the 16 processes .* 1, 2, 4, 8 or 16"),
        ("mp_degree: 4", {}, "--gpus_per_node 8 does not divide the 4 .* a degree was left out, so write --nodes"),
        ("mp_degree: 3", {"nodes": 1}, "makes 6 processes, but there are 8"),
        (FIXED, {"settings": ["max_stepz=1"]}, "max_stepz"),
        (FIXED, {"settings": ["max_steps"]}, "-o max_steps has no value"),
        (FIXED, {"time": "6"}, "--time 6 leaves nothing to train in"),
        (FIXED, {"time": "soon"}, "--time soon is not a time limit of Slurm"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_written(
    degrees: str, options: dict[str, object], sentence: str
) -> None:
    write_config(degrees=degrees)
    with pytest.raises(FourfoldError, match=sentence):
        script_of(**options)
    assert not Path("output").exists()


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("7", 420), ("7:30", 450), ("1:00:00", 3600), ("1-0", 86400), ("1-2:03", 93780), ("1-02:03:04", 93784)],
)
def test_a_time_limit_is_read_as_slurm_reads_it(time: str, seconds: int) -> None:
    check_time(time, seconds - 61)
    with pytest.raises(ConfigError, match="leaves nothing"):
        check_time(time, seconds - 60)


def test_a_missing_sbatch_is_a_sentence_and_the_script_stays(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("PATH", str(folder))
    with pytest.raises(LaunchError, match=r"sbatch was not found.*run sbatch '?output/small run/job.sbatch"):
        script_of(submitting=True)
    assert Path("output/small run/job.sbatch").exists()


def test_torchrun_lines_differ_only_in_the_number_of_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    torchrun_command("run.yaml", master_addr="host0")
    said = capsys.readouterr().out
    for node in (0, 1):
        assert f"--nnodes=2 --nproc_per_node=8 --node_rank={node} --master_addr=host0" in said
    assert "--rdzv_backend=c10d --rdzv_endpoint=host0:29400 --rdzv_id='small run' -m fourfold train run.yaml\n" in said


# What srun of Slurm 22.05 gives to task 3 of `srun --nodes=2 --ntasks-per-node=2`.
TASK = {
    "SLURM_JOB_ID": "81",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "MASTER_ADDR": "10.0.0.1",
}


def test_a_task_learns_its_ranks_from_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    step = read_step(TASK)
    assert step is not None
    assert (step.task, step.tasks, step.local_task, step.local_tasks) == (3, 4, 1, 2)
    assert (step.node_rank, step.nodes, step.address, step.job_id) == (1, 2, "10.0.0.1", "81.0.0")
    assert 20000 <= step.port < 30000
    again = read_step({**TASK, "SLURM_RESTART_COUNT": "1"})
    assert again is not None and again.job_id != step.job_id and again.port != step.port
    uneven = read_step({**TASK, "SLURM_STEP_TASKS_PER_NODE": "3,1"})
    assert uneven is not None and uneven.local_tasks == 1
    environment = {"MASTER_PORT": "5"}
    monkeypatch.setattr("fourfold.launch.slurm.os.environ", environment)
    adopt_ranks(step)
    assert environment == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "5",
    }


@pytest.mark.parametrize(
    "changed",
    [{"SLURM_STEP_NUM_TASKS": "1"}, {"SLURM_STEP_ID": None}, {"RANK": "0"}],
    ids=["a lone task", "a batch script", "a worker of torchrun"],
)
def test_who_is_no_task_of_several_has_no_step(changed: dict[str, str | None]) -> None:
    environment = {name: value for name, value in {**TASK, **changed}.items() if value is not None}
    assert read_step(environment) is None


def test_tasks_are_workers_or_launchers_or_told_what_would_fit() -> None:
    four = read_step(TASK)
    two = read_step({**TASK, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"})
    assert four is not None and two is not None
    assert role_in(four, 4) == "worker" and role_in(two, 4) == "launcher"
    with pytest.raises(LaunchError, match=r"4 tasks on 2 nodes, but .* 16 processes; .*--ntasks=16.*--nodes=2"):
        role_in(four, 16)
    with pytest.raises(LaunchError, match=r"2 tasks on 2 nodes, but .* 3 processes; write srun --ntasks=3, a task per"):
        role_in(two, 3)


def test_a_step_without_scontrol_asks_for_the_address(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("PATH", str(folder))
    without = {name: value for name, value in TASK.items() if name != "MASTER_ADDR"}
    with pytest.raises(LaunchError, match=r"scontrol was not found.*set MASTER_ADDR"):
        read_step(without)
