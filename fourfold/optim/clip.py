"""The one gradient norm over all axes, and what it decides: how much to clip, and whether to take the step at all."""

from collections.abc import Sequence

import torch


def squared_norm(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Of tensors on one device, in float32, without a pass over memory for each."""
    norms = torch.stack(torch._foreach_norm(list(gradients), 2, dtype=torch.float32))
    return norms.square().sum()


def clip_divisor(norm: torch.Tensor, grad_clip: float) -> torch.Tensor:
    """What gradients are divided by so that their norm is at most grad_clip; 0 means no limit."""
    if grad_clip == 0.0:
        return torch.ones_like(norm)
    return (norm / grad_clip).clamp(min=1.0)
