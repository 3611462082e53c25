"""The torch profiler over a few steps: a trace for chrome://tracing or Perfetto, and on a GPU a memory snapshot."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

from fourfold.config.schema import Profiler


@contextmanager
def profiling(profiler: Profiler, folder: Path, device: torch.device, rank: int) -> Iterator[Callable[[], None]]:
    """Yields what to call after each step. Steps are counted from 1 as in the log, and from where this run began."""
    if not profiler.enable:
        yield lambda: None
        return
    folder.mkdir(parents=True, exist_ok=True)
    is_cuda = device.type == "cuda"
    if is_cuda and profiler.memory_snapshot:
        torch.cuda.memory._record_memory_history(max_entries=100_000)
    length = profiler.stop_step - profiler.start_step + 1
    with torch.profiler.profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])],
        schedule=torch.profiler.schedule(
            skip_first=max(0, profiler.start_step - 2),
            wait=0,
            warmup=1 if profiler.start_step > 1 else 0,
            active=length,
            repeat=1,
        ),
        on_trace_ready=lambda trace: trace.export_chrome_trace(str(folder / f"trace_rank{rank}.json")),
    ) as trace:
        yield trace.step
    if is_cuda and profiler.memory_snapshot:
        torch.cuda.memory._dump_snapshot(str(folder / f"memory_rank{rank}.pickle"))
        torch.cuda.memory._record_memory_history(enabled=None)
