"""Recomputation: forget activations in forward, make them again in backward. Gradients do not change by a bit."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fourfold.config.schema import Model
from fourfold.model.gpt import GPT, Block
from fourfold.parallelize.forward import Forward, replace_forward

# What is computed again, by the word in the config.
GRANULARITIES: dict[str, Callable[[Block], nn.Module]] = {
    "full": lambda block: block,
    "full_attn": lambda block: block.attention,
    "core_attn": lambda block: block.attention.core,
}


def apply_recompute(gpt: GPT, model: Model) -> None:
    if not model.use_recompute:
        return
    # The generators' state is saved and put back only where something draws from them: hidden dropout does not.
    draws = model.attention_probs_dropout_prob > 0.0
    for block in gpt.blocks.values():
        assert isinstance(block, Block)
        part = GRANULARITIES[model.recompute_granularity](block)
        replace_forward(part, forward_again(type(part), draws))  # type: ignore[arg-type]


@cache
def forward_again(kind: type[nn.Module], draws: bool) -> Forward:
    again = partial(checkpoint, use_reentrant=False, preserve_rng_state=draws)

    def forward(module: nn.Module, *inputs: Any) -> Any:
        return again(partial(kind.forward, module), *inputs)

    def forward_block(block: Block, x: torch.Tensor, late: torch.Tensor, *rest: Any) -> Any:
        """What a block takes is kept for backward: one tensor then, not two."""
        return forward(block, x + late, None, *rest)

    return forward_block if issubclass(kind, Block) else forward
