"""The GPT of GPT-2 and GPT-3, top to bottom: blocks of attention and feed-forward on a residual stream, norms before
each, learned positions, a head that may share the token embedding's weight.

One model serves every precision and layout. Weights are float32 and are cast to the dtype of what flows through them.
A pipe stage is this class with parts absent; mp and sharding are applied from outside (parallelize/) and find the
parts by name. Shapes: b batch, t time (sequence), d hidden, f feed-forward, h heads, k head width, v vocabulary.
"""

from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import nn

from fourfold.config.schema import Model
from fourfold.cost.params import sizes
from fourfold.layout.stages import PipeStage, whole_model
from fourfold.model.dropout import Dropout
from fourfold.model.linear import (
    Float8Head,
    Float8Product,
    PlainHead,
    multiply,
    multiply_then_gelu,
    multiply_then_split,
    split_heads,
)
from fourfold.model.loss import summed_cross_entropy
from fourfold.model.norm import LayerNorm, Nothing


class KeyValueCache(Protocol):
    """What attention needs of a cache (generate/cache.py has it)."""

    length: int

    def extend(self, layer: int, k_bhtk: torch.Tensor, v_bhtk: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...


class Linear(nn.Linear):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.float8: Float8Product | None = None  # set where products are in 8 bits (parallelize/precision.py)

    def forward(self, x: torch.Tensor) -> Any:
        return self.multiply(x, self.weight, self.bias)

    def multiply(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        """With a weight that may be a share of this layer's."""
        return self.float8(x, weight, bias) if self.float8 is not None else multiply(x, weight, bias)


class HeadsLinear(Linear):
    """Gives queries, keys and values. The rows of its weight are interleaved head by head, so that cutting the weight's
    first dim into equal parts gives each mp rank whole heads: their number is read off the activations."""

    def __init__(self, inputs: int, head_width: int) -> None:
        super().__init__(inputs, 3 * inputs)
        self.head_width = head_width

    def multiply(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        if self.float8 is not None:
            return split_heads(self.float8(x, weight, bias), self.head_width)
        return multiply_then_split(x, weight, cast(torch.Tensor, bias), self.head_width)


class GeluLinear(Linear):
    """With gelu after it; in 8 bits the next product does that, in the pass that casts what goes into it."""

    def multiply(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        if self.float8 is not None:
            return self.float8(x, weight, bias)
        return multiply_then_gelu(x, weight, cast(torch.Tensor, bias))


class CoreAttention(nn.Module):
    """The attention product alone: what `recompute_granularity: core_attn` computes again."""

    def __init__(self, dropout_p: float) -> None:
        super().__init__()
        self.dropout_p = dropout_p

    def forward(
        self,
        q_bhtk: torch.Tensor,
        k_bhtk: torch.Tensor,
        v_bhtk: torch.Tensor,
        may_look_b1tt: torch.Tensor | None = None,
    ) -> torch.Tensor:
        dtype = q_bhtk.dtype
        if q_bhtk.device.type == "cpu":  # where half precision takes ten times as long here, in backward
            q_bhtk, k_bhtk, v_bhtk = q_bhtk.float(), k_bhtk.float(), v_bhtk.float()
        new, seen = q_bhtk.shape[2], k_bhtk.shape[2]
        if may_look_b1tt is None and 1 < new < seen:
            may_look_b1tt = torch.ones(new, seen, dtype=torch.bool, device=q_bhtk.device).tril(seen - new)
        y_bhtk = F.scaled_dot_product_attention(
            q_bhtk,
            k_bhtk,
            v_bhtk,
            attn_mask=may_look_b1tt,
            dropout_p=self.dropout_p if self.training else 0.0,
            is_causal=may_look_b1tt is None and new == seen,  # a single new token may look at all before it
        )
        return y_bhtk.to(dtype)


class Attention(nn.Module):
    def __init__(self, model: Model, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.qkv = HeadsLinear(model.hidden_size, model.hidden_size // model.num_attention_heads)
        self.core = CoreAttention(model.attention_probs_dropout_prob)
        self.out = Linear(model.hidden_size, model.hidden_size)

    def forward(
        self, x_btd: torch.Tensor, cache: KeyValueCache | None = None, may_look_b1tt: torch.Tensor | None = None
    ) -> torch.Tensor:
        q_bhtk, k_bhtk, v_bhtk = self.qkv(x_btd)
        if cache is not None:
            k_bhtk, v_bhtk = cache.extend(self.layer, k_bhtk, v_bhtk)
        y_bhtk = self.core(q_bhtk, k_bhtk, v_bhtk, may_look_b1tt)
        return self.out(y_bhtk.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        hidden, ffn, _, _ = sizes(model)
        self.up = GeluLinear(hidden, ffn)
        self.down = Linear(ffn, hidden)

    def forward(self, x_btd: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x_btd))


class Block(nn.Module):
    def __init__(self, model: Model, layer: int) -> None:
        super().__init__()
        self.norm1 = LayerNorm(model.hidden_size)
        self.attention = Attention(model, layer)
        self.dropout1 = Dropout(model.hidden_dropout_prob, site=1)
        self.norm2 = LayerNorm(model.hidden_size)
        self.feedforward = FeedForward(model)
        self.dropout2 = Dropout(model.hidden_dropout_prob, site=2)

    def forward(
        self,
        x_btd: torch.Tensor,
        late_btd: torch.Tensor | None,
        sample_keys_b: torch.Tensor | None = None,
        cache: KeyValueCache | None = None,
        may_look_b1tt: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes the residual stream and what is still to be added to it, and gives the same: whoever reads the stream
        next does both in one pass."""
        x_btd, normed_btd = self.norm1.fork(x_btd, late_btd)
        late_btd = self.dropout1(self.attention(normed_btd, cache, may_look_b1tt), sample_keys_b)
        x_btd, normed_btd = self.norm2.fork(x_btd, late_btd)
        return x_btd, self.dropout2(self.feedforward(normed_btd), sample_keys_b)


class Embedding(nn.Module):
    """Tokens and learned positions, each cast before they are added, so that rounding is the same on every layout."""

    def __init__(self, model: Model, compute_dtype: torch.dtype) -> None:
        super().__init__()
        hidden, _, vocab, positions = sizes(model)
        self.compute_dtype = compute_dtype
        self.tokens = nn.Embedding(vocab, hidden)
        self.positions = nn.Embedding(positions, hidden)
        self.dropout = Dropout(model.hidden_dropout_prob, site=0)

    def forward(
        self,
        tokens_bt: torch.Tensor,
        sample_keys_b: torch.Tensor | None,
        first_position: int,
        positions_bt: torch.Tensor | None = None,
    ) -> torch.Tensor:
        positions = positions_bt  # (t) unless they start again within the sequence
        if positions is None:
            positions = torch.arange(first_position, first_position + tokens_bt.shape[1], device=tokens_bt.device)
        x_btd = self.tokens(tokens_bt).to(self.compute_dtype) + self.positions(positions).to(self.compute_dtype)
        return self.dropout(x_btd, sample_keys_b)


class Head(nn.Module):
    """Logits, or, where targets are given, the summed loss without ever holding all logits."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        hidden, _, vocab, _ = sizes(model)
        assert model.vocab_size != "auto"
        self.vocab_size = model.vocab_size
        self.weight = nn.Parameter(torch.empty(vocab, hidden))
        self.products: type[PlainHead | Float8Head] = PlainHead

    def forward(
        self, x_btd: torch.Tensor, targets_bt: torch.Tensor | None, loss_weight: torch.Tensor | None = None
    ) -> torch.Tensor:
        if targets_bt is not None:
            return summed_cross_entropy(
                x_btd, self.weight, targets_bt, self.vocab_size, products=self.products, weight=loss_weight
            )
        return F.linear(x_btd, self.weight.to(x_btd.dtype))[..., : self.vocab_size]


def block_causal(documents_bt: torch.Tensor) -> torch.Tensor:
    """Which positions each may look at: those before it in the same document. One byte per pair, for all layers."""
    is_same_b1tt = documents_bt[:, None, :, None] == documents_bt[:, None, None, :]
    return is_same_b1tt.tril()


class GPT(nn.Module):
    """The part of a GPT that one pipe stage holds; all of it by default.

    The first stage takes tokens, the others the hidden states of the stage before. The last gives the loss summed over
    the targets, of shape (1,), or logits where there are no targets; the others give hidden states.
    """

    def __init__(
        self, model: Model, compute_dtype: torch.dtype = torch.float32, stage: PipeStage | None = None
    ) -> None:
        super().__init__()
        stage = stage or whole_model(model.num_layers)
        self.stage = stage
        self.compute_dtype = compute_dtype
        self.is_tied = model.tie_word_embeddings and stage.has_embedding and stage.has_head
        self.embedding = Embedding(model, compute_dtype) if stage.has_embedding else None
        # keyed by the layer's number in the whole model, so that names never depend on the layout
        self.blocks = nn.ModuleDict({str(layer): Block(model, layer) for layer in stage.layers})
        self.norm = LayerNorm(model.hidden_size) if stage.has_head else None
        self.head = Head(model) if stage.has_head else None
        self.tie_weights()

    def tie_weights(self) -> None:
        """Again after anything that replaces parameters: moving from the meta device does, and so does mp."""
        if self.is_tied:
            assert self.head is not None and self.embedding is not None
            self.head.weight = cast(nn.Parameter, self.embedding.tokens.weight)

    def forward(
        self,
        x: torch.Tensor,
        targets_bt: torch.Tensor | None = None,
        sample_keys_b: torch.Tensor | None = None,
        cache: KeyValueCache | None = None,
        positions_bt: torch.Tensor | None = None,
        documents_bt: torch.Tensor | None = None,
        loss_weight: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`positions_bt` where they are not 0, 1, 2 and so on; `documents_bt`, a number per document, where attention
        is to stay within documents; `loss_weight`, what gradients are weighted by (see `summed_cross_entropy`)."""
        if self.embedding is not None:
            x = self.embedding(x, sample_keys_b, 0 if cache is None else cache.length, positions_bt)
        may_look_b1tt = None if documents_bt is None else block_causal(documents_bt)
        late = Nothing.apply(x)
        for layer, block in zip(self.stage.layers, self.blocks.values(), strict=True):
            # told from outside which layer it is, a block is compiled once for all
            keys_b = None if sample_keys_b is None else sample_keys_b + 2 * layer
            x, late = block(x, late, keys_b, cache, may_look_b1tt)
        x = x + late
        if self.head is not None:
            assert self.norm is not None
            x = self.head(self.norm(x), targets_bt, loss_weight)
        return x
