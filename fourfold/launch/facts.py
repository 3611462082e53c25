"""What a machine has, as one process of a run sees it. Read from the kernel and from PyTorch; nothing is judged here.

Linux only, like the launcher: /proc and /sys tell everything, so no further package is needed.
"""

import os
import platform
import re
import resource
import shutil
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from fourfold.checkpoint.paths import is_local, locate
from fourfold.errors import CheckpointError
from fourfold.mesh.environment import addresses_here, is_loopback, pick_interface, plain
from fourfold.mesh.fingerprint import fingerprint_of

SHOWN_VARIABLES = re.compile(
    r"MASTER_(ADDR|PORT)|OMP_NUM_THREADS|CUDA_VISIBLE_DEVICES|SLURM_JOB_NUM_NODES|(GLOO|NCCL)_\w+"
)


@dataclass(frozen=True)
class Gpu:
    name: str
    memory_bytes: int


@dataclass(frozen=True)
class Interface:
    name: str
    addresses: tuple[str, ...]

    @property
    def is_loopback(self) -> bool:
        return any(is_loopback(address) for address in self.addresses)


@dataclass(frozen=True)
class Facts:
    rank: int
    local_rank: int
    host: str
    machine: str
    """The same for processes that share a kernel and a network, and for no others."""
    system: str
    python: str
    fourfold: str
    torch: str
    cuda: str
    """The version PyTorch was built for; empty for a build without CUDA, as driver and nccl are without a GPU."""
    driver: str
    nccl: str
    gpus: tuple[Gpu, ...]
    has_nvidia: bool
    """Whether there is an NVIDIA device file, whatever PyTorch makes of it."""
    gpu_error: str
    """Why PyTorch has no GPU."""
    cores: tuple[int, ...]
    """The numbers of those this process may use."""
    threads: int
    memory_bytes: int
    """The machine's, or what the control group allows, if that is less."""
    available_bytes: int
    shm_bytes: int
    shm_free_bytes: int
    open_files: int
    open_files_most: int
    output_dir: str
    output_error: str
    disk_free_bytes: int | None
    """None where output_dir is remote."""
    temp_dir: str
    """Empty where no folder for temporary files can be written."""
    interfaces: tuple[Interface, ...]
    main_interface: str
    """The one that leads to the other machines; empty if that cannot be told."""
    own_address: str
    """What the host's own name resolves to; empty if it does not."""
    infiniband: tuple[str, ...]
    environment: dict[str, str]


def examine(output_dir: str) -> Facts:
    """Everything about the machine this process runs on, in a fraction of a second; leaves nothing behind."""
    leading = pick_interface(os.environ.get("MASTER_ADDR", ""), is_several=True)
    memory_bytes, available_bytes = read_memory(Path("/"))
    shm = shutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    gpus, gpu_error = find_gpus()
    output_error, disk_free_bytes = try_output(output_dir)
    try:
        temp_dir = tempfile.gettempdir()
    except OSError:
        temp_dir = ""
    return Facts(
        rank=int(os.environ.get("RANK", 0)),
        local_rank=int(os.environ.get("LOCAL_RANK", 0)),
        host=socket.gethostname(),
        machine=_read(Path("/proc/sys/kernel/random/boot_id")) + str(Path("/proc/self/ns/net").readlink()),
        system=f"{_distribution()}, kernel {platform.release()}",
        python=platform.python_version(),
        fourfold=fingerprint_of()["fourfold"],
        torch=torch.__version__,
        cuda=torch.version.cuda or "",
        driver=_driver_version(),
        nccl=".".join(map(str, torch.cuda.nccl.version())) if gpus else "",
        gpus=gpus,
        has_nvidia=any(Path("/dev").glob("nvidia[0-9]*")),
        gpu_error=gpu_error,
        cores=tuple(sorted(os.sched_getaffinity(0))),
        threads=torch.get_num_threads(),
        memory_bytes=memory_bytes,
        available_bytes=available_bytes,
        shm_bytes=shm.total if shm else 0,
        shm_free_bytes=shm.free if shm else 0,
        open_files=_unlimited(soft),
        open_files_most=_unlimited(hard),
        output_dir=output_dir,
        output_error=output_error,
        disk_free_bytes=disk_free_bytes,
        temp_dir=temp_dir,
        interfaces=read_interfaces(),
        main_interface=leading.interface if leading else "",
        own_address=_resolve(socket.gethostname()),
        infiniband=tuple(sorted(each.name for each in Path("/sys/class/infiniband").glob("*"))),
        environment={name: os.environ[name] for name in sorted(os.environ) if SHOWN_VARIABLES.fullmatch(name)},
    )


