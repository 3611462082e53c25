"""What stands in the way of a run, judged from facts alone. `prognosis.py` judges what was measured.

`meeting_findings` are those that keep processes from working together at all; where one of them fails, nothing can be
measured. Each finding is a sentence and what to do about it.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from fourfold.launch.facts import Facts
from fourfold.launch.measure import Measured
from fourfold.mesh.environment import is_loopback

OLDEST_TORCH = (2, 11)
GIB = 2**30
LEAST_MEMORY_BYTES = GIB
LEAST_SHM_BYTES = GIB
LEAST_DISK_BYTES = 10 * GIB
LEAST_OPEN_FILES = 1024

Level = Literal["fails", "warns"]
# where hosts differ in it
VERSIONS: dict[str, tuple[Level, Callable[[Facts], str]]] = {
    "fourfold": ("fails", lambda facts: facts.fourfold),
    "torch": ("fails", lambda facts: facts.torch),
    "NCCL": ("fails", lambda facts: facts.nccl),
    "Python": ("warns", lambda facts: facts.python),
    "the NVIDIA driver": ("warns", lambda facts: facts.driver),
}


@dataclass(frozen=True)
class Finding:
    level: Level
    sentence: str
    remedy: str = ""


@dataclass(frozen=True)
class Diagnosis:
    ranks: list[Facts]
    measured: list[Measured | None]
    """By rank; None for one that never answered, and empty where nothing was measured."""
    findings: list[Finding]

    @property
    def would_fail(self) -> bool:
        return any(each.level == "fails" for each in self.findings)


def allocation_findings(facts: Facts) -> Iterator[Finding]:
    """Of a process that was started by itself."""
    nodes = facts.environment.get("SLURM_JOB_NUM_NODES", "1")
    if nodes != "1":
        yield Finding(
            "warns", f"only {facts.host} was looked at, of {nodes} nodes in this allocation", "srun fourfold doctor"
        )


def first_of_machines(ranks: list[Facts]) -> list[Facts]:
    """The lowest rank of every machine."""
    return list({each.machine: each for each in reversed(ranks)}.values())[::-1]


def names_of(ranks: list[Facts]) -> dict[str, str]:
    """Machine to host name, with its first rank where two machines have one name."""
    firsts = first_of_machines(ranks)
    hosts = [each.host for each in firsts]
    return {
        each.machine: each.host if hosts.count(each.host) == 1 else f"{each.host} (rank {each.rank})" for each in firsts
    }


def meeting_findings(ranks: list[Facts], device: str) -> list[Finding]:
    """Of what can be told without starting anything: why processes would not find or understand each other."""
    return [
        *version_findings(ranks),
        *device_findings(ranks, device),
        *(finding for each in first_of_machines(ranks) for finding in interface_findings(each, ranks)),
    ]


def version_findings(ranks: list[Facts]) -> Iterator[Finding]:
    names, firsts = names_of(ranks), first_of_machines(ranks)
    for each in firsts:
        if tuple(map(int, re.findall(r"\d+", each.torch)[:2])) < OLDEST_TORCH:
            oldest = ".".join(map(str, OLDEST_TORCH))
            yield Finding(
                "fails",
                f"{names[each.machine]} has torch {each.torch}; {oldest} is the oldest that works",
                f"pip install 'torch>={oldest}'",
            )
    for what, (level, version_of) in VERSIONS.items():
        # a host without a GPU has no driver and no NCCL: `device_findings` has a word on that
        versions = {names[each.machine]: version_of(each) for each in firsts if version_of(each)}
        if len(set(versions.values())) > 1:
            yield Finding(level, f"hosts differ in {what}: {told(versions)}", "install the same on all of them")


def told(values: dict[str, str]) -> str:
    """`2.13.0 on n1, n2 and 2.11.0 on n3`."""
    hosts: dict[str, list[str]] = {}
    for host, value in values.items():
        hosts.setdefault(value, []).append(host)
    return " and ".join(f"{value} on {', '.join(where)}" for value, where in hosts.items())


def device_findings(ranks: list[Facts], device: str) -> Iterator[Finding]:
    names, firsts = names_of(ranks), first_of_machines(ranks)
    if device == "cpu":
        return
    any_gpu = any(each.gpus for each in firsts)
    for each in firsts:
        if not each.gpus and (device == "gpu" or any_gpu):
            why = "global.device = gpu" if device == "gpu" else "other hosts have GPUs"
            yield Finding(
                "fails",
                f"{why}, but PyTorch has none on {names[each.machine]}: {each.gpu_error}",
                "check the driver there with nvidia-smi, and that torch is a build for CUDA; or write --device cpu",
            )
        elif not each.gpus and each.has_nvidia:
            yield Finding(
                "warns",
                f"{names[each.machine]} has NVIDIA devices that PyTorch cannot use, so a run would be on its CPU: "
                f"{each.gpu_error}",
                "check the driver with nvidia-smi, and that torch is a build for CUDA",
            )
    for each in ranks:
        if each.gpus and each.local_rank >= len(each.gpus):
            yield Finding(
                "fails",
                f"rank {each.rank} is process {each.local_rank} of {names[each.machine]}, which has {len(each.gpus)} "
                "GPUs; each process needs one of its own",
                f"start at most {len(each.gpus)} processes there, such as torchrun --nproc_per_node={len(each.gpus)}",
            )
    kinds = {names[each.machine]: ", ".join(sorted({gpu.name for gpu in each.gpus})) for each in firsts if each.gpus}
    if len(set(kinds.values())) > 1:
        yield Finding("warns", f"hosts differ in GPUs: {told(kinds)}", "a run is as fast as the slowest of them")


def interface_findings(facts: Facts, ranks: list[Facts]) -> Iterator[Finding]:
    host = names_of(ranks)[facts.machine]
    several = len(first_of_machines(ranks)) > 1
    known = [each.name for each in facts.interfaces]
    loopback = [each.name for each in facts.interfaces if each.is_loopback]
    # without others on the way, gloo is best told to stay inside
    better = (facts.main_interface if several else next(iter(loopback), "")) or "INTERFACE"
    for variable, chosen in chosen_interfaces(facts).items():
        asked = facts.environment[variable]
        if not chosen:
            yield Finding(
                "fails",
                f"{variable} = {asked} names no interface of {host}, which has {', '.join(known)}",
                f"unset {variable}, or export {variable}={better}",
            )
        elif several and set(chosen) <= set(loopback):
            yield Finding(
                "fails",
                f"{variable} = {asked} is {host}'s loopback interface, which does not reach the other hosts",
                f"export {variable}={better}",
            )
    if several and "GLOO_SOCKET_IFNAME" not in facts.environment and leads_nowhere(facts.own_address):
        how = f"resolves to {facts.own_address}" if facts.own_address else "does not resolve"
        yield Finding(
            "fails",
            f"the name of {host} {how} there, so gloo would offer the other hosts an address that is their own",
            f"on {host}: export GLOO_SOCKET_IFNAME={better}, or mend the name in its /etc/hosts",
        )


def chosen_interfaces(facts: Facts) -> dict[str, list[str]]:
    """The interfaces that each variable means, where it is set: gloo takes names, NCCL the beginnings of names."""
    known = [each.name for each in facts.interfaces]
    chosen = {}
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        text = facts.environment.get(variable, "")
        if not text:
            continue
        words = text.lstrip("^=").split(",")
        is_prefix = variable.startswith("NCCL") and not text.lstrip("^").startswith("=")
        meant = [name for name in known if any(name == word or (is_prefix and name.startswith(word)) for word in words)]
        if variable.startswith("GLOO") and set(words) - set(known):
            meant = []  # gloo listens on each of them
        chosen[variable] = [name for name in known if name not in meant] if text.startswith("^") else meant
    return chosen


def leads_nowhere(address: str) -> bool:
    """Not to be reached from elsewhere; none at all is as bad, since gloo falls back to loopback then."""
    return not address or is_loopback(address)


def machine_findings(ranks: list[Facts]) -> Iterator[Finding]:
    """Of one machine at a time: room to run in."""
    names = names_of(ranks)
    for each in first_of_machines(ranks):
        host = names[each.machine]
        if each.available_bytes < LEAST_MEMORY_BYTES:
            yield Finding(
                "fails",
                f"{host} has {each.available_bytes / GIB:.1f} GiB of memory available",
                "end what else runs there, or ask for more (srun --mem, or the container's limit)",
            )
        if each.output_error:
            yield Finding(
                "fails",
                f"output_dir = {each.output_dir} cannot be written to on {host}: {each.output_error}",
                "write another folder with --output_dir",
            )
        if not each.temp_dir:
            yield Finding(
                "fails", f"{host} has no folder for temporary files that can be written", "export TMPDIR=FOLDER"
            )
        if each.disk_free_bytes is not None and each.disk_free_bytes < LEAST_DISK_BYTES:
            yield Finding(
                "warns",
                f"{each.disk_free_bytes / GIB:.1f} GiB are free on {host} where output_dir = {each.output_dir} lies",
                "free some, write another folder with --output_dir, or lower engine.keep_last: a checkpoint takes 12 "
                "bytes per parameter",
            )
        if each.open_files < LEAST_OPEN_FILES:
            most = min(each.open_files_most, 65536)
            yield Finding("warns", f"{host} allows {each.open_files} open files per process", f"ulimit -n {most}")
        if each.gpus and each.shm_bytes < LEAST_SHM_BYTES:
            yield Finding(
                "warns",
                f"/dev/shm of {host} has {each.shm_bytes / GIB:.2f} GiB; NCCL passes messages between GPUs there",
                "start the container with --shm-size=1g or more, or --ipc=host",
            )
        local = [other for other in ranks if other.machine == each.machine]
        cores = {core for other in local for core in other.cores}
        threads = sum(other.threads for other in local)
        if threads > len(cores) and max(other.threads for other in local) > 1:
            yield Finding(
                "warns",
                f"{len(local)} processes on {host} run {threads} threads in all on {len(cores)} cores",
                f"export OMP_NUM_THREADS={max(1, len(cores) // len(local))}",
            )
