"""Initial weights: each drawn from (seed, parameter name) and its place in the whole tensor, whatever the layout."""

import math

import torch
from torch import nn

from fourfold.config.schema import Model
from fourfold.cost.params import Parameter, parameters
from fourfold.layout.stages import PipeStage
from fourfold.model.stateless import key_of, normal_


def initial_std(parameter: Parameter, model: Model) -> float:
    """Projections into the residual stream start smaller, so that its variance does not grow with depth."""
    if parameter.kind == "projection":
        return model.initializer_range / math.sqrt(2 * model.num_layers)
    return model.initializer_range


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
        # a tied head on a stage of its own must start as the embedding that it copies
        is_tied_copy = parameter.name == "head.weight" and model.tie_word_embeddings
        name = "embedding.tokens.weight" if is_tied_copy else parameter.name
        normal_(shard, key_of(seed, name), initial_std(parameter, model), rows, columns)


def initialize(module: nn.Module, model: Model, stage: PipeStage, seed: int) -> None:
    """Fill all parameters of an unsharded model or pipe stage."""
    by_name = dict(module.named_parameters())
    with torch.no_grad():
        for parameter in parameters(model, stage):
            initialize_shard(by_name[parameter.name], parameter, (0,) * len(parameter.shape), model, seed)
