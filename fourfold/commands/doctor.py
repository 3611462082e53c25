"""`fourfold doctor`: what this machine or allocation has, how fast it is, and what is in the way of a run.

Run plainly it starts processes of its own to measure with; as one of several, started by torchrun or srun, it looks at
all of their machines and the first rank reports.
"""

import json
import pickle
import signal
import tempfile
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import typer
from rich.markup import escape
from rich.table import Table

from fourfold.commands.options import screen, take_options
from fourfold.config.flags import Override, parse_flags
from fourfold.config.load import load_config
from fourfold.config.problems import problems
from fourfold.config.resolve import processes_needed
from fourfold.errors import LaunchError
from fourfold.launch.council import consult
from fourfold.launch.doctor import (
    GIB,
    Diagnosis,
    Finding,
    allocation_findings,
    first_of_machines,
    machine_findings,
    meeting_findings,
    names_of,
)
from fourfold.launch.facts import Facts, examine
from fourfold.launch.slurm import adopt_ranks, read_step
from fourfold.launch.torchrun import end_with_launcher, launch_local
from fourfold.mesh.process import is_worker, leave, world_size_from_environment
from fourfold.train.verify import CORPUS

HELP = """Usage: fourfold doctor [CONFIG] [--key value ...] [--json]

Shows what this machine has, measures matmul and all-reduce, and says what is in the way of a run and what to do about
it. Exits with 1 when a run would fail. On several machines start it as a run would be:

  torchrun --nnodes=2 ... -m fourfold doctor
  srun fourfold doctor

  CONFIG            also whether this config is in order
  --output_dir DIR  where a run would write (output)
  --device D        auto, cpu or gpu (auto)
  --json            print everything as JSON instead"""


def doctor_command(context: typer.Context) -> None:
    """Say what is in the way of a run: fourfold doctor [CONFIG] [--output_dir DIR] [--json]"""
    defaults = {"--debug": False, "--help": False, "-h": False, "--json": False, "--report": ""}
    arguments, own = take_options(context.args, defaults)
    if own["--help"] or own["-h"]:
        screen.print(HELP, markup=False, soft_wrap=True)
        return
    path, overrides = parse_flags(arguments)
    config = load_config(path, overrides)
    device, output_dir = config.global_.device, config.engine.output_dir
    step = None if is_worker() else read_step()
    if step is not None:
        adopt_ranks(step)
    if own["--report"]:  # started by the plain command, which prints
        end_with_launcher()
        signal.signal(signal.SIGINT, lambda number, _: leave(128 + number))  # an exit code that its launcher knows
        consult(device, output_dir, [], lambda diagnosis: Path(own["--report"]).write_bytes(pickle.dumps(diagnosis)))
        return
    show = print_json if own["--json"] else print_report
    found = config_findings(path, overrides) if path else []
    if is_worker():
        raise typer.Exit(int(consult(device, output_dir, found, show)))
    diagnosis = examine_here(device, output_dir, arguments)
    diagnosis.findings.extend([*allocation_findings(diagnosis.ranks[0]), *found])
    needed, gpus = processes_needed(config), len(diagnosis.ranks[0].gpus)
    if device != "cpu" and 0 < gpus < needed:
        machines = f"start it on {-(-needed // gpus)} such machines"
        sentence = f"the layout needs {needed} processes, and this machine has {gpus} GPUs"
        diagnosis.findings.append(Finding("warns", sentence, machines))
    show(diagnosis)
    raise typer.Exit(int(diagnosis.would_fail))


def config_findings(path: str, overrides: list[Override]) -> list[Finding]:
    """What `fourfold train` would refuse. The text is not needed for it: a built-in one stands in."""
    config = load_config(path, [*overrides, ("input_dir", CORPUS)])
    world_size = world_size_from_environment() or processes_needed(config)
    return [Finding("fails", sentence) for sentence in problems(config, world_size)]


def examine_here(device: str, output_dir: str, arguments: list[str]) -> Diagnosis:
    """This machine, with as many processes as it has GPUs, or two, to measure with."""
    facts = examine(output_dir)
    findings = [*meeting_findings([facts], device), *machine_findings([facts])]
    alone = Diagnosis([facts], [], findings)
    if any(each.level == "fails" for each in meeting_findings([facts], device)) or not facts.temp_dir:
        return alone
    processes = len(facts.gpus) if facts.gpus and device != "cpu" else 2
    try:
        with tempfile.TemporaryDirectory() as folder, screen.status(f"measuring with {processes} processes"):
            report = Path(folder) / "diagnosis"
            launch_local(processes, ["doctor", *arguments, "--report", str(report)], Path(folder) / "logs")
            measured: Diagnosis = pickle.loads(report.read_bytes())
            # what the user has set, not what workers are given
            ranks = [replace(each, environment=facts.environment) for each in measured.ranks]
            return replace(measured, ranks=ranks)
    except (LaunchError, OSError) as error:
        if "ended by SIGINT" in str(error):  # while it was still importing
            raise typer.Exit(128 + signal.SIGINT) from None
        findings.append(
            Finding(
                "fails",
                f"{processes} processes on this machine could not be started: {str(error).splitlines()[0]}",
                "what they printed stands above",
            )
        )
        return alone


