import pytest
import torch

from fourfold.config.schema import Optimizer
from fourfold.cost.params import Parameter, parameters
from fourfold.optim import adamw
from fourfold.optim.adamw import AdamW, decays
from fourfold.optim.clip import clip_divisor, squared_norm
from tests.require import require_module
from tests.tiny import built, tiny_model


@pytest.fixture(autouse=True, params=["PyTorch's kernel", "our kernel"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours, which GPUs run, is interpreted here."""
    is_ours = request.param == "our kernel"
    if is_ours:
        require_module("triton")
    monkeypatch.setattr(adamw, "is_fast", lambda tensor: is_ours)


MODEL = tiny_model(num_layers=1)
TABLE = list(parameters(MODEL))
Tensors = dict[str, torch.Tensor]


def optimizer_of(seed: int = 1, **keys: object) -> AdamW:
    gpt = built(MODEL, seed)
    return AdamW(TABLE, dict(gpt.named_parameters()), Optimizer(**keys))  # type: ignore[arg-type]


def weights(optimizer: AdamW) -> Tensors:
    return {name: parameter.detach().clone() for name, parameter in optimizer.placed.items()}


def random_gradients(seed: int, size: float) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {parameter.name: size * torch.randn(parameter.shape, generator=generator) for parameter in TABLE}


def step(optimizer: AdamW, gradients: Tensors, lr: float, grad_clip: float = 0.0, is_skipped: bool = False) -> None:
    """As a training step does it."""
    for name, gradient in gradients.items():
        optimizer.placed[name].grad = gradient.clone()
    norm = squared_norm(list(optimizer.gradients().values())).sqrt()
    optimizer.step(torch.tensor(lr), clip_divisor(norm, grad_clip), torch.tensor(is_skipped))


class Reference:
    """AdamW as published (decoupled weight decay), by hand and in float64."""

    def __init__(self, weights: Tensors, optimizer: Optimizer) -> None:
        self.weights = {name: weight.double() for name, weight in weights.items()}
        self.first = {name: torch.zeros_like(weight) for name, weight in self.weights.items()}
        self.second = {name: torch.zeros_like(weight) for name, weight in self.weights.items()}
        self.optimizer, self.updates = optimizer, 0

    def step(self, gradients: Tensors, lr: float, grad_clip: float) -> None:
        keys = self.optimizer
        self.updates += 1
        norm = sum(gradient.double().square().sum() for gradient in gradients.values()) ** 0.5
        shrink = min(1.0, grad_clip / float(norm)) if grad_clip else 1.0
        for parameter in TABLE:
            name = parameter.name
            g = gradients[name].double() * shrink
            self.first[name] = keys.adam_beta1 * self.first[name] + (1 - keys.adam_beta1) * g
            self.second[name] = keys.adam_beta2 * self.second[name] + (1 - keys.adam_beta2) * g * g
            first = self.first[name] / (1 - keys.adam_beta1**self.updates)
            second = self.second[name] / (1 - keys.adam_beta2**self.updates)
            if does_decay(parameter, keys.decay_embeddings):
                self.weights[name] = self.weights[name] * (1 - lr * keys.weight_decay)
            self.weights[name] = self.weights[name] - lr * first / (second.sqrt() + keys.adam_epsilon)


def does_decay(parameter: Parameter, decay_embeddings: bool) -> bool:
    """By shape and name, and so not by the table's word for it."""
    return len(parameter.shape) == 2 and (decay_embeddings or "embedding" not in parameter.name)


@pytest.mark.parametrize("decay_embeddings", [True, False])
@pytest.mark.parametrize("grad_clip", [0.0, 1.0])
def test_steps_are_those_of_adamw_by_hand_in_float64(grad_clip: float, decay_embeddings: bool) -> None:
    keys = Optimizer(
        weight_decay=0.3, adam_beta1=0.8, adam_beta2=0.97, adam_epsilon=1e-6, decay_embeddings=decay_embeddings
    )
    optimizer = optimizer_of(**keys.model_dump())
    start = weights(optimizer)
    reference = Reference(start, keys)
    # norms of about 1.2, 120 and 0.012: clipping has to bite sometimes
    for n, size in enumerate((1e-2, 1.0, 1e-4, 1e-2, 1e-1, 1e-3), start=1):
        gradients, lr = random_gradients(n, size), 1e-2 / n
        step(optimizer, gradients, lr, grad_clip)
        reference.step(gradients, lr, grad_clip)
    assert optimizer.updates == 6
    for name, weight in weights(optimizer).items():
        moved = (reference.weights[name] - start[name].double()).abs().max()
        assert moved > 1e-3
        assert (weight.double() - reference.weights[name]).abs().max() < 2e-5 * moved, name
    for moment, expected in (("exp_avg", reference.first), ("exp_avg_sq", reference.second)):
        for name, found in optimizer.moments()[moment].items():
            assert (found.double() - expected[name]).abs().max() < 1e-6 * expected[name].abs().max(), (moment, name)


def test_biases_and_norms_never_decay_and_embeddings_as_asked() -> None:
    names = {True: set[str](), False: set[str]()}
    for decay_embeddings in (True, False):
        optimizer = optimizer_of(weight_decay=0.5, decay_embeddings=decay_embeddings)
        before = weights(optimizer)
        step(optimizer, {name: torch.zeros_like(weight) for name, weight in before.items()}, lr=0.1)
        after = weights(optimizer)
        for parameter in TABLE:
            name = parameter.name
            if does_decay(parameter, decay_embeddings):
                names[decay_embeddings].add(name)
                torch.testing.assert_close(after[name], before[name] * 0.95)
            else:
                assert torch.equal(after[name], before[name]), name
    assert names[True] - names[False] == {"embedding.tokens.weight", "embedding.positions.weight"}


@pytest.mark.parametrize("is_tied", [True, False])
def test_an_untied_head_decays_as_embeddings_do(is_tied: bool) -> None:
    model = tiny_model(tie_word_embeddings=is_tied)
    kinds = {parameter.name: parameter.kind for parameter in parameters(model)}
    assert ("head.weight" in kinds) is not is_tied
    for name in kinds.keys() & {"head.weight", "embedding.tokens.weight"}:
        assert decays(kinds[name], Optimizer(decay_embeddings=True))
        assert not decays(kinds[name], Optimizer(decay_embeddings=False))


def test_a_skipped_step_changes_no_weight_no_moment_and_no_count() -> None:
    optimizer = optimizer_of()
    step(optimizer, random_gradients(0, 1e-2), lr=1e-2)
    before, moments = weights(optimizer), {k: dict(v) for k, v in optimizer.moments().items()}
    moments = {moment: {name: t.clone() for name, t in named.items()} for moment, named in moments.items()}

    gradients = random_gradients(1, 1e-2)
    gradients["norm.weight"][3] = torch.nan
    step(optimizer, gradients, lr=1e-2, is_skipped=True)

    assert optimizer.updates == 1
    assert all(torch.equal(weight, before[name]) for name, weight in weights(optimizer).items())
    for moment, named in optimizer.moments().items():
        assert all(torch.equal(tensor, moments[moment][name]) for name, tensor in named.items())
    assert all(parameter.grad is None for parameter in optimizer.placed.values()), "the bad gradients are gone too"


def test_the_count_of_updates_decides_the_correction_of_young_moments() -> None:
    """A count that was not restored would make the first step of a resumed run many times too large."""
    moved = {}
    for updates in (0, 1000):
        optimizer = optimizer_of(weight_decay=0.0)
        optimizer.set_updates(updates)
        before = weights(optimizer)["norm.weight"]
        step(optimizer, random_gradients(0, 1e-2), lr=1e-2)
        assert optimizer.updates == updates + 1
        moved[updates] = (weights(optimizer)["norm.weight"] - before).abs().mean().item()
    assert moved[0] == pytest.approx(1e-2, rel=1e-3)
    assert moved[1000] == pytest.approx(1e-2 * 0.1 / 0.05**0.5, rel=1e-3)


def test_a_parameter_without_a_gradient_does_not_pass_unseen() -> None:
    optimizer = optimizer_of()
    with pytest.raises(AssertionError, match=r"norm.bias got no gradient"):
        step(optimizer, {name: g for name, g in random_gradients(0, 1.0).items() if name != "norm.bias"}, lr=1e-2)


def test_the_fused_kernel_is_really_used() -> None:
    assert all(group["fused"] is True for group in optimizer_of().engine.param_groups)
