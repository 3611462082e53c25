"""Whether a tensor can be handed to Triton, and what Triton counts in."""

from importlib.util import find_spec

import torch

HAS_TRITON = find_spec("triton") is not None


def is_fast(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and HAS_TRITON


def power_of_two(size: int) -> int:
    """The smallest that is not below."""
    return 1 << (size - 1).bit_length()
