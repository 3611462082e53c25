"""Every parameter of a model: name, shape, kind, which dim mp splits and which part of the pipe holds it.

This table is the one description of the model's weights. The built model is tested against it, initial values, decay
groups and the mp plan are read from it, and the planner counts with it. No torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple

from fourfold.config.resolve import padded_vocab_size
from fourfold.config.schema import Model
from fourfold.layout.layout import Coordinate, Layout
from fourfold.layout.stages import PipeStage, whole_model

Kind = Literal["embedding", "matrix", "projection", "bias", "norm"]


@dataclass(frozen=True)
class Parameter:
    name: str
    shape: tuple[int, ...]
    kind: Kind
    """`projection` is a matrix that writes into the residual stream: its initial values are smaller with depth."""
    mp_dim: int | None
    """The dim that mp divides; None where every mp rank holds the whole."""

    @property
    def size(self) -> int:
        return prod(self.shape)


def sizes(model: Model) -> tuple[int, int, int, int]:
    """Hidden, feed-forward, padded vocabulary and positions of a resolved model."""
    assert model.ffn_hidden_size != "auto" and model.vocab_size != "auto" and model.max_position_embeddings != "auto"
    return model.hidden_size, model.ffn_hidden_size, padded_vocab_size(model.vocab_size), model.max_position_embeddings


def block_parameters(model: Model, layer: int) -> Iterator[Parameter]:
    hidden, ffn, _, _ = sizes(model)
    at = f"blocks.{layer}"
    yield Parameter(f"{at}.norm1.weight", (hidden,), "norm", None)
    yield Parameter(f"{at}.norm1.bias", (hidden,), "bias", None)
    yield Parameter(f"{at}.attention.qkv.weight", (3 * hidden, hidden), "matrix", 0)
    yield Parameter(f"{at}.attention.qkv.bias", (3 * hidden,), "bias", 0)
    yield Parameter(f"{at}.attention.out.weight", (hidden, hidden), "projection", 1)
    yield Parameter(f"{at}.attention.out.bias", (hidden,), "bias", None)
    yield Parameter(f"{at}.norm2.weight", (hidden,), "norm", None)
    yield Parameter(f"{at}.norm2.bias", (hidden,), "bias", None)
    yield Parameter(f"{at}.feedforward.up.weight", (ffn, hidden), "matrix", 0)
    yield Parameter(f"{at}.feedforward.up.bias", (ffn,), "bias", 0)
    yield Parameter(f"{at}.feedforward.down.weight", (hidden, ffn), "projection", 1)
    yield Parameter(f"{at}.feedforward.down.bias", (hidden,), "bias", None)


def parameters(model: Model, stage: PipeStage | None = None) -> Iterator[Parameter]:
    """The parameters of one pipe stage, of the whole model if none is named. A tied head on a stage of its own is
    listed there too, as the copy that it is."""
    stage = stage or whole_model(model.num_layers)
    hidden, _, vocab, positions = sizes(model)
    if stage.has_embedding:
        yield Parameter("embedding.tokens.weight", (vocab, hidden), "embedding", 0)
        yield Parameter("embedding.positions.weight", (positions, hidden), "embedding", None)
    for layer in stage.layers:
        yield from block_parameters(model, layer)
    if stage.has_head:
        yield Parameter("norm.weight", (hidden,), "norm", None)
        yield Parameter("norm.bias", (hidden,), "bias", None)
        if not (model.tie_word_embeddings and stage.has_embedding):
            yield Parameter("head.weight", (vocab, hidden), "embedding", 0)


def saved_name(name: str, model: Model) -> str:
    """A tied head on a pipe stage of its own is a copy: it starts as, is saved as and counts as the embedding."""
    return "embedding.tokens.weight" if name == "head.weight" and model.tie_word_embeddings else name


def count_parameters(model: Model) -> int:
    return sum(parameter.size for parameter in parameters(model))


class Shard(NamedTuple):
    """The block of a whole tensor that one rank stores."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]


def shard_of(parameter: Parameter, layout: Layout, at: Coordinate) -> Shard:
    """mp cuts first, along its dim; sharding then cuts what is left into rows, the last ranks getting fewer or none."""
    offsets, shape = [0] * len(parameter.shape), list(parameter.shape)
    if parameter.mp_dim is not None:
        shape[parameter.mp_dim] //= layout.mp
        offsets[parameter.mp_dim] = at.mp * shape[parameter.mp_dim]
    rows = -(-shape[0] // layout.sharding)
    first = min(at.sharding * rows, shape[0])
    last = min(first + rows, shape[0])
    offsets[0] += first
    shape[0] = last - first
    return Shard(tuple(offsets), tuple(shape))
