"""A layout built for real on one rank of a cluster that does not exist: a fake process group, and nothing allocated.

The whole of `parallelize` runs, for any number of ranks, and what it made is held against the cost model's figures.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from fourfold.config.resolve import with_micro_batch_size
from fourfold.config.schema import Config
from fourfold.cost.memory import StateBytes, stages_of, state_bytes
from fourfold.cost.peak import Peak, candidate_sizes, fitting_micro_batch_size, peak_bytes
from fourfold.layout.layout import Coordinate, Layout
from fourfold.layout.stages import PipeStage
from fourfold.mesh.process import has_gpu
from fourfold.parallelize.apply import parallelize
from fourfold.train.fit import describe_choice, memory_bytes, smallest_forecast, too_large


@dataclass(frozen=True)
class RankForecast:
    """What one rank will hold; with sharding_offload its state, but for what is gathered, in host memory."""

    pp_rank: int
    stages: list[PipeStage]
    state: StateBytes
    peak: Peak


def forecast(config: Config, layout: Layout) -> list[RankForecast]:
    """For the first rank of every place in the pipe; along the other axes ranks differ by padding alone."""
    places = [Coordinate(pp, 0, 0, 0) for pp in range(layout.pp)]
    return [
        RankForecast(
            at.pp, stages_of(config, layout, at), state_bytes(config, layout, at), peak_bytes(config, layout, at)
        )
        for at in places
    ]


def choose_here(config: Config, layout: Layout) -> tuple[Config, str]:
    """The config with the micro batch that training would take on this machine, and a sentence about it. Nothing is
    refused: the cluster that is asked about may be another."""
    if config.global_.micro_batch_size != "auto":
        return config, f"The micro batch is {config.global_.micro_batch_size}."
    smallest, gib = smallest_forecast(config, layout)
    if not has_gpu():
        largest = candidate_sizes(config, layout)[-1]
        return with_micro_batch_size(config, largest), (
            f"The micro batch is {largest}, the largest that auto takes; where it does not fit a GPU, auto takes a "
            f"smaller one, and {smallest} needs {gib:.2f} GiB."
        )
    memory = memory_bytes(torch.device("cuda", 0))
    size = fitting_micro_batch_size(config, layout, memory)
    if size is None:
        refusal = f"On this machine training would be refused: {too_large(config, layout, memory)}."
        return with_micro_batch_size(config, smallest), refusal
    return with_micro_batch_size(config, size), f"Here training takes {describe_choice(config, layout, size, memory)}."


@contextmanager
def fake_processes(rank: int, world_size: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def count_built(config: Config, layout: Layout, rank: int) -> int:
    """Build one rank's share of the model on the meta device; the number of parameters that it stores."""
    with fake_processes(rank, layout.world_size):
        parallel = parallelize(config, layout, rank, torch.device("meta"), timeout_s=60.0)
        shards = [getattr(parameter, "_local_tensor", parameter) for parameter in parallel.named_parameters().values()]
        return sum(prod(shard.shape) for shard in shards)
