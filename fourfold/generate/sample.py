"""Continuing a text, token by token: temperature, top-k, top-p, and a key-value cache that changes only the speed."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from fourfold.config.schema import Model
from fourfold.errors import CheckpointError
from fourfold.generate.cache import Cache
from fourfold.model.gpt import GPT


@dataclass(frozen=True)
class Sampling:
    max_new_tokens: int = 200
    temperature: float = 1.0
    """0 always takes the likeliest token."""
    top_k: int = 0
    """Choose among the k likeliest tokens; 0 among all."""
    top_p: float = 1.0
    """Choose among the fewest tokens that together have this probability."""
    seed: int = 1234
    use_cache: bool = True


def pick_token(logits_v: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    logits_v = logits_v.float().cpu()  # drawn on the host, so that a seed means the same on every device
    if not logits_v.isfinite().all():
        raise CheckpointError(
            "the model's logits are not finite, so its training has diverged; take an earlier checkpoint, or train "
            "with a smaller optimizer.max_lr"
        )
    if sampling.temperature == 0.0:
        return int(logits_v.argmax())
    logits_v = (logits_v - logits_v.max()) / sampling.temperature
    if 0 < sampling.top_k < len(logits_v):
        logits_v = logits_v.masked_fill(logits_v < logits_v.topk(sampling.top_k).values[-1], -torch.inf)
    probs_v = logits_v.softmax(0)
    if sampling.top_p < 1.0:
        sorted_v, order_v = probs_v.sort(descending=True)
        before_v = sorted_v.cumsum(0) - sorted_v
        before_v[0] = -1.0  # the likeliest token always stays
        probs_v = probs_v.index_fill(0, order_v[before_v >= sampling.top_p], 0.0)
    return int(torch.multinomial(probs_v, 1, generator=generator))


@torch.inference_mode()
def generate_tokens(
    gpt: GPT, model: Model, prompt: list[int], sampling: Sampling, vocab_size: int | None = None
) -> Iterator[int]:
    """New tokens one at a time. When the positions run out, the oldest tokens are forgotten, half a window at once.

    `vocab_size` is the tokenizer's: a model may have room for more tokens than there are words for.
    """
    assert prompt and isinstance(model.max_position_embeddings, int)
    gpt.eval()
    window = model.max_position_embeddings
    device = next(gpt.parameters()).device
    generator = torch.Generator().manual_seed(sampling.seed)
    seen = prompt[-window:]
    cache: Cache | None = None
    for _ in range(sampling.max_new_tokens):
        if len(seen) > window:
            seen, cache = seen[-(window // 2) - 1 :], None
        if cache is None or not sampling.use_cache:
            cache = Cache(model, 1, window, device, gpt.compute_dtype)
        new = torch.tensor([seen[cache.length :]], device=device)
        logits_bv = gpt(new, cache=cache)[:, -1]
        token = pick_token(logits_bv[0, :vocab_size], sampling, generator)
        seen.append(token)
        yield token
