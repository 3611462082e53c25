"""What stands in the way of a run: each finding from facts made by hand, and real runs that find it or do not."""

import os
import re
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fourfold.launch.doctor import OLDEST_TORCH, Finding, allocation_findings, machine_findings, meeting_findings
from fourfold.launch.facts import Facts, Gpu, Interface, read_memory, try_output
from fourfold.launch.measure import AllReduce, Clock, Measured
from fourfold.launch.prognosis import measured_findings
from tests.runs.hosts import two_hosts

ROOT = Path(__file__).parents[2]
GIB = 2**30
H200 = Gpu("NVIDIA H200", 139 * GIB)
ETH0, LO = Interface("eth0", ("10.0.0.1",)), Interface("lo", ("127.0.0.1", "::1"))


def facts(rank: int = 0, **changed: Any) -> Facts:
    """A sound machine with one rank; each rank has a machine of its own unless told otherwise."""
    sound = Facts(
        rank=rank,
        local_rank=0,
        host=f"n{rank}",
        machine=str(rank),
        system="Linux",
        python="3.11.7",
        fourfold="0.1.0",
        torch="2.13.0",
        cuda="",
        driver="",
        nccl="",
        gpus=(),
        has_nvidia=False,
        gpu_error="Found no NVIDIA driver",
        cores=(0, 1, 2, 3),
        threads=1,
        memory_bytes=64 * GIB,
        available_bytes=60 * GIB,
        shm_bytes=32 * GIB,
        shm_free_bytes=32 * GIB,
        open_files=65536,
        open_files_most=65536,
        output_dir="output",
        output_error="",
        disk_free_bytes=500 * GIB,
        temp_dir="/tmp",
        interfaces=(LO, ETH0),
        main_interface="eth0",
        own_address="10.0.0.1",
        infiniband=(),
        environment={},
    )
    return replace(sound, **changed)


def gpu_facts(rank: int = 0, **changed: Any) -> Facts:
    return facts(rank, **{"gpus": (H200,), "nccl": "2.27.5", "driver": "570.1", **changed})


def judge(*ranks: Facts, device: str = "auto") -> list[Finding]:
    return [*meeting_findings(list(ranks), device), *machine_findings(list(ranks))]


