"""Tensor parallelism (mp): every layer's large weights cut between ranks, from outside the model.

The plan is one table: what a module's name ends in decides how it computes on its share. Weights become DTensors, so
that sharding and checkpoints know the whole tensor; the computation itself is on plain local tensors with the
collectives written out. With `sequence_parallel` activations between the cut layers are cut too, along the sequence.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import _functional_collectives as funcol
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from fourfold.compat import all_gather, reduce_scatter
from fourfold.config.schema import Model
from fourfold.cost.params import parameters
from fourfold.kernels.cross_entropy import RowStatistics
from fourfold.model.dropout import Dropout
from fourfold.model.gpt import GPT
from fourfold.model.loss import Vocabulary, summed_cross_entropy
from fourfold.parallelize.forward import Forward, replace_forward

SEQUENCE_DIM = 1


@dataclass(frozen=True)
class Region:
    """The mp ranks that hold shares of the same layers, and this rank's place among them."""

    group: dist.ProcessGroup
    rank: int
    degree: int
    sequence_parallel: bool

    def share(self, length: int) -> range:
        """This rank's part of a length that the degree divides."""
        size = length // self.degree
        return range(self.rank * size, (self.rank + 1) * size)


class _Collective(torch.autograd.Function):
    """A collective whose gradient is another one: each pair is listed below."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, forward: "Operation", backward: "Operation", group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.operation, ctx.group = backward, group
        return forward(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.operation(grad, ctx.group), None, None, None


Operation = Callable[[torch.Tensor, dist.ProcessGroup], torch.Tensor]


def _keep(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return x.view_as(x)


def _sum(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return funcol.wait_tensor(funcol.all_reduce(x.contiguous(), "sum", group))


def _gather(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return all_gather(x.contiguous(), SEQUENCE_DIM, group)


def _sum_and_scatter(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return reduce_scatter(x.contiguous(), SEQUENCE_DIM, group)


def enter(x: torch.Tensor, region: Region) -> torch.Tensor:
    """What all ranks hold (or hold sequence shares of) goes into layers that each holds a share of."""
    pair = (_gather, _sum_and_scatter) if region.sequence_parallel else (_keep, _sum)
    return _Collective.apply(x, *pair, region.group)


def leave(x: torch.Tensor, region: Region) -> torch.Tensor:
    """Each rank's partial result becomes the sum, whole or in sequence shares."""
    pair = (_sum_and_scatter, _gather) if region.sequence_parallel else (_sum, _keep)
    return _Collective.apply(x, *pair, region.group)


