from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from fourfold.config.load import load_config
from fourfold.config.resolve import resolve
from fourfold.layout.layout import Layout
from fourfold.parallelize.apply import compiled_forward, parallelize
from fourfold.train.rehearse import fake_processes
from tests.tiny import random_tokens

LAYOUTS: dict[str, tuple[Layout, dict[str, str]]] = {
    "one process": (Layout(), {}),
    "sharding": (Layout(sharding=2), {"sharding_stage": "3"}),
    "mp": (Layout(mp=2), {}),
    "mp in 8 bits": (Layout(mp=2), {"use_amp": "true", "amp_dtype": "float8"}),
    "mp, sequence and sharding": (Layout(sharding=2, mp=2), {"sharding_stage": "3", "sequence_parallel": "true"}),
}


@pytest.mark.parametrize("recomputed", [None, "full", "full_attn", "core_attn"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_blocks_are_compiled_once_for_all(name: str, recomputed: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """After eight blocks that are other code each, the compiler would give up."""
    layout, more = LAYOUTS[name]
    graphs = [count_graphs(layers, layout, more, recomputed, monkeypatch) for layers in (1, 3)]
    assert graphs[0] == graphs[1] > 0


def count_graphs(
    layers: int, layout: Layout, more: dict[str, str], recomputed: str | None, monkeypatch: pytest.MonkeyPatch
) -> int:
    """In two steps of the first rank, whose exchanges with others go nowhere."""
    keys = {
        "num_layers": str(layers), "hidden_size": "32", "num_attention_heads": "4", "vocab_size": "97",
        "max_seq_len": "16", "global_batch_size": "4", "hidden_dropout_prob": "0.1", "device": "cpu", "compile": "true",
        "sharding_degree": str(layout.sharding), "mp_degree": str(layout.mp), "use_recompute": str(bool(recomputed)),
        "recompute_granularity": recomputed or "full",
    }  # fmt: skip
    config = resolve(load_config(None, list((keys | more).items())), layout.world_size, has_gpu=False)
    counter = CompileCounterWithBackend("aot_eager")
    torch.compiler.reset()
    compiled_forward.cache_clear()
    tokens = random_tokens(2, 16, 97)
    with monkeypatch.context() as patched, fake_processes(0, layout.world_size):
        patched.setattr(torch, "compile", partial(torch.compile, backend=counter))
        gpt = parallelize(config, layout, 0, torch.device("cpu"), timeout_s=60.0).parts[0]
        for _ in range(2):
            gpt(tokens, tokens, torch.arange(2)).backward()
    compiled_forward.cache_clear()
    return int(counter.frame_count)