ALLOCATED = facts(environment={"SLURM_JOB_NUM_NODES": "4"})
LOOPBACK_NAME: dict[str, Any] = {"own_address": "127.0.1.1"}
# name -> what is wrong, its level, and words that have to be said of it
FAULTS: dict[str, tuple[Callable[[], list[Finding]], str, tuple[str, ...]]] = {
    "memory": (lambda: judge(facts(available_bytes=GIB // 2)), "fails", ("0.5 GiB", "n0")),
    "output": (lambda: judge(facts(output_error="Not a directory")), "fails", ("output_dir = output", "Not a dir")),
    "temporary files": (lambda: judge(facts(temp_dir="")), "fails", ("export TMPDIR",)),
    "old torch": (lambda: judge(facts(torch="2.9.1+cu128")), "fails", ("2.9.1", "pip install 'torch>=2.11'")),
    "other fourfold": (
        lambda: judge(facts(), facts(1), facts(2, fourfold="0.2.0")),
        "fails",
        ("0.1.0 on n0, n1 and 0.2.0 on n2",),
    ),
    "other torch": (lambda: judge(facts(), facts(1, torch="2.12.0")), "fails", ("2.13.0 on n0 and 2.12.0 on n1",)),
    "other NCCL": (lambda: judge(gpu_facts(), gpu_facts(1, nccl="2.21.5")), "fails", ("2.21.5 on n1",)),
    "other driver": (lambda: judge(gpu_facts(), gpu_facts(1, driver="550.2")), "warns", ("550.2 on n1",)),
    "broken driver": (lambda: judge(facts(), device="gpu"), "fails", ("global.device = gpu", "no NVIDIA driver")),
    "idle GPU": (lambda: judge(facts(has_nvidia=True)), "warns", ("would be on its CPU", "no NVIDIA driver")),
    "GPUs on one host only": (lambda: judge(gpu_facts(), facts(1)), "fails", ("other hosts have GPUs", "on n1")),
    "more ranks than GPUs": (
        lambda: judge(gpu_facts(), gpu_facts(1, machine="0", host="n0", local_rank=1)),
        "fails",
        ("rank 1 is process 1 of n0", "--nproc_per_node=1"),
    ),
    "another kind of GPU": (
        lambda: judge(gpu_facts(), gpu_facts(1, gpus=(Gpu("NVIDIA A100", 80 * GIB),))),
        "warns",
        ("NVIDIA A100 on n1",),
    ),
    "open files": (lambda: judge(facts(open_files=256)), "warns", ("256 open files", "ulimit -n 65536")),
    "shared memory": (lambda: judge(gpu_facts(shm_bytes=GIB // 16)), "warns", ("0.06 GiB", "--shm-size")),
    "disk": (lambda: judge(facts(disk_free_bytes=3 * GIB)), "warns", ("3.0 GiB are free", "output")),
    "threads": (
        lambda: judge(facts(threads=4), facts(1, threads=4, machine="0", host="n0")),
        "warns",
        ("8 threads in all on 4 cores", "export OMP_NUM_THREADS=2"),
    ),
    "name is loopback": (
        lambda: judge(facts(), facts(1, **LOOPBACK_NAME)),
        "fails",
        ("n1 resolves to 127.0.1.1", "on n1: export GLOO_SOCKET_IFNAME=eth0"),
    ),
    "name does not resolve": (lambda: judge(facts(), facts(1, own_address="")), "fails", ("does not resolve", "eth0")),
    "gloo's interface": (
        lambda: judge(facts(environment={"GLOO_SOCKET_IFNAME": "ib0"})),
        "fails",
        ("GLOO_SOCKET_IFNAME = ib0", "lo, eth0"),
    ),
    "gloo takes no beginnings": (
        lambda: judge(facts(environment={"GLOO_SOCKET_IFNAME": "eth"})),
        "fails",
        ("GLOO_SOCKET_IFNAME = eth ",),
    ),
    "NCCL's interface": (
        lambda: judge(gpu_facts(environment={"NCCL_SOCKET_IFNAME": "=eth"})),
        "fails",
        ("NCCL_SOCKET_IFNAME = =eth",),
    ),
    "one node of an allocation": (
        lambda: [*judge(ALLOCATED), *allocation_findings(ALLOCATED)],
        "warns",
        ("only n0", "4 nodes", "srun fourfold doctor"),
    ),
    "loopback between hosts": (
        lambda: judge(facts(environment={"GLOO_SOCKET_IFNAME": "lo"}), facts(1)),
        "fails",
        ("loopback interface", "export GLOO_SOCKET_IFNAME=eth0"),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_found_alone_with_its_level_and_a_remedy(name: str) -> None:
    found, level, words = FAULTS[name]
    (finding,) = found()
    assert finding.level == level and finding.remedy
    for word in words:
        assert word in f"{finding.sentence}\n{finding.remedy}"


def test_sound_machines_have_no_findings() -> None:
    assert not judge(facts()) and not judge(facts(), facts(1)) and not judge(gpu_facts(), gpu_facts(1), device="gpu")
    assert not judge(facts(**LOOPBACK_NAME)), "alone, a name that is the loopback is right"
    assert not judge(facts(), facts(1, **LOOPBACK_NAME, environment={"GLOO_SOCKET_IFNAME": "eth0"}))
    assert not judge(gpu_facts(environment={"NCCL_SOCKET_IFNAME": "eth"})), "NCCL takes the beginning of a name"
    assert not judge(gpu_facts(environment={"NCCL_SOCKET_IFNAME": "^docker,lo"})), "and what to leave out"


def measured(**changed: Any) -> Measured:
    all_reduce = AllReduce("gloo", 2, 1e-4, 2**26, 0.1, 6.7e8, True)
    return replace(Measured(stage="", device="cpu", matmul_flops=1e11, all_reduce=all_reduce), **changed)


SLOW_FABRIC = measured(device="NVIDIA H200", all_reduce=AllReduce("nccl", 2, 1e-4, 2**28, 0.5, 5e8, True))
WRONG_SUM = measured(all_reduce=AllReduce("nccl", 2, 1e-4, 2**28, 0.01, 5e10, False))
THREE = [facts(rank) for rank in range(3)]
MEASURED_FAULTS: dict[str, tuple[list[Facts], list[Measured | None], str, tuple[str, ...]]] = {
    "skew": (
        THREE,
        [measured(clocks=(Clock(1, 0.3, 0.001), Clock(2, -42.0, 0.001))), measured(), measured()],
        "warns",
        ("clock of n2 is 42.0 s behind that of n0",),
    ),
    "slow": (THREE, [measured(), measured(matmul_flops=5e10), measured()], "warns", ("n1", "2.0 times slower")),
    "gone": (THREE, [measured(), None, measured()], "fails", ("rank 1 on n1 could not answer", "dmesg")),
    "unreachable": (
        THREE,
        [measured(), measured(stage="join the process group over gloo", error="refused"), measured()],
        "fails",
        ("rank 1 on n1 could not join", "refused", "export GLOO_SOCKET_IFNAME=eth0"),
    ),
    "unreachable for NCCL": (
        THREE,
        [measured(), measured(stage="all-reduce over nccl", error="refused"), measured()],
        "fails",
        ("export NCCL_SOCKET_IFNAME=eth0", "NCCL_DEBUG=INFO"),
    ),
    "GPU fails": (THREE, [measured(), measured(), measured(matmul_error="ECC")], "fails", ("rank 2 on n2", "ECC")),
    "GPU is taken": (
        [gpu_facts()],
        [measured(device="NVIDIA H200", device_free_bytes=39 * GIB)],
        "warns",
        ("100.0 of 139.0 GiB", "rank 0 on n0"),
    ),
    "folder is not shared": (
        THREE,
        [measured(), measured(output_problem="is another folder where it is read"), measured()],
        "fails",
        ("output_dir = output is another folder", "rank 1 on n1"),
    ),
    "wrong sums": (THREE[:2], [WRONG_SUM, WRONG_SUM], "fails", ("NCCL_P2P_DISABLE=1",)),
    "slow InfiniBand": (
        [gpu_facts(rank, infiniband=("mlx5_0",)) for rank in range(2)],
        [SLOW_FABRIC, SLOW_FABRIC],
        "warns",
        ("0.5 GB/s", "mlx5_0", "NCCL_IB_HCA"),
    ),
}


@pytest.mark.parametrize("name", MEASURED_FAULTS)
def test_each_measured_fault_is_found_alone(name: str) -> None:
    ranks, figures, level, words = MEASURED_FAULTS[name]
    (finding,) = measured_findings(ranks, figures)
    assert finding.level == level and finding.remedy
    for word in words:
        assert word in f"{finding.sentence}\n{finding.remedy}"
    assert not list(measured_findings(THREE, [measured()] * 3))


def test_oldest_torch_is_that_of_the_package() -> None:
    package = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert f"torch>={'.'.join(map(str, OLDEST_TORCH))}" in package["dependencies"]


def test_memory_is_what_the_tightest_control_group_allows(tmp_path: Path) -> None:
    def write(path: str, text: object) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(f"{text}\n", encoding="utf-8")

    write("proc/meminfo", f"MemTotal:       {64 * 2**20} kB\nMemAvailable:   {60 * 2**20} kB")
    assert read_memory(tmp_path) == (64 * GIB, 60 * GIB)
    # v2: the limit stands two folders above, and file cache counts as free
    write("proc/self/cgroup", "0::/job/step/task")
    write("sys/fs/cgroup/job/step/task/memory.max", "max")
    write("sys/fs/cgroup/job/memory.max", 8 * GIB)
    write("sys/fs/cgroup/job/memory.current", 5 * GIB)
    write("sys/fs/cgroup/job/memory.stat", f"anon 1\ninactive_file {2 * GIB}")
    assert read_memory(tmp_path) == (8 * GIB, 5 * GIB)
    # v1, in a container that does not see its own path
    write("proc/self/cgroup", "4:cpu,cpuacct:/x\n3:memory:/docker/1234")
    write("sys/fs/cgroup/memory/memory.limit_in_bytes", 4 * GIB)
    write("sys/fs/cgroup/memory/memory.usage_in_bytes", 3 * GIB)
    assert read_memory(tmp_path) == (4 * GIB, 1 * GIB)


def test_trying_a_folder_leaves_nothing_behind(tmp_path: Path) -> None:
    error, free = try_output(str(tmp_path / "a" / "b"))
    assert error == "" and free is not None and free > 0
    assert not list(tmp_path.iterdir())
    assert "install the package" in try_output("nosuch://bucket/run")[0]


PROGRAM = [sys.executable, "-m", "fourfold", "doctor"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
RUNS: dict[str, tuple[list[str], dict[str, str]]] = {
    "plain": (PROGRAM, {}),
    "unwritable": ([*TORCHRUN, *PROGRAM[1:], "--output_dir", "file/below"], {}),
    "interface": (PROGRAM, {"GLOO_SOCKET_IFNAME": "nosuch0"}),
}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> dict[str, subprocess.CompletedProcess[str]]:
    """All of them, two at a time, since starting one takes seconds."""
    folder = tmp_path_factory.mktemp("doctor")
    (folder / "file").touch()
    inherited = {name: value for name, value in os.environ.items() if not re.match("OMP_|GLOO_|NCCL_", name)}

    def run(name: str) -> subprocess.CompletedProcess[str]:
        command, environment = RUNS[name]
        return subprocess.run(
            [*command, "--device", "cpu"],
            cwd=folder,
            env=inherited | environment | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(RUNS, pool.map(run, RUNS), strict=True))


def test_sound_machine_is_measured_and_passes(done: dict[str, subprocess.CompletedProcess[str]]) -> None:
    plain = done["plain"]
    assert plain.returncode == 0, plain.stdout + plain.stderr
    assert re.search(r"all-reduce over gloo, 2 processes: .* 0*[1-9.][\d.]* GB/s", plain.stdout)
    assert "nothing is in the way of a run" in plain.stdout and socket.gethostname() in plain.stdout
    assert plain.stdout.count("open files") == 1


def test_several_ranks_give_one_report_and_a_folder_that_cannot_be_written_fails(
    done: dict[str, subprocess.CompletedProcess[str]],
) -> None:
    several = done["unwritable"]
    assert several.returncode == 1
    assert several.stdout.count("open files") == several.stdout.count("a run would fail here") == 1
    assert re.search(r"^ *\S+ +0, 1 +cpu", several.stdout, re.MULTILINE), "both ranks stand in their machine's row"
    assert "fails  output_dir = file/below cannot be written to" in several.stdout
    assert "GB/s" in several.stdout, "what can be measured is"


def test_interface_that_does_not_exist_fails_by_name(done: dict[str, subprocess.CompletedProcess[str]]) -> None:
    interface = done["interface"]
    assert interface.returncode == 1
    assert "fails  GLOO_SOCKET_IFNAME = nosuch0 names no interface" in interface.stdout
    assert "unset GLOO_SOCKET_IFNAME" in interface.stdout and "Traceback" not in interface.stderr


def test_two_hosts_are_two_rows_of_one_report_that_names_the_wrong_one(tmp_path: Path) -> None:
    with two_hosts() as hosts:
        started = [
            host.start(
                *PROGRAM,
                log=tmp_path / host.name,
                RANK=rank,
                WORLD_SIZE=2,
                LOCAL_RANK=0,
                LOCAL_WORLD_SIZE=1,
                MASTER_ADDR=hosts[0].address,
                MASTER_PORT=29533,
                **({"GLOO_SOCKET_IFNAME": "lo"} if rank else {}),
            )
            for rank, host in enumerate(hosts)
        ]
        end_s = time.monotonic() + 120
        codes = [process.wait(max(1, end_s - time.monotonic())) for process in started]
    first, second = ((tmp_path / host.name).read_text(encoding="utf-8") for host in hosts)
    assert codes == [1, 1], first + second
    for host in hosts:
        assert re.search(rf"^ *{host.name} +\d +cpu", first, re.MULTILINE)
    assert f"GLOO_SOCKET_IFNAME = lo is {hosts[1].name}'s loopback interface" in first
    assert f"export GLOO_SOCKET_IFNAME={hosts[1].interface}" in first
    assert "open files" not in second, "only the first rank reports"
