import pytest
import torch
import torch.nn.functional as F

from fourfold.cost import activations
from fourfold.cost.activations import chunk_rows
from fourfold.model.loss import IGNORED, summed_cross_entropy


def inputs(dtype: torch.dtype, vocab: int = 128) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, a head and targets, a third of which do not count."""
    generator = torch.Generator().manual_seed(0)
    x_btd = torch.randn(4, 11, 24, generator=generator).to(dtype).requires_grad_()
    weight_vd = torch.randn(vocab, 24, generator=generator).requires_grad_()
    targets_bt = torch.randint(97, (4, 11), generator=generator)
    targets_bt[torch.rand(4, 11, generator=generator) < 0.3] = IGNORED
    assert (targets_bt == IGNORED).any() and (targets_bt != IGNORED).any()
    return x_btd, weight_vd, targets_bt


def reference(x_btd: torch.Tensor, weight_vd: torch.Tensor, targets_bt: torch.Tensor, vocab_size: int) -> torch.Tensor:
    logits = F.linear(x_btd.double(), weight_vd.double()[:vocab_size])
    return F.cross_entropy(logits.flatten(0, 1), targets_bt.flatten(), ignore_index=IGNORED, reduction="sum")


@pytest.mark.parametrize("chunk_logits", [2**25, 20 * 128, 7 * 128, 128], ids="{} logits at a time".format)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)], ids=str
)
def test_value_and_gradients_are_those_of_cross_entropy(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, tolerance: float, chunk_logits: int
) -> None:
    monkeypatch.setattr(activations, "CHUNK_LOGITS", chunk_logits)
    monkeypatch.setattr(activations, "MOST_CHUNKS", 2**20)
    x_btd, weight_vd, targets_bt = inputs(dtype)
    expected = reference(x_btd, weight_vd, targets_bt, 97)
    expected_grads = torch.autograd.grad(0.37 * expected, (x_btd, weight_vd))

    found = summed_cross_entropy(x_btd, weight_vd, targets_bt, 97)
    grads = torch.autograd.grad((0.37 * found).sum(), (x_btd, weight_vd))

    assert found.shape == (1,) and found.dtype == torch.float32
    torch.testing.assert_close(found[0].double(), expected, rtol=tolerance, atol=0)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        assert grad.dtype == expected_grad.dtype and grad.shape == expected_grad.shape
        error = (grad.double() - expected_grad.double()).abs().max() / expected_grad.double().abs().max()
        assert error < tolerance


def test_a_weight_is_that_of_the_gradients_alone() -> None:
    x_btd, weight_vd, targets_bt = inputs(torch.float32)
    plain = summed_cross_entropy(x_btd, weight_vd, targets_bt, 97)
    wanted = torch.autograd.grad((0.37 * plain).sum(), (x_btd, weight_vd))
    found = summed_cross_entropy(x_btd, weight_vd, targets_bt, 97, weight=torch.tensor(0.37))
    assert found.equal(plain)
    for gradient, expected in zip(torch.autograd.grad(found.sum(), (x_btd, weight_vd)), wanted, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-7)


def test_positions_that_do_not_count_have_exactly_no_gradient() -> None:
    x_btd, weight_vd, targets_bt = inputs(torch.float32)
    [grad_btd] = torch.autograd.grad(summed_cross_entropy(x_btd, weight_vd, targets_bt, 97).sum(), x_btd)
    assert grad_btd[targets_bt == IGNORED].eq(0).all()
    assert grad_btd[targets_bt != IGNORED].ne(0).any(-1).all()


def test_nothing_that_counts_is_a_loss_of_zero_and_not_nan() -> None:
    x_btd, weight_vd, targets_bt = inputs(torch.float32)
    found = summed_cross_entropy(x_btd, weight_vd, torch.full_like(targets_bt, IGNORED), 97)
    found.sum().backward()
    assert found.item() == 0.0
    assert x_btd.grad is not None and x_btd.grad.eq(0).all()
    assert weight_vd.grad is not None and weight_vd.grad.eq(0).all()


def test_logits_far_from_zero_do_not_overflow() -> None:
    x_btd = torch.full((1, 1, 2), 300.0, requires_grad=True)
    weight_vd = torch.tensor([[300.0, 300.0], [-300.0, -300.0]])
    found = summed_cross_entropy(x_btd, weight_vd, torch.tensor([[1]]), 2)
    found.backward()
    assert found.item() == 360_000.0
    assert x_btd.grad is not None and x_btd.grad.isfinite().all()


def test_without_gradients_the_value_is_the_same() -> None:
    x_btd, weight_vd, targets_bt = inputs(torch.float32)
    with torch.no_grad():
        alone = summed_cross_entropy(x_btd, weight_vd, targets_bt, 97)
    assert not alone.requires_grad
    assert torch.equal(alone, summed_cross_entropy(x_btd, weight_vd, targets_bt, 97))


@pytest.mark.parametrize("num_rows", [1, 7, 8, 1000, 8192, 65536])
@pytest.mark.parametrize("vocab", [128, 50304])
def test_a_chunk_never_holds_more_logits_than_allowed(num_rows: int, vocab: int) -> None:
    rows = chunk_rows(num_rows, vocab, is_float16=False)
    assert 1 <= rows <= num_rows
    assert rows * vocab <= activations.CHUNK_LOGITS or rows <= num_rows / activations.MOST_CHUNKS
    assert chunk_rows(num_rows, vocab, is_float16=True) <= activations.FLOAT16_ROWS
