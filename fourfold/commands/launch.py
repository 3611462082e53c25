"""`fourfold launch slurm|torchrun|kubernetes`: what starts a run on several machines, written down for the reader."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from fourfold.commands.options import option, screen
from fourfold.errors import LaunchError
from fourfold.launch.job import Job, plan_job
from fourfold.launch.kubernetes import write_manifest
from fourfold.launch.slurm import Wishes, check_time, submit, write_script

launch_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Start a run on several machines.")

ConfigPath = Annotated[str, typer.Argument(metavar="CONFIG", help="The config file of the run.")]
Nodes = Annotated[
    int | None, option("nodes", "Machines; by default as many as the layout fills.", min=1, show_default=False)
]
GpusPerNode = Annotated[
    int, option("gpus_per_node", "GPUs of a machine, and processes on it; with device = cpu only the latter.", min=1)
]
Settings = Annotated[
    list[str], option("set", "KEY=VALUE in place of the config's; may be repeated.", metavar="KEY=VALUE")
]
Debug = Annotated[bool, option("debug", "Show tracebacks.")]


@launch_app.callback()
def launch_group() -> None:
    """Start a run on several machines."""


@launch_app.command("slurm")
def slurm_command(
    config: ConfigPath,
    nodes: Nodes = None,
    gpus_per_node: GpusPerNode = 8,
    settings: Settings = [],  # noqa: B006
    time: Annotated[str, option("time", "The job's time limit as Slurm writes it, such as 2-00:00:00.")] = "",
    partition: Annotated[str, option("partition", "The partition to ask for.")] = "",
    account: Annotated[str, option("account", "The account to charge.")] = "",
    container: Annotated[str, option("container", "An image to run in, through the pyxis plugin.")] = "",
    signal_s: Annotated[int, option("signal_s", "Seconds before the limit at which the run saves.", min=1)] = 300,
    max_restarts: Annotated[int, option("max_restarts", "Restarts after failures within the job.", min=0)] = 3,
    output: Annotated[str, option("output", "The script to write; by default OUTPUT_DIR/job.sbatch.")] = "",
    submitting: Annotated[bool, option("submit", "Hand the script to sbatch.")] = False,
    debug: Debug = False,
) -> None:
    """Write a batch script for Slurm, and submit it if asked."""
    job = plan_job(config, settings, nodes, gpus_per_node)
    if time:
        check_time(time, signal_s)
    script = Path(output or job.folder / "job.sbatch")
    write_script(job, Wishes(time, partition, account, container, signal_s, max_restarts), script)
    say(f"{script}: {describe(job)}")
    if submitting:
        number = submit(script)
        say(f"submitted as job {number}")
        say(f"  its log       tail -F {job.folder / 'logs' / f'slurm-{number}.out'}")
        say(f"  its state     squeue --job {number}")
        say(f"  to end it     scancel {number}")
    else:
        say(f"to submit it: sbatch {shlex.quote(str(script))}")


@launch_app.command("torchrun")
def torchrun_command(
    config: ConfigPath,
    master_addr: Annotated[str, option("master_addr", "The first machine's address, as the others reach it.")],
    master_port: Annotated[int, option("master_port", "A free port of the first machine.", min=1, max=65535)] = 29400,
    nodes: Nodes = None,
    gpus_per_node: GpusPerNode = 8,
    settings: Settings = [],  # noqa: B006
    debug: Debug = False,
) -> None:
    """Print the torchrun lines, one per machine."""
    job = plan_job(config, settings, nodes, gpus_per_node)
    shape = f"torchrun --nnodes={job.nodes} --nproc_per_node={job.processes_per_node}"
    worker = f"-m fourfold {shlex.join(job.train_arguments)}"
    say(f"# {describe(job)}")
    say("\n# either each machine with its number:")
    for node in range(job.nodes):
        say(f"{shape} --node_rank={node} --master_addr={master_addr} --master_port={master_port} {worker}")
    say("\n# or the same line on every machine, which numbers them as they arrive:")
    say(
        f"{shape} --rdzv_backend=c10d --rdzv_endpoint={master_addr}:{master_port} --rdzv_id={shlex.quote(job.name)} "
        f"{worker}"
    )


@launch_app.command("kubernetes")
def kubernetes_command(
    config: ConfigPath,
    image: Annotated[str, option("image", "The container image; fourfold is installed in it.")],
    nodes: Nodes = None,
    gpus_per_node: GpusPerNode = 8,
    settings: Settings = [],  # noqa: B006
    namespace: Annotated[str, option("namespace", "The namespace; by default kubectl's own.")] = "",
    claim: Annotated[str, option("claim", "The PersistentVolumeClaim for output_dir and data.")] = "fourfold",
    max_restarts: Annotated[int, option("max_restarts", "Restarts of the whole job after failures.", min=0)] = 3,
    output: Annotated[str, option("output", "The manifest to write; by default OUTPUT_DIR/job.yaml.")] = "",
    debug: Debug = False,
) -> None:
    """Write a JobSet for Kubernetes."""
    job = plan_job(config, settings, nodes, gpus_per_node)
    text = write_manifest(job, image, namespace, claim, max_restarts, Path(config).read_text(encoding="utf-8-sig"))
    path = Path(output or job.folder / "job.yaml")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise LaunchError(f"{path} cannot be written ({error.strerror}); write another --output") from error
    say(f"{path}: {describe(job)}")
    say(f"to start it: kubectl apply -f {shlex.quote(str(path))}")


def describe(job: Job) -> str:
    return f"{job.layout}, {job.nodes} x {job.processes_per_node} = {job.layout.world_size} processes"


def say(text: str) -> None:
    screen.print(text, markup=False, soft_wrap=True)
