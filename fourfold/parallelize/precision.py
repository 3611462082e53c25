"""The dtype that flows through the model. Weights, gradients and optimizer state are float32 whatever it is."""

import torch

from fourfold.config.schema import Engine

AMP_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def compute_dtype(engine: Engine) -> torch.dtype:
    assert engine.use_amp != "auto"
    return AMP_DTYPES[engine.amp_dtype] if engine.use_amp else torch.float32


def has_loss_scale(engine: Engine) -> bool:
    """float16 underflows without one; the other dtypes have float32's range."""
    return compute_dtype(engine) == torch.float16