def find_gpus() -> tuple[tuple[Gpu, ...], str]:
    """All of this machine that PyTorch can use, or none and why."""
    try:
        torch.cuda.init()
        properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    except (RuntimeError, AssertionError) as error:  # the latter from a build without CUDA
        return (), str(error).splitlines()[0]
    return tuple(Gpu(each.name, each.total_memory) for each in properties), ""


def read_memory(root: Path) -> tuple[int, int]:
    """In all and available: the kernel's figures, or those of the tightest control group above us, v1 or v2."""
    kernel = dict(re.findall(r"^(\w+): +(\d+) kB", _read(root / "proc/meminfo"), re.MULTILINE))
    total, available = int(kernel["MemTotal"]) * 1024, int(kernel["MemAvailable"]) * 1024
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, limit_file, used_file, cache = root / "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            top, limit_file, used_file = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache = "total_inactive_file"
        else:
            continue
        # inside a container the path may be the host's, which is not mounted here: then the top is our own group
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(top):
                break
            limit = _read(folder / limit_file)
            if limit.isdigit() and int(limit) < total:
                total = int(limit)
                freed = re.search(rf"^{cache} (\d+)", _read(folder / "memory.stat"), re.MULTILINE)
                used = int(_read(folder / used_file) or 0) - (int(freed[1]) if freed else 0)
                available = min(available, max(0, total - used))
    return total, available


def try_output(output_dir: str) -> tuple[str, int | None]:
    """Why a run could not write there, or nothing, and the free bytes. The folder itself is not created."""
    try:
        folder = locate(output_dir)
        if not is_local(folder):
            probe = folder / f".fourfold-doctor-{os.getpid()}"
            probe.write_bytes(b"")
            probe.unlink()
            return "", None
        existing = nearest_folder(output_dir)
        free = shutil.disk_usage(existing).free
        with tempfile.TemporaryFile(dir=existing):
            return "", free
    except CheckpointError as error:
        return str(error), None
    except OSError as error:
        return error.strerror or str(error), None
    except Exception as error:  # a remote store's own kind of error
        return f"{type(error).__name__}: {error}".splitlines()[0], None


def nearest_folder(output_dir: str) -> Path:
    """The folder itself, or, as a run would create it, the first of those above that exists."""
    folder = Path(str(locate(output_dir))).absolute()
    # lexists, so that a file or a dangling link in the way is found and fails as it would in a run
    return next(each for each in (folder, *folder.parents) if os.path.lexists(each))


def read_interfaces() -> tuple[Interface, ...]:
    """All there are, those without an address too."""
    by_address = addresses_here()
    return tuple(
        Interface(name, tuple(address for address, where in by_address.items() if where == name))
        for _, name in socket.if_nameindex()
    )


def _resolve(host: str) -> str:
    try:
        return plain(str(socket.getaddrinfo(host, None)[0][4][0]))
    except OSError:
        return ""


def _distribution() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.system()


def _driver_version() -> str:
    found = re.search(r"Kernel Module[^\d]*([\d.]+)", _read(Path("/proc/driver/nvidia/version")))
    return found[1] if found else ""


def _unlimited(limit: int) -> int:
    return 2**63 - 1 if limit == resource.RLIM_INFINITY else limit


def _read(path: Path) -> str:
    """Empty where there is none: kernels and containers differ in what they show."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
