"""The dtype that flows through the model, and which products are computed in 8 bits. Weights, gradients and optimizer
state are float32 whatever it is."""

from typing import cast

import torch

from fourfold.config.resolve import accumulation
from fourfold.config.schema import Config, Engine
from fourfold.cost.sharding import is_sharded, sharding_stage
from fourfold.errors import ConfigError
from fourfold.layout.layout import Layout
from fourfold.model.gpt import GPT, Block, Linear
from fourfold.model.linear import Float8Head, Float8Product
from fourfold.parallelize.tensor import local

AMP_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float8": torch.bfloat16}

FLOAT8_CAPABILITY = (8, 9)
"""The first GPUs with units for 8-bit matrices: Ada, then Hopper."""


def compute_dtype(engine: Engine) -> torch.dtype:
    assert engine.use_amp != "auto"
    return AMP_DTYPES[engine.amp_dtype] if engine.use_amp else torch.float32


def has_loss_scale(engine: Engine) -> bool:
    """float16 underflows without one; the other dtypes have float32's range."""
    return compute_dtype(engine) == torch.float16


def is_float8(engine: Engine) -> bool:
    return bool(engine.use_amp) and engine.amp_dtype == "float8"


def check_float8(device: torch.device) -> None:
    """On a CPU 8-bit products are imitated, slowly but faithfully; a GPU without the units would only fail."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < FLOAT8_CAPABILITY:
        raise ConfigError(
            f"engine.amp_dtype = float8 needs a GPU with 8-bit matrix units, of compute capability 8.9 or newer; "
            f"{torch.cuda.get_device_name(device)} has none, so write bfloat16"
        )


def apply_float8(gpt: GPT, config: Config, layout: Layout, device: torch.device) -> None:
    if not is_float8(config.engine):
        return
    check_float8(device)
    excepted = config.engine.float8_except
    wide = {0: "first" in excepted, config.model.num_layers - 1: "last" in excepted}
    frees_weight = is_sharded(config, layout) and sharding_stage(config, layout).frees_after_forward
    for layer in gpt.stage.layers:
        if wide.get(layer):
            continue
        block = cast(Block, gpt.blocks[str(layer)])
        for linear in (block.attention.qkv, block.attention.out, block.feedforward.up, block.feedforward.down):
            has_gelu = linear is block.feedforward.down
            # attention keeps its own output for backward, and gelu its input
            keeps_input = has_gelu or linear is block.attention.out
            linear.float8 = Float8Product(has_gelu, keeps_input, frees_weight)
    if gpt.head is not None and "head" not in excepted:
        gpt.head.products = Float8Head


def keeps_casts(config: Config, layout: Layout) -> bool:
    """With one micro batch the casts may as well be made in it; gathered weights are not at hand before it."""
    return is_float8(config.engine) and accumulation(config) > 1 and not is_sharded(config, layout)


def keep_casts(gpt: GPT) -> None:
    """Cast each weight once for all micro batches of a step, or of an evaluation's batch."""
    for module in gpt.modules():
        if isinstance(module, Linear) and module.float8 is not None:
            module.float8.keep(local(module.weight))
