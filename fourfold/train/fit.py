"""How `micro_batch_size: auto` is chosen on a GPU: the largest that is forecast to fit all of them. And what is said
where memory does not suffice.
"""

import logging

import torch

from fourfold.checkpoint.paths import local_folder
from fourfold.config.load import CONFIG_FILE, load_config
from fourfold.config.resolve import with_micro_batch_size
from fourfold.config.schema import Config
from fourfold.config.words import any_of
from fourfold.cost.peak import ROOM, candidate_sizes, fitting_micro_batch_size, largest_peak
from fourfold.errors import ConfigError
from fourfold.layout.layout import Layout
from fourfold.mesh.shared import tell_all

log = logging.getLogger("fourfold")

GIB = 2**30


def memory_bytes(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).total_memory)


def choose_micro_batch_size(config: Config, layout: Layout, device: torch.device) -> Config:
    """The config, resolved but for this key, with the size that fits the smallest GPU: the same on all ranks."""
    memory = min(tell_all(memory_bytes(device)))
    size = fitting_micro_batch_size(config, layout, memory)
    if size is None:
        raise ConfigError(too_large(config, layout, memory))
    log.info(describe_choice(config, layout, size, memory))
    return with_micro_batch_size(config, size)


def forecast_gib(config: Config, layout: Layout, size: int) -> float:
    return largest_peak(with_micro_batch_size(config, size), layout) / GIB


def smallest_forecast(config: Config, layout: Layout) -> tuple[int, float]:
    """The size that takes the least, and its GiB. Not always the smallest: several micro batches add gradients."""
    return min(
        ((size, forecast_gib(config, layout, size)) for size in candidate_sizes(config, layout)),
        key=lambda each: each[1],
    )


def describe_choice(config: Config, layout: Layout, size: int, memory: int) -> str:
    larger = [each for each in candidate_sizes(config, layout) if each > size]
    why = "the layout takes no larger one"
    if larger:
        why = f"{larger[0]} would take {forecast_gib(config, layout, larger[0]):.1f}"
    return f"micro batch {size}: forecast {forecast_gib(config, layout, size):.1f} of {memory / GIB:.1f} GiB; {why}"


def too_large(config: Config, layout: Layout, memory: int) -> str:
    size, gib = smallest_forecast(config, layout)
    return (
        f"global.micro_batch_size = auto finds no size that fits: {size} is forecast to take {gib:.1f} GiB, and of the "
        f"{memory / GIB:.1f} GiB of the smallest GPU {ROOM * memory / GIB:.1f} may be filled; "
        f"set {any_of(remedies(config, layout))}, or micro_batch_size to {size} to try it all the same"
    )


def remedies(config: Config, layout: Layout) -> list[str]:
    """The keys that are left to set, those that cost the least first."""
    model, distributed = config.model, config.distributed
    if not model.use_recompute:
        found = ["use_recompute to true"]
    else:
        found = [] if model.recompute_granularity == "full" else ["recompute_granularity to full"]
    if layout.mp > 1 and not distributed.sequence_parallel:
        found.append("sequence_parallel to true")
    sharding = distributed.sharding
    if layout.sharding > 1 and sharding.sharding_stage < 3 and not sharding.sharding_offload:  # it frees as much
        found.append("sharding_stage to 3")
    return [*found, f"sharding_degree above {layout.sharding}", f"mp_degree above {layout.mp}"]


def is_out_of_memory(error: BaseException | None) -> bool:
    """However wrapped: a pipe stage raises an error of its own from it."""
    return error is not None and (isinstance(error, torch.OutOfMemoryError) or is_out_of_memory(error.__cause__))


def out_of_memory(config: Config, layout: Layout, rank: int) -> ConfigError:
    """What to do about it, in a sentence; another start would end alike."""
    left = local_folder(config.engine.output_dir) / CONFIG_FILE
    if config.global_.micro_batch_size == "auto" and left.exists():  # what was chosen stands in what the run wrote
        config = load_config(left)
    size = config.global_.micro_batch_size
    if size == "auto":
        found = ["micro_batch_size below what the log says was chosen"]
    else:
        smaller = [each for each in candidate_sizes(config, layout) if each < size]
        found = [f"micro_batch_size to {max(smaller)}"] if smaller else []
    return ConfigError(
        f"the GPU of rank {rank} has no memory left for global.micro_batch_size = {size}; "
        f"set {any_of([*found, *remedies(config, layout)])}"
    )