def local(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's share of a parameter; gradients flow back into the whole."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


# How each kind of module computes on its share: its `forward`, on a module that has been told its region.


def column_linear(module: Any, x: torch.Tensor) -> Any:
    """Holds some of the output features, of which attention's layer makes heads."""
    return module.multiply(enter(x, module.region), local(module.weight), local(module.bias))


def row_linear(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Holds some of the input features; the bias, which every rank has, is added once, to the sum."""
    return leave(module.multiply(x, local(module.weight), None), module.region) + module.bias.to(x.dtype)


def vocabulary_embedding(module: Any, tokens_bt: torch.Tensor) -> torch.Tensor:
    """Holds the rows of some tokens; the others' come from the ranks that have them, through the sum."""
    rows = module.region.share(module.num_embeddings)
    is_elsewhere = (tokens_bt < rows.start) | (tokens_bt >= rows.stop)
    x_btd = F.embedding((tokens_bt - rows.start).masked_fill(is_elsewhere, 0), local(module.weight))
    return leave(x_btd.masked_fill(is_elsewhere[..., None], 0.0), module.region)


def positions_share(module: Any, positions: torch.Tensor) -> torch.Tensor:
    """Whole on every rank; with sequence_parallel a rank needs only the positions of its share. (t) or (b, t)."""
    if module.region.sequence_parallel:
        share = module.region.share(positions.shape[-1])
        positions = positions[..., share.start : share.stop]
    return F.embedding(positions, module.weight)


def vocabulary_head(
    module: Any,
    x_btd: torch.Tensor,
    targets_bt: torch.Tensor | None,
    loss_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """Holds the logits of some tokens; only three numbers per position are ever exchanged for the loss."""
    assert targets_bt is not None, "a model under mp gives losses, not logits"
    vocabulary = SharedVocabulary(module.region, module.weight.shape[0])
    x_btd, weight_vd = enter(x_btd, module.region), local(module.weight)
    return summed_cross_entropy(
        x_btd, weight_vd, targets_bt, module.vocab_size, vocabulary, module.products, loss_weight
    )


class SharedVocabulary(Vocabulary):
    def __init__(self, region: Region, size: int) -> None:
        self.first = region.share(size).start
        self.group = region.group

    def merge(self, statistics: RowStatistics) -> RowStatistics:
        top_n, sum_n, picked_n = statistics
        highest_n = funcol.wait_tensor(funcol.all_reduce(top_n, "max", self.group))
        sums_2n = torch.stack((sum_n * (top_n - highest_n).exp(), picked_n))
        return RowStatistics(highest_n, *_sum(sums_2n, self.group))


MP_PLAN: dict[str, Forward | None] = {
    "embedding.tokens": vocabulary_embedding,
    "embedding.positions": positions_share,
    "attention.qkv": column_linear,
    "attention.out": row_linear,
    "feedforward.up": column_linear,
    "feedforward.down": row_linear,
    "norm1": None,  # whole on every rank, computes as it stands
    "norm2": None,
    "norm": None,
    "head": vocabulary_head,
}


def plan_row(module_name: str) -> str:
    """The one row of the plan for a module, by the end of its name."""
    rows = [row for row in MP_PLAN if module_name == row or module_name.endswith("." + row)]
    assert len(rows) == 1, f"{module_name} is matched by {rows}"
    return rows[0]


def apply_tensor(gpt: GPT, model: Model, mp_mesh: DeviceMesh, sequence_parallel: bool, seq_len: int) -> None:
    if mp_mesh.size() == 1:
        return
    region = Region(mp_mesh.get_group(), mp_mesh.get_local_rank(), mp_mesh.size(), sequence_parallel)
    for parameter in parameters(model, gpt.stage):
        if parameter.mp_dim is not None:
            module_name, _, leaf = parameter.name.rpartition(".")
            module = gpt.get_submodule(module_name)
            module.register_parameter(leaf, share_parameter(getattr(module, leaf), parameter.mp_dim, mp_mesh))
    gpt.tie_weights()
    for name, module in gpt.named_modules():
        compute = MP_PLAN[plan_row(name)] if list(module.parameters(recurse=False)) else None
        if compute is not None:
            module.region = region
            replace_forward(module, compute)
    if sequence_parallel:
        for module in gpt.modules():
            if isinstance(module, Dropout):
                module.first_position = region.share(seq_len).start


def share_parameter(whole: nn.Parameter, dim: int, mp_mesh: DeviceMesh) -> nn.Parameter:
    """A parameter on the meta device, as this rank's share of it."""
    share = whole.detach().tensor_split(mp_mesh.size(), dim)[mp_mesh.get_local_rank()].contiguous()
    placed = DTensor.from_local(share, mp_mesh, [Shard(dim)], run_check=False, shape=whole.shape, stride=whole.stride())
    return nn.Parameter(placed)


def sum_replicated_gradients(gradients: dict[str, torch.Tensor], model: Model, region_group: dist.ProcessGroup) -> None:
    """With sequence_parallel each rank has seen its share of the sequence only, so gradients of what every rank holds
    whole (norms, positions, the biases after a sum) are partial. One collective for all of them."""
    whole = [gradients[p.name] for p in parameters(model) if p.mp_dim is None and p.name in gradients]
    flat = torch.cat([gradient.flatten() for gradient in whole])
    dist.all_reduce(flat, group=region_group)
    for gradient, summed in zip(whole, flat.split([gradient.numel() for gradient in whole]), strict=True):
        gradient.copy_(summed.view_as(gradient))
