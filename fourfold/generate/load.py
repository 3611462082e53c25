"""A trained model from a checkpoint, on one device, without its optimizer."""

from pathlib import Path

import torch

from fourfold.checkpoint.store import load_tensors, verify_checkpoint
from fourfold.config.load import load_config
from fourfold.config.schema import Model
from fourfold.data.tokenizer import Tokenizer, load_tokenizer
from fourfold.model.gpt import GPT


def load_for_generation(checkpoint: Path, device: torch.device) -> tuple[GPT, Model, Tokenizer]:
    verify_checkpoint(checkpoint)
    model = load_config(checkpoint / "config.yaml").model
    with torch.device("meta"):
        gpt = GPT(model)
    gpt.to_empty(device=device)
    gpt.tie_weights()
    load_tensors(checkpoint, {f"model.{name}": parameter.detach() for name, parameter in gpt.named_parameters()})
    return gpt, model, load_tokenizer(checkpoint / "tokenizer.json")
