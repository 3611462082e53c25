"""Recomputation: forget activations in forward, make them again in backward. Gradients do not change by a bit."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fourfold.config.schema import Model
from fourfold.model.gpt import GPT, Block

# What is computed again, by the word in the config.
GRANULARITIES: dict[str, Callable[[Block], nn.Module]] = {
    "full": lambda block: block,
    "full_attn": lambda block: block.attention,
    "core_attn": lambda block: block.attention.core,
}


def apply_recompute(gpt: GPT, model: Model) -> None:
    if not model.use_recompute:
        return
    for block in gpt.blocks.values():
        assert isinstance(block, Block)
        part = GRANULARITIES[model.recompute_granularity](block)
        # Replacing forward, not wrapping the module, keeps every parameter's name. The generators' state is saved and
        # put back only where something draws from them: hidden dropout does not.
        again = partial(
            checkpoint,
            part.forward,
            use_reentrant=False,
            preserve_rng_state=model.attention_probs_dropout_prob > 0.0,
        )
        part.forward = partial(added_first, again) if part is block else again


def added_first(forward: Callable[..., Any], x: torch.Tensor, late: torch.Tensor, *rest: Any) -> Any:
    """What a block takes is kept for backward: one tensor then, not two."""
    return forward(x + late, None, *rest)
