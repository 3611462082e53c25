"""AdamW's update of one tensor by Triton. The plain version is PyTorch's own fused AdamW, which moves the same bytes a
third slower; optim/adamw.py chooses between them."""

import torch

from fourfold.kernels.available import HAS_TRITON

if HAS_TRITON:
    from fourfold.kernels import code


def update_(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    mean: torch.Tensor,
    square: torch.Tensor,
    numbers: torch.Tensor,
    betas: tuple[float, float],
    epsilon: float,
    decay: float,
) -> None:
    """`numbers`, on the device: the divisor of gradients, the learning rate, the corrections 1 - beta ** step of both
    moments, and 1 where nothing is to happen."""
    size, block = weight.numel(), 1024
    if not size:  # a rank may have no share of a small tensor
        return
    code.adamw_update[(-(-size // block),)](
        weight, gradient, mean, square, numbers, size, *betas, epsilon, decay, BLOCK=block
    )
