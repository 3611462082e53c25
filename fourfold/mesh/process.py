"""This process: its rank, its device, its process group. The only reader of the environment outside launch/."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend

from fourfold.errors import LaunchError


@dataclass(frozen=True)
class Process:
    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    timeout_s: float
    """How long any rank waits for another before the job is given up."""

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


def is_first_process() -> bool:
    """Whether this process speaks for all."""
    return rank_from_environment() == 0


def count_cores() -> int:
    return len(os.sched_getaffinity(0))


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
def join_processes(device: str, timeout_s: float) -> Iterator[Process]:
    """Join the process group for the length of the block. A lone process is a group of one, with the same calls."""
    rank = rank_from_environment()
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    place = pick_device(device, local_rank)
    if place.type == "cuda":
        torch.cuda.set_device(place)
        prefer_fast_attention()
    # gloo stays beside nccl: checkpoints and offloaded gradients communicate from host memory
    backend = "cpu:gloo,cuda:nccl" if place.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_s)
    if is_worker():
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    yield Process(rank, world_size, local_rank, place, timeout_s)
    dist.destroy_process_group()  # not after an error: it would wait for ranks that are gone


def wait_for_all() -> None:
    """Until every rank is here."""
    dist.barrier()


def seed_generators(key: int) -> None:
    """The device's own generators, which dropout inside attention kernels draws from."""
    torch.manual_seed(key & (2**63 - 1))
