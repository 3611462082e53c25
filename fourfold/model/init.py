"""Initial weights: each drawn from (seed, parameter name) and its place in the whole tensor, whatever the layout."""

import math

import torch

from fourfold.config.schema import Model
from fourfold.cost.params import Parameter, saved_name
from fourfold.model.stateless import key_of, normal_


def initial_std(parameter: Parameter, model: Model) -> float:
    """Projections into the residual stream start smaller, so that its variance does not grow with depth."""
    if parameter.kind == "projection":
        return model.initializer_range / math.sqrt(2 * model.num_layers)
    return model.initializer_range


@torch.no_grad()
def initialize_shard(
    shard: torch.Tensor, parameter: Parameter, offsets: tuple[int, ...], model: Model, seed: int
) -> None:
    """Fill the block of a parameter that begins at `offsets` of the whole tensor."""
    if parameter.kind == "norm":
        shard.fill_(1.0)
    elif parameter.kind == "bias":
        shard.zero_()
    else:
        rows = range(offsets[0], offsets[0] + shard.shape[0])
        columns = range(offsets[1], offsets[1] + shard.shape[1])
        key = key_of(seed, saved_name(parameter.name, model))
        normal_(shard, key, initial_std(parameter, model), rows, columns)
