"""A trained model from a checkpoint, on one device, without its optimizer."""

import torch

from fourfold.checkpoint.paths import AnyPath
from fourfold.checkpoint.state import whole_piece
from fourfold.checkpoint.store import load_pieces, verify_checkpoint
from fourfold.checkpoint.texts import load_saved_config, load_saved_tokenizer
from fourfold.config.schema import Model
from fourfold.data.tokenizer import Tokenizer
from fourfold.model.gpt import GPT


def load_for_generation(path: AnyPath, device: torch.device) -> tuple[GPT, Model, Tokenizer]:
    checkpoint = verify_checkpoint(path)
    model = load_saved_config(checkpoint).model
    with torch.device("meta"):
        gpt = GPT(model)
    gpt.to_empty(device=device)
    gpt.tie_weights()
    load_pieces(checkpoint, {f"model.{name}": whole_piece(each.detach()) for name, each in gpt.named_parameters()})
    return gpt, model, load_saved_tokenizer(checkpoint)
