"""A step recorded once as a CUDA graph and then replayed: one launch where a host needs a thousand, which takes it
longer than a fast GPU needs to compute them.

Every step is taken once: the first ones as they come, the next is recorded, which computes nothing, and replayed. Only
for one process, where nothing is exchanged, and for models that are compiled: `compile: false` is without surprises.
"""

from collections.abc import Callable
from typing import Any

import torch

from fourfold.config.resolve import accumulation
from fourfold.config.schema import Config
from fourfold.data.loader import Batch
from fourfold.errors import ConfigError
from fourfold.mesh.meeting import first_line
from fourfold.mesh.process import Process

STEPS_BEFORE = 2
"""In these everything is compiled, chosen and allocated that is not to be again."""
MOST_MICRO_BATCHES = 64
"""More would make a graph of a hundred thousand nodes."""


def is_replayable(config: Config, process: Process) -> bool:
    return (
        process.device.type == "cuda"
        and process.world_size == 1
        and bool(config.engine.compile)
        and not config.distributed.sharding.sharding_offload
        and not config.model.use_recompute  # compiled, it reads the state of attention's generator on the host
        and accumulation(config) <= MOST_MICRO_BATCHES
    )


class Replay:
    """Calls a function of a batch and some numbers, all on the device, or replays what it recorded of such a call. What
    the function returns is a NamedTuple of tensors."""

    def __init__(self, is_possible: bool) -> None:
        self.is_possible = is_possible
        self.steps = 0
        self.graph: Any = None

    def __call__(self, compute: Callable[[Batch, torch.Tensor], Any], batch: Batch, numbers: torch.Tensor) -> Any:
        self.steps += 1
        if not self.is_possible or self.steps <= STEPS_BEFORE:
            return compute(batch, numbers)
        if self.graph is None:
            self.record(compute, batch, numbers)
        for kept, new in zip((*self.batch, self.numbers), (*batch, numbers), strict=True):
            if kept is not None and new is not None:
                kept.copy_(new)
        self.graph.replay()
        return type(self.result)(*(tensor.clone() for tensor in self.result))

    def record(self, compute: Callable[[Batch, torch.Tensor], Any], batch: Batch, numbers: torch.Tensor) -> None:
        """Nothing is computed by it. What PyTorch holds after a failure is in no state to go on."""
        self.batch, self.numbers = batch.each(torch.clone), numbers.clone()
        graph = torch.cuda.CUDAGraph()
        try:
            # other threads may go on pinning memory for batches meanwhile
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self.result = compute(self.batch, self.numbers)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # the same lines have just run, unrecorded
            raise ConfigError(
                f"engine.compile = true records steps as a CUDA graph, which failed here ({first_line(error)}); "
                "write compile: false"
            ) from error
        self.graph = graph
