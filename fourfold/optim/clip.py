"""The one gradient norm over all axes, and what it decides: how much to clip, and whether to take the step at all."""

from collections.abc import Sequence

import torch

ROW = 2**15


def squared_norm(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Of tensors on one device, in float32."""
    if gradients[0].is_cpu:
        return torch.stack([host_squared_norm(gradient) for gradient in gradients]).sum()
    norms = torch.stack(torch._foreach_norm(list(gradients), 2, dtype=torch.float32))
    return norms.square().sum()


def host_squared_norm(gradient: torch.Tensor) -> torch.Tensor:
    """By rows of one length: PyTorch's own norm adds up a whole tensor on a CPU in float32, one by one, which loses
    percents of large ones. The number of threads changes no bit."""
    flat = gradient.reshape(-1)
    whole = flat.numel() // ROW * ROW
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, ROW), dim=1, dtype=torch.float32)
    return rows.square().sum() + torch.linalg.vector_norm(flat[whole:], dtype=torch.float32).square()


def clip_divisor(norm: torch.Tensor, grad_clip: float) -> torch.Tensor:
    """What gradients are divided by so that their norm is at most grad_clip; 0 means no limit."""
    if grad_clip == 0.0:
        return torch.ones_like(norm)
    return (norm / grad_clip).clamp(min=1.0)