def print_json(diagnosis: Diagnosis) -> None:
    print(json.dumps(asdict(diagnosis) | {"would_fail": diagnosis.would_fail}, indent=1))


def print_report(diagnosis: Diagnosis) -> None:
    firsts, names = first_of_machines(diagnosis.ranks), names_of(diagnosis.ranks)
    machines = Table("host", "ranks", "devices", "cores", "memory", "/dev/shm", "open files", "disk", box=None)
    versions = Table("host", "system", "Python", "fourfold", "torch", "CUDA", "driver", "NCCL", box=None)
    clock = "clock" if len(firsts) > 1 else ""
    network = Table("host", "its name is", "interfaces (* leads to other hosts)", clock, box=None)
    for each in firsts:
        host = names[each.machine]
        local = [other.rank for other in diagnosis.ranks if other.machine == each.machine]
        machines.add_row(
            host,
            describe_ranks(local),
            describe_devices(each),
            str(len({core for other in diagnosis.ranks if other.machine == each.machine for core in other.cores})),
            f"{each.available_bytes / GIB:.1f} of {each.memory_bytes / GIB:.1f} GiB",
            f"{each.shm_free_bytes / GIB:.1f} of {each.shm_bytes / GIB:.1f} GiB",
            str(each.open_files),
            "-" if each.disk_free_bytes is None else f"{each.disk_free_bytes / GIB:.1f} GiB",
        )
        versions.add_row(
            host,
            each.system,
            each.python,
            each.fourfold,
            each.torch,
            *(text or "-" for text in (each.cuda, each.driver, each.nccl)),
        )
        network.add_row(host, each.own_address or "unknown", describe_interfaces(each), describe_clock(diagnosis, each))
    for table in (machines, versions, network):
        screen.print(table)
        screen.print()
    print_environment(diagnosis, names)
    print_measured(diagnosis, names)
    print_findings(diagnosis)


def describe_ranks(ranks: list[int]) -> str:
    is_row = len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1))
    return f"{ranks[0]} to {ranks[-1]}" if is_row else ", ".join(map(str, ranks))


def describe_devices(facts: Facts) -> str:
    kinds = Counter(facts.gpus)
    return ", ".join(f"{count} x {gpu.name}, {gpu.memory_bytes / GIB:.0f} GiB" for gpu, count in kinds.items()) or "cpu"


def describe_interfaces(facts: Facts) -> str:
    return "\n".join(
        f"{each.name}{'*' if each.name == facts.main_interface else ''} {', '.join(each.addresses)}"
        for each in facts.interfaces
        if each.addresses
    )


def describe_clock(diagnosis: Diagnosis, facts: Facts) -> str:
    first = diagnosis.measured[0] if diagnosis.measured else None
    for clock in first.clocks if first else ():
        if clock.rank == facts.rank:
            return f"{clock.ahead_s:+.3f} s, to {clock.error_s:.1g} s"
    return "" if facts.rank == 0 else "not measured"


def print_environment(diagnosis: Diagnosis, names: dict[str, str]) -> None:
    """Variables that are set, once where all hosts agree."""
    firsts = first_of_machines(diagnosis.ranks)
    for name in sorted({name for each in firsts for name in each.environment}):
        values = {each.environment.get(name, "unset") for each in firsts}
        if len(values) == 1:
            screen.print(f"{name}={values.pop()}", markup=False, soft_wrap=True)
        else:
            for each in firsts:
                value = each.environment.get(name, "is unset")
                screen.print(f"{names[each.machine]}: {name}={value}", markup=False, soft_wrap=True)
    if any(each.environment for each in firsts):
        screen.print()


def print_measured(diagnosis: Diagnosis, names: dict[str, str]) -> None:
    if not any(diagnosis.measured):
        screen.print("nothing was measured\n")
        return
    table = Table("rank", "host", "device", "threads", "matmul TFLOP/s", box=None)
    for facts, each in zip(diagnosis.ranks, diagnosis.measured, strict=True):
        speed = "-" if each is None or not each.matmul_flops else f"{each.matmul_flops / 1e12:.3g}"
        device = each.device if each else ""
        table.add_row(str(facts.rank), names[facts.machine], device, str(facts.threads), speed)
    screen.print(table)
    screen.print()
    first = diagnosis.measured[0]
    found = first.all_reduce if first else None
    if found is not None:
        size = f"{found.large_bytes / 2**20:.0f} MiB"
        screen.print(
            f"all-reduce over {found.backend}, {found.processes} processes: one number {found.small_s * 1e6:,.0f} µs, "
            f"{size} {found.large_s * 1e3:,.1f} ms"
            + (f", {found.bus_bytes_per_s / 1e9:.2f} GB/s per process each way" if found.processes > 1 else "")
            + "\n",
            soft_wrap=True,
        )


def print_findings(diagnosis: Diagnosis) -> None:
    for each in sorted(diagnosis.findings, key=lambda finding: finding.level):
        style = "red" if each.level == "fails" else "yellow"
        screen.print(f"[{style}]{each.level}[/{style}]  {escape(each.sentence)}", soft_wrap=True)
        if each.remedy:
            screen.print(f"       {each.remedy}", markup=False, soft_wrap=True)
    if diagnosis.findings:
        screen.print()
    if diagnosis.would_fail:
        screen.print("a run would fail here", style="bold")
    else:
        screen.print("nothing is in the way of a run", style="bold")
