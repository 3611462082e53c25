"""Floating-point operations of training, counted as PaLM does: every matrix product of forward and backward,
attention as if it were not causal, nothing for recomputation. This is what MFU is computed from.
"""

from fourfold.config.schema import Model
from fourfold.cost.params import sizes


def forward_flops_per_token(model: Model, seq_len: int) -> int:
    hidden, ffn, vocab, _ = sizes(model)
    projections = 2 * (4 * hidden * hidden + 2 * hidden * ffn)
    attention = 2 * 2 * seq_len * hidden
    return model.num_layers * (projections + attention) + 2 * hidden * vocab


def training_flops_per_token(model: Model, seq_len: int) -> int:
    """Backward needs two products for each one of forward."""
    return 3 * forward_flops_per_token(model, seq_len)
