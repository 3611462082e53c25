"""What processes measure together: matmul on every rank at once, all-reduce over all of them, how clocks differ."""

import os
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fourfold.errors import LaunchError
from fourfold.mesh.process import Process, backend_of, prepare_device, wait_for_all
from fourfold.mesh.shared import PATIENCE_S, look_for_token

COLLECTIVE_S = 60.0
"""How long a rank that is there may take to answer."""
DEADLINE_S = 120.0
"""How long all measurements may take."""

MATMUL_SIZE = {"cpu": 1024, "cuda": 8192}
MATMUL_DTYPE = {"cpu": torch.float32, "cuda": torch.bfloat16}
LARGE_BYTES = {"cpu": 2**26, "cuda": 2**28}


@dataclass(frozen=True)
class AllReduce:
    backend: str
    processes: int
    small_s: float
    """For one number."""
    large_bytes: int
    large_s: float
    bus_bytes_per_s: float
    """What each process sends, and receives: comparable for any number of processes."""
    is_right: bool


@dataclass(frozen=True)
class Clock:
    """How far a rank's clock is ahead of the first rank's."""

    rank: int
    ahead_s: float
    error_s: float


class Plan(NamedTuple):
    """What the first rank tells the others to do."""

    is_possible: bool
    first_ranks: list[int]
    """The lowest of every machine."""
    token: str
    """A file that the first rank has put where output_dir lies; empty where none is needed."""


@dataclass
class Measured:
    """What one rank has to tell; filled as it goes, so that it shows how far it came."""

    stage: str = "join the process group over gloo"
    error: str = ""
    """Why it did not come further; empty when it is through."""
    device: str = ""
    matmul_flops: float = 0.0
    matmul_error: str = ""
    device_free_bytes: int | None = None
    output_problem: str = ""
    """What is wrong with output_dir as this rank sees it, where the first can write to it."""
    clocks: tuple[Clock, ...] = ()
    all_reduce: AllReduce | None = None


def measure(measured: Measured, store: dist.Store, device: str, plan: Plan) -> None:
    """As one rank of all that do the same.

    Not through `join_processes`, whose way with a failure is to end the ranks: here all of them have to tell what they
    know of it.
    """
    process = join(store, device)
    backend = f"over {'nccl' if process.device.type == 'cuda' else 'gloo'}"
    if plan.token:
        measured.output_problem = look_for_token(Path(plan.token), PATIENCE_S)
    measured.stage = "compare clocks over gloo"
    measured.clocks = compare_clocks(process, plan.first_ranks)
    measured.stage = f"meet the others {backend}"
    wait_for_all()  # cores and memory are shared in a run too, so all measure at the same time
    measured.stage = "multiply matrices"
    try:
        measure_matmul(measured, process.device)
    except RuntimeError as error:  # the others are waiting for this rank, and what failed is told at the end
        measured.matmul_error = first_line(error)
    measured.stage = f"meet the others {backend} after multiplying matrices"
    wait_for_all()
    measured.stage = f"all-reduce {backend}"
    measured.all_reduce = measure_all_reduce(process)
    wait_for_all()  # whoever leaves early must not break the others' last exchange
    dist.destroy_process_group()
    measured.stage = ""


def join(store: dist.Store, device: str) -> Process:
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    place = prepare_device(device, local_rank)
    process = Process(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), local_rank, place, COLLECTIVE_S)
    dist.init_process_group(
        backend_of(place),
        store=store,
        rank=process.rank,
        world_size=process.world_size,
        timeout=timedelta(seconds=COLLECTIVE_S),
    )
    return process


def measure_matmul(measured: Measured, device: torch.device) -> None:
    size = MATMUL_SIZE[device.type]
    measured.device = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    if device.type == "cuda":
        measured.device_free_bytes = torch.cuda.mem_get_info(device)[0]
    a = torch.randn(size, size, device=device, dtype=MATMUL_DTYPE[device.type])
    times_s = time_calls(lambda: a @ a, device, 10)
    measured.matmul_flops = 2 * size**3 / min(times_s)


def measure_all_reduce(process: Process) -> AllReduce:
    device, ranks = process.device, process.world_size
    small = torch.ones(1, device=device)
    large = torch.full((LARGE_BYTES[device.type] // 4,), float(process.rank + 1), device=device)
    dist.all_reduce(large)
    is_right = bool((large == ranks * (ranks + 1) / 2).all())
    large.zero_()
    small_s = statistics.median(time_calls(lambda: dist.all_reduce(small), device, 50))
    large_s = statistics.median(time_calls(lambda: dist.all_reduce(large), device, 5))
    large_bytes = LARGE_BYTES[device.type]
    bus_bytes_per_s = 2 * (ranks - 1) / ranks * large_bytes / large_s
    return AllReduce(
        "nccl" if device.type == "cuda" else "gloo", ranks, small_s, large_bytes, large_s, bus_bytes_per_s, is_right
    )


def time_calls(call: Callable[[], Any], device: torch.device, times: int) -> list[float]:
    seconds = []
    for _ in range(times + 1):
        began_s = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began_s)
    return seconds[1:]


def compare_clocks(process: Process, first_ranks: list[int]) -> tuple[Clock, ...]:
    """The first rank asks one rank of each other machine for the time. The true difference lies within half of the
    fastest round trip, however uneven its two ways are."""
    found = []
    for rank in first_ranks:
        if process.is_first and rank != 0:
            trips = [ask_time(rank) for _ in range(10)]
            found.append(Clock(rank, *min(trips, key=lambda trip: trip[1])))
        elif process.rank == rank != 0:
            for _ in range(10):
                moment = torch.zeros((), dtype=torch.float64)
                dist.recv(moment, src=0)
                dist.send(torch.tensor(time.time(), dtype=torch.float64), dst=0)
    return tuple(found)


def ask_time(rank: int) -> tuple[float, float]:
    there = torch.zeros((), dtype=torch.float64)
    began_s = time.time()
    dist.send(there, dst=rank)
    dist.recv(there, src=rank)
    ended_s = time.time()
    return there.item() - (began_s + ended_s) / 2, (ended_s - began_s) / 2


def measure_in_time(store: dist.Store, device: str, plan: Plan) -> Measured:
    """In a thread of its own: a communicator that cannot be built may wait for ever, and hears no signal."""
    measured = Measured()

    def attempt() -> None:
        try:
            measure(measured, store, device, plan)
        except (RuntimeError, ValueError, LaunchError) as error:
            measured.error = first_line(error)

    # a communicator's own watchdog would end the process before it could say anything
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    thread = Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    if thread.is_alive():
        measured.error = f"no answer within {DEADLINE_S:.0f} s"
    return measured


def first_line(error: Exception) -> str:
    """Without the place in the sources that gloo begins with, and its advice behind."""
    text = re.sub(r"\[\S+:\d+\] ", "", str(error).strip()).partition(" This is typically")[0]
    return text.splitlines()[0] if text else type(error).__name__
