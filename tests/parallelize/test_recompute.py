import itertools

import pytest
import torch

from fourfold.config.schema import Model
from fourfold.model.gpt import GPT, Block, CoreAttention
from fourfold.parallelize.forward import replace_forward
from fourfold.parallelize.recompute import GRANULARITIES, apply_recompute
from tests.tiny import built, gradients, random_tokens, tiny_model

DROPOUTS = {
    "no dropout": {},
    "hidden dropout": {"hidden_dropout_prob": 0.2},
    "attention dropout": {"attention_probs_dropout_prob": 0.2},
    "both dropouts": {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.2},
}


def trained_step(model: Model, granularity: str | None, dtype: torch.dtype = torch.float32) -> tuple[GPT, torch.Tensor]:
    """Loss and gradients of one batch, as two micro batches so that a generator's state matters between them."""
    gpt = built(model, compute_dtype=dtype)
    if granularity:
        apply_recompute(gpt, model.model_copy(update={"use_recompute": True, "recompute_granularity": granularity}))
    tokens, targets = random_tokens(4, 16, 97), random_tokens(4, 16, 97, seed=1)
    keys = torch.tensor([11, 22, 33, 44])
    torch.manual_seed(5)
    losses = []
    for rows in (slice(0, 2), slice(2, 4)):
        loss = gpt(tokens[rows], targets[rows], keys[rows])
        loss.backward()
        losses.append(loss.detach())
    return gpt, torch.stack(losses)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("dropout", DROPOUTS)
def test_recomputing_changes_no_bit_of_loss_or_gradients(dropout: str, granularity: str) -> None:
    model = tiny_model(**DROPOUTS[dropout])
    plain, loss = trained_step(model, None)
    again, again_loss = trained_step(model, granularity)
    assert torch.equal(loss, again_loss)
    for (name, expected), found in zip(gradients(plain).items(), gradients(again).values(), strict=True):
        assert torch.equal(found, expected), name


def test_dropout_is_really_on_in_these_comparisons() -> None:
    losses = [trained_step(tiny_model(**keys), None)[1] for keys in DROPOUTS.values()]
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(losses, 2))


@pytest.mark.parametrize(
    ("granularity", "part", "others"),
    [
        ("full", lambda block: block, lambda block: []),
        ("full_attn", lambda block: block.attention, lambda block: [block.feedforward]),
        ("core_attn", lambda block: block.attention.core, lambda block: [block.attention.qkv, block.feedforward]),
    ],
)
def test_exactly_what_the_word_says_is_computed_twice(granularity, part, others) -> None:  # type: ignore[no-untyped-def]
    model = tiny_model(use_recompute=True, recompute_granularity=granularity)
    gpt = built(model)
    calls: dict[int, int] = {}

    def count(module: torch.nn.Module) -> None:
        inner = type(module).forward

        def counted(self: torch.nn.Module, *args: object) -> torch.Tensor:
            calls[id(self)] = calls.get(id(self), 0) + 1
            return inner(self, *args)

        replace_forward(module, counted)

    for block in gpt.blocks.values():
        for module in {id(m): m for m in (part(block), *others(block))}.values():
            count(module)
    apply_recompute(gpt, model)
    gpt(random_tokens(2, 16, 97), random_tokens(2, 16, 97)).backward()
    for block in gpt.blocks.values():
        assert calls[id(part(block))] == 2
        assert all(calls[id(module)] == 1 for module in others(block))


def test_names_of_parameters_stay_what_they_were() -> None:
    names = {name for name, _ in built(tiny_model()).named_parameters()}
    for granularity in GRANULARITIES:
        gpt, _ = trained_step(tiny_model(), granularity)
        assert {name for name, _ in gpt.named_parameters()} == names


def test_recomputing_keeps_less_for_backward() -> None:
    kept = {granularity: bytes_kept(granularity) for granularity in (None, *GRANULARITIES)}
    assert kept["full"] < kept["full_attn"] < kept["core_attn"] <= kept[None]
    assert kept["full"] < kept[None] / 3


def bytes_kept(granularity: str | None) -> int:
    """What autograd saves in a forward, each tensor counted once, weights not at all."""
    model = tiny_model(num_layers=4)
    gpt = built(model)
    if granularity:
        apply_recompute(gpt, model.model_copy(update={"use_recompute": True, "recompute_granularity": granularity}))
    weights = {parameter.untyped_storage().data_ptr() for parameter in gpt.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = gpt(random_tokens(4, 16, 97), random_tokens(4, 16, 97))
    assert loss.requires_grad
    return sum(storage.nbytes() for storage in saved.values())


def test_without_use_recompute_nothing_is_touched() -> None:
    gpt = built(tiny_model())
    apply_recompute(gpt, tiny_model(use_recompute=False))
    modules = [module for module in gpt.modules() if isinstance(module, Block | CoreAttention)]
    assert {type(module) for module in modules} == {Block, CoreAttention}
