import math

import pytest
import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from fourfold.config.schema import Model
from fourfold.layout.stages import pipe_stages
from fourfold.model.gpt import GPT
from tests.tiny import built, gradients, random_tokens, tiny_model

SHARED_NAMES = {
    "embedding.tokens.weight": "transformer.wte.weight",
    "embedding.positions.weight": "transformer.wpe.weight",
    "norm.weight": "transformer.ln_f.weight",
    "norm.bias": "transformer.ln_f.bias",
}
BLOCK_NAMES = {
    "norm1": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "norm2": "ln_2",
    "feedforward.up": "mlp.c_fc",
    "feedforward.down": "mlp.c_proj",
}


def hugging_face_name(name: str) -> str:
    if name in SHARED_NAMES:
        return SHARED_NAMES[name]
    _, layer, rest = name.split(".", 2)
    part, kind = rest.rsplit(".", 1)
    return f"transformer.h.{layer}.{BLOCK_NAMES[part]}.{kind}"


def as_hugging_face(name: str, tensor: torch.Tensor, model: Model) -> torch.Tensor:
    """Our tensor in their layout: [q; k; v] and not head by head, matrices as [in, out], no padded vocabulary."""
    if name == "embedding.tokens.weight":
        return tensor[: model.vocab_size]
    if "qkv" in name:
        width = model.hidden_size // model.num_attention_heads
        by_head = tensor.reshape(model.num_attention_heads, 3, width, *tensor.shape[1:])
        tensor = by_head.transpose(0, 1).reshape(tensor.shape)
    return tensor.T if tensor.dim() == 2 and name.startswith("blocks.") else tensor


def hugging_face_twin(gpt: GPT, model: Model, attention: str) -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=model.vocab_size,
        n_positions=model.max_position_embeddings,
        n_embd=model.hidden_size,
        n_layer=model.num_layers,
        n_head=model.num_attention_heads,
        n_inner=model.ffn_hidden_size,
        activation_function="gelu_new",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        layer_norm_epsilon=1e-5,
        attn_implementation=attention,
    )
    twin = GPT2LMHeadModel(config)
    weights = {
        hugging_face_name(name): as_hugging_face(name, parameter.detach(), model)
        for name, parameter in gpt.named_parameters()
    }
    missing, unexpected = twin.load_state_dict(weights, strict=False)
    assert missing == ["lm_head.weight"] and unexpected == []  # theirs is tied as well
    return twin


