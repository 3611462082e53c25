import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fourfold.config.schema import Model
from fourfold.cost.flops import forward_flops_per_token, training_flops_per_token
from fourfold.cost.hardware import peak_flops
from tests.tiny import built, random_tokens, tiny_model

MODELS = {
    "plain": tiny_model(),
    "wide feed-forward": tiny_model(ffn_hidden_size=200),
    "untied, one layer": tiny_model(num_layers=1, tie_word_embeddings=False),
    "large vocabulary": tiny_model(vocab_size=1000),
}


# torch's counter knows no FLOP of the fused attention of a CPU, so attention is made of plain products here
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("seq_len", [5, 16])
def test_flops_are_those_that_torch_counts(model: Model, seq_len: int) -> None:
    gpt, tokens = built(model), random_tokens(3, seq_len, 97)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        gpt(tokens, tokens).sum().backward()
    assert counter.get_total_flops() == 3 * seq_len * training_flops_per_token(model, seq_len)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        gpt(tokens, tokens)
    assert counter.get_total_flops() == 3 * seq_len * forward_flops_per_token(model, seq_len)


def test_a_large_model_needs_about_six_flops_per_parameter_and_token() -> None:
    model = tiny_model(hidden_size=12288, num_layers=96, num_attention_heads=96, vocab_size=50304)
    assert training_flops_per_token(model, 2048) == pytest.approx(6 * 174.6e9, rel=0.05)


def test_a_device_is_found_by_the_name_it_reports() -> None:
    assert peak_flops("NVIDIA H200") == 989e12
    assert peak_flops("NVIDIA A100-SXM4-40GB") == 312e12
    assert peak_flops("NVIDIA A10G") == 70e12
    assert peak_flops("NVIDIA L40") != peak_flops("NVIDIA L4")
    assert peak_flops("NVIDIA L40S") == 362e12
    assert peak_flops("NVIDIA L4") == 121e12
    assert peak_flops("Radeon 9700") is None
