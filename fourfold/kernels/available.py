"""Whether a tensor can be handed to Triton."""

from importlib.util import find_spec

import torch

HAS_TRITON = find_spec("triton") is not None


def is_fast(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and HAS_TRITON
