"""The one gradient norm, and what it decides: how much to clip, and whether to take the step at all."""

from collections.abc import Sequence

import torch


def global_norm(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.get_total_norm(grads)


def clip_divisor(norm: torch.Tensor, grad_clip: float) -> torch.Tensor:
    """What gradients are divided by so that their norm is at most grad_clip; 0 means no limit."""
    if grad_clip == 0.0:
        return torch.ones_like(norm)
    return (norm / grad_clip).clamp(min=1.0)
