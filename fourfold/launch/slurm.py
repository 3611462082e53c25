"""Slurm: what a step of srun's tells its tasks, and the batch script that starts one.

A step has either one task per process of the layout, each of which is a worker, or one task per node, which starts the
workers of its node. Slurm's own programs are asked for what its variables do not say; nothing else here talks to it.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import jinja2

from fourfold.errors import ConfigError, LaunchError
from fourfold.launch.job import Job

PORTS = range(20000, 30000)
"""Below the ports that Linux gives out by itself."""

CPUS_PER_GPU = 4
"""The step, the loader, the writer of checkpoints and the compiler each want one."""

TIME_LIMIT = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")


@dataclass(frozen=True)
class SlurmStep:
    """A step of several tasks, as one of them sees it."""

    nodes: int
    node_rank: int
    tasks: int
    task: int
    """This one, counted over all nodes."""
    local_task: int
    """This one, counted on its node."""
    local_tasks: int
    """On this node."""
    address: str
    """Of the first node, as Slurm itself reaches it: a node's name need not resolve."""
    port: int
    job_id: str
    """Job, step and restart: no other step has the same."""


def read_step(environment: Mapping[str, str] = os.environ) -> SlurmStep | None:
    """The step that this process is a task of. None for a lone task, for the shell of a batch script, which is in no
    step, and where somebody nearer, such as torchrun, has already told this process its rank."""
    if "SLURM_STEP_ID" not in environment or "RANK" in environment:
        return None
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS", 1))
    if tasks == 1:
        return None
    node_rank = int(environment["SLURM_NODEID"])
    job, step = int(environment["SLURM_JOB_ID"]), int(environment["SLURM_STEP_ID"])
    restart = int(environment.get("SLURM_RESTART_COUNT", 0))
    port = PORTS[(job + 1009 * step + 2003 * restart) % len(PORTS)]
    return SlurmStep(
        nodes=int(environment["SLURM_STEP_NUM_NODES"]),
        node_rank=node_rank,
        tasks=tasks,
        task=int(environment["SLURM_PROCID"]),
        local_task=int(environment["SLURM_LOCALID"]),
        local_tasks=_tasks_per_node(environment["SLURM_STEP_TASKS_PER_NODE"])[node_rank],
        address=environment.get("MASTER_ADDR") or _first_address(environment["SLURM_STEP_NODELIST"]),
        port=_port(environment.get("MASTER_PORT")) or port,
        job_id=f"{job}.{step}.{restart}",
    )


def adopt_ranks(step: SlurmStep) -> None:
    """Make this process a worker like those of torchrun."""
    for name, value in {
        "RANK": step.task,
        "WORLD_SIZE": step.tasks,
        "LOCAL_RANK": step.local_task,
        "LOCAL_WORLD_SIZE": step.local_tasks,
        "MASTER_ADDR": step.address,
        "MASTER_PORT": step.port,
    }.items():
        os.environ.setdefault(name, str(value))


def role_in(step: SlurmStep, processes_needed: int) -> Literal["worker", "launcher"]:
    """What a task of the step is: one of the layout's processes, or the one that starts those of its node."""
    if step.tasks == processes_needed:
        return "worker"
    if step.tasks == step.nodes and processes_needed % step.nodes == 0:
        return "launcher"
    fitting = f"srun --ntasks={processes_needed}, a task per process"
    if processes_needed % step.nodes == 0:
        fitting += f", or srun --nodes={step.nodes} --ntasks-per-node=1, a task per node that starts its processes"
    raise LaunchError(
        f"srun started {step.tasks} tasks on {step.nodes} node{'s' * (step.nodes > 1)}, but the layout needs "
        f"{processes_needed} processes; write {fitting}"
    )


def _port(text: str | None) -> int | None:
    if text and not text.isdecimal():
        raise LaunchError(f"MASTER_PORT = {text} is not a port; it can be 1 to 65535")
    return int(text) if text else None


def _tasks_per_node(text: str) -> list[int]:
    """`2(x3),1` is 2, 2, 2, 1."""
    counts: list[int] = []
    for each in text.split(","):
        count, _, times = each.rstrip(")").partition("(x")
        counts += [int(count)] * int(times or 1)
    return counts


def _first_address(nodes: str) -> str:
    first = _ask("scontrol", "show", "hostnames", nodes).split()[0]
    address = re.search(r"\bNodeAddr=(\S+)", _ask("scontrol", "show", "node", first))
    return address[1] if address else first


def _ask(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except FileNotFoundError:
        raise LaunchError(
            f"{command[0]} was not found, so the address of the first node is not known; set MASTER_ADDR to it"
        ) from None
    except subprocess.CalledProcessError as error:
        raise LaunchError(
            f"{' '.join(command)} failed ({error.stderr.strip()}), so the address of the first node is not known; set "
            "MASTER_ADDR to it"
        ) from None


@dataclass(frozen=True)
class Wishes:
    """What the user asks of the queue; what is empty is left to it."""

    time: str = ""
    partition: str = ""
    account: str = ""
    container: str = ""
    signal_s: int = 300
    max_restarts: int = 3


def write_script(job: Job, wishes: Wishes, path: Path) -> None:
    """The batch script, and the folder for its log: Slurm creates none, and a job without one fails without a word."""
    logs = job.folder / "logs"
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("fourfold", "launch/templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.filters["quote"] = shlex.quote
    text = templates.get_template("job.sbatch").render(
        **asdict(wishes),
        job=job,
        script=shlex.quote(str(path)),
        folder=str(Path.cwd()),
        logs=str(logs),
        cpus_per_node=job.processes_per_node * (CPUS_PER_GPU if job.uses_gpus else 1),
        python="python3" if wishes.container else sys.executable,
        arguments=shlex.join([*job.train_arguments, "--max_restarts", str(wishes.max_restarts)]),
    )
    try:
        logs.mkdir(parents=True, exist_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise LaunchError(f"{path} cannot be written ({error.strerror}); write another --output") from error


def check_time(time: str, signal_s: int) -> None:
    """A limit that leaves no time to train would be requeued for ever."""
    match = TIME_LIMIT.fullmatch(time)
    if match is None:
        raise ConfigError(f"--time {time} is not a time limit of Slurm; write minutes, H:MM:SS or D-HH:MM:SS")
    days, *numbers = (int(number) if number else 0 for number in match.groups())
    first, second, third = numbers
    if match[1] is not None:  # D-HH[:MM[:SS]]
        limit_s = 86400 * days + 3600 * first + 60 * second + third
    elif match[4] is not None:  # H:MM:SS
        limit_s = 3600 * first + 60 * second + third
    else:  # MM[:SS]
        limit_s = 60 * first + second
    if limit_s <= signal_s + 60:
        raise ConfigError(
            f"--time {time} leaves nothing to train in: {signal_s} s before the limit, and up to a minute earlier, the "
            f"run is told to save; write a --time above {-(-(signal_s + 60) // 60)} minutes, or a smaller --signal_s"
        )


def submit(script: Path) -> str:
    """The number of the job that sbatch makes of a script."""
    try:
        done = subprocess.run(["sbatch", "--parsable", str(script)], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise LaunchError(
            f"sbatch was not found, so this machine belongs to no Slurm cluster and nothing was submitted; run sbatch "
            f"{script} on one that does"
        ) from None
    if done.returncode:
        raise LaunchError(f"sbatch refused {script}: {' '.join(done.stderr.split())}; change the script or the flags")
    return done.stdout.strip().partition(";")[0]  # a cluster's name may follow
