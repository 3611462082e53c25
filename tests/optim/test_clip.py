import pytest
import torch

from fourfold.optim.clip import clip_divisor, squared_norm


def test_the_norm_is_that_of_all_gradients_in_one_vector() -> None:
    tensors = [torch.randn(3, 4), torch.randn(5), torch.randn(2, 2, 2)]
    expected = torch.cat([tensor.flatten().double() for tensor in tensors]).square().sum()
    torch.testing.assert_close(squared_norm(tensors).double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_one_bad_number_anywhere_makes_the_norm_not_finite(bad: float) -> None:
    tensors = [torch.ones(3), torch.ones(2, 2)]
    tensors[1][0, 1] = bad
    assert not torch.isfinite(squared_norm(tensors))


@pytest.mark.parametrize(
    ("norm", "grad_clip", "divisor"), [(0.5, 1.0, 1.0), (1.0, 1.0, 1.0), (4.0, 1.0, 4.0), (4.0, 0.5, 8.0)]
)
def test_gradients_are_only_ever_made_smaller(norm: float, grad_clip: float, divisor: float) -> None:
    assert clip_divisor(torch.tensor(norm), grad_clip).item() == divisor


def test_a_limit_of_zero_is_no_limit() -> None:
    assert clip_divisor(torch.tensor(1e9), 0.0).item() == 1.0


def test_the_norm_of_a_large_host_tensor_keeps_its_digits() -> None:
    """Longer than a row, with a rest; added up one by one in float32 it would lose four of them."""
    generator = torch.Generator().manual_seed(0)
    large, small = torch.randn(2**22 + 17, generator=generator), torch.randn(3, 5, generator=generator)
    exact = large.double().square().sum() + small.double().square().sum()
    assert squared_norm([large, small]).item() == pytest.approx(exact.item(), rel=1e-6)
