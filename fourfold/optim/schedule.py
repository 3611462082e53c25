"""The learning rate as a function of the update's number, counted from 1. No state."""

import math

from fourfold.config.schema import Optimizer


def learning_rate(update: int, optimizer: Optimizer) -> float:
    """Linear warm-up from zero, then the configured curve down to min_lr at decay_steps."""
    assert optimizer.decay_steps != "auto"
    warmup = optimizer.warmup_rate * optimizer.decay_steps
    if update <= warmup:
        return optimizer.max_lr * update / warmup
    if optimizer.lr_decay_style == "constant":
        return optimizer.max_lr
    if update > optimizer.decay_steps:
        return optimizer.min_lr
    progress = (update - warmup) / (optimizer.decay_steps - warmup)
    share = (1 + math.cos(math.pi * progress)) / 2 if optimizer.lr_decay_style == "cosine" else 1 - progress
    return optimizer.min_lr + (optimizer.max_lr - optimizer.min_lr) * share