def with_lively_weights(gpt: GPT, seed: int = 5) -> GPT:
    """Biases and norms away from 0 and 1, so that forgetting one of them shows."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in gpt.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return gpt


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, in units of the largest value."""
    assert found.shape == expected.shape
    return ((found - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_logits_loss_and_gradients_are_those_of_hugging_faces_gpt2(attention: str) -> None:
    model = tiny_model(ffn_hidden_size=80)
    gpt = with_lively_weights(built(model))
    twin = hugging_face_twin(gpt, model, attention)
    tokens, targets = random_tokens(3, 16, 97), random_tokens(3, 16, 97, seed=1)

    logits = gpt(tokens)
    assert logits.shape == (3, 16, 97)
    torch.testing.assert_close(logits, twin(tokens).logits, rtol=1e-5, atol=1e-5)

    loss = gpt(tokens, targets) / targets.numel()
    loss.sum().backward()
    twin_loss = F.cross_entropy(twin(tokens).logits.flatten(0, 1), targets.flatten())
    twin_loss.backward()
    torch.testing.assert_close(loss[0], twin_loss, rtol=1e-5, atol=1e-5)
    theirs = {name: parameter.grad for name, parameter in twin.named_parameters()}
    for name, grad in gradients(gpt).items():
        ours = as_hugging_face(name, grad, model)
        assert relative_error(ours, theirs.pop(hugging_face_name(name))) < 1e-5, name
    assert not theirs, "a parameter of theirs has no counterpart"


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("width", [128, 256, 512, 1024])
def test_first_loss_is_ln_v_plus_half_the_variance_of_a_logit(width: int, is_tied: bool) -> None:
    assert abs(first_loss(width, 0.02, is_tied) / expected_first_loss(width, 0.02) - 1) < 0.02


def test_a_larger_initializer_range_raises_the_first_loss_by_its_square() -> None:
    """2 % of the loss is more than all that width adds at first, so here what is added is looked at alone."""
    for std in (0.02, 0.04):
        added = first_loss(1024, std, is_tied=True, batch=32) - math.log(VOCAB)
        assert added == pytest.approx(std**2 * 1024 / 2, rel=0.15)


VOCAB = 1000  # not a multiple of 128: padding that leaked into the softmax would show as ln(1024)


def first_loss(width: int, std: float, is_tied: bool, batch: int = 16) -> float:
    model = tiny_model(
        hidden_size=width,
        num_layers=1,
        vocab_size=VOCAB,
        max_position_embeddings=64,
        initializer_range=std,
        tie_word_embeddings=is_tied,
    )
    tokens, targets = random_tokens(batch, 64, VOCAB), random_tokens(batch, 64, VOCAB, seed=1)
    with torch.no_grad():
        return built(model)(tokens, targets).item() / targets.numel()


def expected_first_loss(width: int, std: float) -> float:
    return math.log(VOCAB) + std**2 * width / 2


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_padded_vocabulary_has_no_logits_no_loss_and_no_gradient(is_tied: bool) -> None:
    model = tiny_model(vocab_size=97, tie_word_embeddings=is_tied)
    gpt = with_lively_weights(built(model))
    tokens, targets = random_tokens(2, 16, 97), random_tokens(2, 16, 97, seed=1)
    assert gpt.embedding is not None and gpt.head is not None and gpt.norm is not None
    assert gpt.head.weight.shape == (128, 32)
    assert gpt(tokens).shape == (2, 16, 97)

    loss = gpt(tokens, targets)
    loss.backward()
    found = gradients(gpt)
    gpt.zero_grad()

    # the same sum through a head that was never padded
    hidden: list[torch.Tensor] = []
    hook = gpt.norm.register_forward_hook(lambda *call: hidden.append(call[-1]))
    gpt(tokens)
    hook.remove()
    unpadded_logits = F.linear(hidden[0], gpt.head.weight[:97])
    unpadded = F.cross_entropy(unpadded_logits.flatten(0, 1), targets.flatten(), reduction="sum")
    unpadded.backward()
    torch.testing.assert_close(loss[0], unpadded, rtol=1e-6, atol=0)
    for name, grad in gradients(gpt).items():
        assert relative_error(found[name], grad) < 1e-5, name
    head = "embedding.tokens.weight" if is_tied else "head.weight"
    assert found[head][97:].eq(0).all()
    assert found[head][:97].ne(0).any(1).all()


def test_tied_means_one_tensor_and_untied_two() -> None:
    tied, untied = built(tiny_model()), built(tiny_model(tie_word_embeddings=False))
    assert tied.head is not None and tied.embedding is not None
    assert untied.head is not None and untied.embedding is not None
    assert tied.head.weight is tied.embedding.tokens.weight
    assert not torch.equal(untied.head.weight, untied.embedding.tokens.weight)


def test_no_position_sees_a_later_token() -> None:
    gpt = with_lively_weights(built(tiny_model()))
    tokens = random_tokens(1, 16, 97)
    changed = tokens.clone()
    changed[0, 9] = (changed[0, 9] + 1) % 97
    before, after = gpt(tokens), gpt(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert (before[:, 9:] != after[:, 9:]).any(-1).all()


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_pipe_stages_one_after_the_other_are_the_whole_model_bit_for_bit(num_stages: int) -> None:
    model = tiny_model(num_layers=4, hidden_dropout_prob=0.2)
    tokens, targets = random_tokens(2, 16, 97), random_tokens(2, 16, 97, seed=1)
    keys = torch.tensor([3, 4])
    x = tokens
    for stage in pipe_stages(4, num_stages):
        x = built(model, stage=stage)(x, targets if stage.has_head else None, keys)
    assert torch.equal(x, built(model)(tokens, targets, keys))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_lower_precision_flows_through_float32_weights(dtype: torch.dtype) -> None:
    gpt, exact = built(tiny_model(), compute_dtype=dtype), built(tiny_model())
    tokens, targets = random_tokens(2, 16, 97), random_tokens(2, 16, 97, seed=1)
    assert gpt(tokens).dtype == dtype
    loss = gpt(tokens, targets)
    loss.backward()
    assert loss.dtype == torch.float32
    assert {parameter.dtype for parameter in gpt.parameters()} == {torch.float32}
    assert {grad.dtype for grad in gradients(gpt).values()} == {torch.float32}
    torch.testing.assert_close(loss, exact(tokens, targets), rtol=1e-3, atol=0)
