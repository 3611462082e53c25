"""From a config to a model that is ready to train: what is done to it, in the order in which it must be done."""

import torch

from fourfold.config.schema import Config
from fourfold.layout.stages import whole_model
from fourfold.model.gpt import GPT
from fourfold.model.init import initialize
from fourfold.parallelize.precision import compute_dtype
from fourfold.parallelize.recompute import apply_recompute


def build_model(config: Config, device: torch.device) -> GPT:
    stage = whole_model(config.model.num_layers)
    with torch.device("meta"):  # nothing is allocated until it is known which part is ours
        gpt = GPT(config.model, compute_dtype(config.engine), stage)
    apply_recompute(gpt, config.model)
    if config.engine.compile:
        gpt.compile(dynamic=False)
    gpt.to_empty(device=device)
    gpt.tie_weights()
    initialize(gpt, config.model, stage, config.global_.seed)
    return gpt
