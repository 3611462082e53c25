"""This process: its rank, its device, its process group. The only reader of the environment outside launch/."""

import atexit
import os
import resource
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend

from fourfold.errors import FourfoldError, LaunchError
from fourfold.mesh.environment import choose_environment
from fourfold.mesh.failure import Failures
from fourfold.mesh.fingerprint import Fingerprint, fingerprint_of
from fourfold.mesh.meeting import PATIENCE_S, Place, first_line, meet, place_in, refuse
from fourfold.mesh.mesh import set_timeout


@dataclass(frozen=True)
class Process:
    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    timeout_s: float
    """How long any rank waits for another before the job is given up."""
    choices: tuple[str, ...] = ()
    """What was chosen for the environment, in sentences."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def is_worker() -> bool:
    """Whether torchrun (or something like it) has told this process its rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def world_size_from_environment() -> int | None:
    """None where nobody has started us as one of several."""
    return int(os.environ["WORLD_SIZE"]) if is_worker() else None


def rank_from_environment() -> int:
    return int(os.environ.get("RANK", 0))


def speaks_for_host() -> bool:
    """Whether this process says what all of its machine have to say."""
    return (os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID", "0")) == "0"


def is_watched() -> bool:
    """Whether torchrun's agent, or our own launcher with it, waits for this process and shows why it failed."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def is_launched_by_us() -> bool:
    return "FOURFOLD_LAUNCHER" in os.environ


def count_cores() -> int:
    return len(os.sched_getaffinity(0))


@contextmanager
def all_cores() -> Iterator[None]:
    """For large tensors on the host: this process's share of the cores, where it otherwise has one."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, count_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def has_gpu() -> bool:
    return torch.cuda.is_available()


def pick_device(device: str, local_rank: int) -> torch.device:
    if device == "cpu" or (device == "auto" and not has_gpu()):
        return torch.device("cpu")
    if not has_gpu():
        raise LaunchError(
            "global.device = gpu, but PyTorch finds no GPU here; write cpu or auto, or check the driver with nvidia-smi"
        )
    if local_rank >= torch.cuda.device_count():
        raise LaunchError(
            f"this machine has {torch.cuda.device_count()} GPUs, but process {local_rank} of it needs one of its own; "
            "start at most one process per GPU"
        )
    return torch.device("cuda", local_rank)


def prefer_fast_attention() -> None:
    """cuDNN's attention first, where it takes the shapes: the fastest on Hopper. The others stay behind it."""
    order = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
    torch._C._set_sdp_priority_order([int(backend.value) for backend in order])


@contextmanager
def join_processes(device: str, timeout_s: float, mine: Fingerprint | None = None) -> Iterator[Process]:
    """Join the process group for the length of the block. A lone process is a group of one, with the same calls.

    `mine` is what has to be the same on all ranks. An error inside the block becomes the first that any rank had.
    """
    if not is_worker():
        place = prepare_device(device, 0)
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group(backend_of(place), store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        try:
            yield Process(0, 1, 0, place, timeout_s)
        finally:
            with suppress(RuntimeError):  # where the device is what failed
                dist.destroy_process_group()
        return
    meeting, local_rank = place_in(os.environ), int(os.environ.get("LOCAL_RANK", 0))
    try:
        place = prepare_device(device, local_rank)
    except LaunchError as error:
        refuse(meeting, error)
        raise
    choices = choose_environment(os.environ, place.type == "cuda")
    most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))  # the first rank has some for each other one
    # OpenMP has read the variable long before; with a list, the first is for threads that start no others
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"].split(",")[0]))
    store, token = join_group(meeting, place, timeout_s, mine)
    with Failures(meeting, token) as failures:
        yield Process(meeting.rank, meeting.world_size, local_rank, place, timeout_s, choices)
        wait_for_all()
        failures.stop()  # the store goes with the first rank
        wait_for_all()  # whoever leaves early must not break the others' last exchange
    dist.destroy_process_group()  # not after an error: it would wait for ranks that are gone
    del store  # until here, where it is the first rank's to keep


def join_group(
    meeting: Place, place: torch.device, timeout_s: float, mine: Fingerprint | None
) -> tuple[dist.Store, str]:
    """The store that the ranks met at, and a word that all of them know and no earlier attempt did."""
    patience_s = min(timeout_s, PATIENCE_S)
    store = meet(meeting, mine or fingerprint_of(), patience_s)
    word = [uuid.uuid4().hex]
    try:
        dist.init_process_group(
            backend_of(place),
            store=store,
            rank=meeting.rank,
            world_size=meeting.world_size,
            timeout=timedelta(seconds=patience_s),
        )
        dist.broadcast_object_list(word, device=torch.device("cpu"))
    except RuntimeError as error:
        failed = LaunchError(
            f"rank {meeting.rank} on {meeting.host} found the others, but cannot talk to all of them over "
            f"{os.environ.get('GLOO_SOCKET_IFNAME')} ({first_line(error)}); set GLOO_SOCKET_IFNAME on each machine to "
            "the interface that reaches the others, and check firewalls"
        )
        failed.exit_code = 1
        raise failed from error
    set_timeout(dist.distributed_c10d._get_default_group(), timeout_s)
    store.set_timeout(timedelta(seconds=timeout_s))  # NCCL makes its communicators through it, when first used
    return store, word[0]


def prepare_device(device: str, local_rank: int) -> torch.device:
    place = pick_device(device, local_rank)
    if place.type == "cuda":
        torch.cuda.set_device(place)
        prefer_fast_attention()
    return place


def keep_compiled() -> str:
    """The folder of compiled code: as set, else one that outlives the temporary files among which PyTorch keeps it."""
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if not folder:
        with suppress(OSError, RuntimeError):  # no home, or none to write to
            ours = Path.home() / ".cache" / "fourfold" / "compiled"
            ours.mkdir(parents=True, exist_ok=True)
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder = str(ours)
    if folder:  # Triton's own default changes once the compiler has compiled something
        os.environ.setdefault("TRITON_CACHE_DIR", str(Path(folder) / "triton"))
    return folder or "the temporary folder"


def backend_of(place: torch.device) -> str:
    """gloo stays beside nccl: checkpoints and offloaded gradients communicate from host memory."""
    return "cpu:gloo,cuda:nccl" if place.type == "cuda" else "gloo"


def tell_refusal(error: FourfoldError) -> None:
    """A mistake that this rank found before it met the others: they need not wait for it."""
    if is_worker() and not dist.is_initialized():
        with suppress(LaunchError):  # there is nowhere to tell it
            refuse(place_in(os.environ), error)


def leave(code: int) -> NoReturn:
    """End a worker without the interpreter's own finish, in which gloo's threads, that may still hold tensors, now and
    then abort the process."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def wait_for_all() -> None:
    """Until every rank is here."""
    dist.barrier()


def seed_generators(key: int) -> None:
    """The device's own generators, which dropout inside attention kernels draws from."""
    torch.manual_seed(key & (2**63 - 1))
