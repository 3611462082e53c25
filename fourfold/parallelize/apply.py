"""From a config to a model that is ready to train on its layout: what is done to it, in the order in which it must be.

What comes out is this rank's pipe stages (one, without a pipe) and the way to run them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fourfold.config.schema import Config
from fourfold.cost.memory import stages_of
from fourfold.cost.params import Parameter, parameters, saved_name, shard_of
from fourfold.layout.layout import Coordinate, Layout
from fourfold.mesh.mesh import build_mesh
from fourfold.model.gpt import GPT, Block
from fourfold.model.init import initialize_shard
from fourfold.parallelize.accumulate import Accumulated
from fourfold.parallelize.forward import Forward, replace_forward
from fourfold.parallelize.pipeline import Pipelined
from fourfold.parallelize.precision import apply_float8, compute_dtype
from fourfold.parallelize.recompute import apply_recompute
from fourfold.parallelize.shard import apply_sharding
from fourfold.parallelize.tensor import apply_tensor, sum_replicated_gradients
from fourfold.parallelize.tied import build_tied_group, is_split, sum_tied_gradients


@dataclass(frozen=True)
class ParallelModel:
    config: Config
    layout: Layout
    at: Coordinate
    mesh: DeviceMesh
    parts: list[GPT]
    execution: Accumulated | Pipelined
    tied_group: dist.ProcessGroup | None

    def table(self) -> list[Parameter]:
        """The parameters of this rank's stages."""
        return [parameter for part in self.parts for parameter in parameters(self.config.model, part.stage)]

    def named_parameters(self) -> dict[str, nn.Parameter]:
        return {name: parameter for part in self.parts for name, parameter in part.named_parameters()}

    def finish_gradients(self, gradients: dict[str, torch.Tensor]) -> None:
        """The sums that are left after backward, in place."""
        if self.config.distributed.sequence_parallel and self.layout.mp > 1:
            sum_replicated_gradients(gradients, self.config.model, self.mesh.get_group("mp"))
        if is_split(self.config.model, self.layout):
            sum_tied_gradients(gradients, self.tied_group)

    def counted(self, gradients: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """Those that this rank adds to the global norm, so that over all ranks each number is counted once."""
        if self.at.dp != 0:
            return []
        return [
            gradients[parameter.name]
            for parameter in self.table()
            if (self.at.mp == 0 or parameter.mp_dim is not None)
            and saved_name(parameter.name, self.config.model) == parameter.name
        ]

    @property
    def reports_loss(self) -> bool:
        """Whether this rank adds its rows' loss to the whole: the mp ranks all have the same."""
        return self.at.mp == 0 and any(part.stage.has_head for part in self.parts)


def parallelize(config: Config, layout: Layout, rank: int, device: torch.device, timeout_s: float) -> ParallelModel:
    at = layout.coordinate(rank)
    mesh = build_mesh(layout, "cuda" if device.type == "cuda" else "cpu", timeout_s)
    parts = cut_stages(config, layout, at)
    for part in parts:
        apply_float8(part, config, layout, device)
        apply_tensor(part, config.model, mesh["mp"], config.distributed.sequence_parallel, config.data.max_seq_len)
        apply_compile(part, config, layout)
        apply_recompute(part, config.model)
        apply_sharding(part, config, layout, mesh)
        materialize(part, config, layout, at, device)
    execution = (
        Pipelined(parts, config, layout, mesh, device) if layout.pp > 1 else Accumulated(parts[0], config, layout)
    )
    tied_group = build_tied_group(layout, at, timeout_s) if is_split(config.model, layout) else None
    return ParallelModel(config, layout, at, mesh, parts, execution, tied_group)


def cut_stages(config: Config, layout: Layout, at: Coordinate) -> list[GPT]:
    """This rank's pipe stages on the meta device: nothing is allocated before it is known which share is ours."""
    stages = stages_of(config, layout, at)
    with torch.device("meta"):
        return [GPT(config.model, compute_dtype(config.engine), stage) for stage in stages]


# Under mp the compiler cannot trace through recomputation, so what is recomputed is compiled inside of it.
COMPILED_INSIDE: dict[str, Callable[[Block], list[nn.Module]]] = {
    "full": lambda block: [block],
    "full_attn": lambda block: [block.attention, block.feedforward],
    "core_attn": lambda block: [block.feedforward],
}


def apply_compile(gpt: GPT, config: Config, layout: Layout) -> None:
    """Piece by piece: all blocks are the same code, compiled once, and a graph of the whole stage would have nothing
    more to fuse."""
    if not config.engine.compile:
        return
    blocks = [block for block in gpt.blocks.values() if isinstance(block, Block)]
    if layout.mp > 1 and config.model.use_recompute:
        for block in blocks:
            for piece in COMPILED_INSIDE[config.model.recompute_granularity](block):
                replace_forward(piece, compiled_forward(type(piece)))  # type: ignore[arg-type]
        return
    for module in (gpt.embedding, *blocks, gpt.norm):
        if module is not None:
            module.compile(dynamic=False)


@cache
def compiled_forward(kind: type[nn.Module]) -> Forward:
    return torch.compile(kind.forward, dynamic=False)


@torch.no_grad()
def materialize(gpt: GPT, config: Config, layout: Layout, at: Coordinate, device: torch.device) -> None:
    """Allocate this rank's share and draw its initial values. A rehearsal on the meta device stops short of it."""
    if device.type == "meta":
        return
    home = torch.device("cpu") if config.distributed.sharding.sharding_offload else device
    gpt.to_empty(device=home)
    gpt.tie_weights()
    placed = dict(gpt.named_parameters())
    for parameter in parameters(config.model, gpt.stage):
        shard = shard_of(parameter, layout, at)
        tensor = placed[parameter.name]
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        assert tuple(local.shape) == shard.shape, f"{parameter.name}: {tuple(local.shape)} is not {shard.shape}"
        # offloaded ones too: a GPU draws in a second what takes a core minutes
        drawn = local if home == device else torch.empty_like(local, device=device)
        initialize_shard(drawn, parameter, shard.offsets, config.model, config.global_.seed)
        local.copy_(drawn)
