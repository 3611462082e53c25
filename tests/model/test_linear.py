from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from fourfold.cost.params import sizes
from fourfold.kernels import float8
from fourfold.model import linear, norm
from fourfold.model.gpt import GPT
from fourfold.model.linear import Float8Head, Float8Product, HeadProducts, PlainHead, gelu, multiply
from fourfold.model.loss import summed_cross_entropy
from fourfold.parallelize.recompute import apply_recompute
from tests.tiny import built, random_tokens, tiny_model


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Activations, a weight, a bias and the gradient of their product, as small as gradients are."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 16, 64, generator=generator).bfloat16().requires_grad_()
    weight = (0.02 * torch.randn(32, 64, generator=generator)).requires_grad_()
    bias = torch.randn(32, generator=generator).requires_grad_()
    return x, weight, bias, (1e-7 * torch.randn(2, 16, 32, generator=generator)).bfloat16()


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).detach().norm() / exact.detach().norm())


@pytest.mark.parametrize(("has_gelu", "keeps_input"), [(False, False), (False, True), (True, True)])
@pytest.mark.parametrize("frees_weight", [False, True])
def test_products_in_eight_bits_and_their_gradients_are_near_those_in_float64(
    has_gelu: bool, keeps_input: bool, frees_weight: bool
) -> None:
    x, weight, bias, dy = inputs()
    product = Float8Product(has_gelu, keeps_input, frees_weight)
    y = product(x, weight, bias)
    found = torch.autograd.grad(y, (x, weight, bias), dy)
    h = F.gelu(x.double(), approximate="tanh") if has_gelu else x.double()
    exact_y = F.linear(h, weight.double(), bias.double())
    exact = torch.autograd.grad(exact_y, (x, weight, bias), dy.double())
    assert y.dtype == torch.bfloat16 and error(y, exact_y) < 0.04
    for gradient, wanted, limit in zip(found, exact, (0.1, 0.1, 1e-5), strict=True):
        assert error(gradient, wanted) < limit
    with torch.no_grad():
        assert product(x, weight, bias).equal(y)


def test_kept_casts_give_the_same_bits_until_the_weight_is_cast_again() -> None:
    x, weight, bias, dy = inputs()
    product = Float8Product(has_gelu=False, keeps_input=False, frees_weight=False)
    y = product(x, weight, bias)
    gradients = torch.autograd.grad(y, (x, weight), dy)
    product.keep(weight)
    again = product(x, weight, bias)
    assert again.equal(y)
    for found, wanted in zip(torch.autograd.grad(again, (x, weight), dy), gradients, strict=True):
        assert found.equal(wanted)
    with torch.no_grad():
        weight *= 3
    assert product(x, weight, bias).equal(y)
    product.keep(weight)
    assert product(x, weight, bias).equal(anew(product, x, weight, bias))


def anew(product: Float8Product, *tensors: torch.Tensor) -> torch.Tensor:
    """The product with casts made anew."""
    return Float8Product(*product.flags)(*tensors)


@pytest.mark.parametrize(("products", "limit"), [(PlainHead, 0.01), (Float8Head, 0.1)])
def test_a_head_in_eight_bits_gives_nearly_the_same_loss(products: type[HeadProducts], limit: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x_btd = torch.randn(2, 16, 64, generator=generator).bfloat16().requires_grad_()
    weight_vd = (0.1 * torch.randn(128, 64, generator=generator)).requires_grad_()
    targets_bt = torch.randint(97, (2, 16), generator=generator)
    found = summed_cross_entropy(x_btd, weight_vd, targets_bt, 97, products=products)
    gradients = torch.autograd.grad(found.sum(), (x_btd, weight_vd))
    logits = F.linear(x_btd.double(), weight_vd.double()[:97]).flatten(0, 1)
    exact = F.cross_entropy(logits, targets_bt.flatten(), reduction="sum")
    assert found.item() == pytest.approx(exact.item(), rel=limit / 10)
    for gradient, wanted in zip(gradients, torch.autograd.grad(exact, (x_btd, weight_vd)), strict=True):
        assert error(gradient, wanted.double()) < limit


def test_gelu_is_pytorchs_compiled_or_not() -> None:
    x = torch.linspace(-6, 6, 4001, dtype=torch.float32, requires_grad=True)
    wanted = F.gelu(x.double(), approximate="tanh")
    compiled = torch.compile(gelu, backend="eager", fullgraph=True)
    for found in (gelu(x), compiled(x)):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-6)


def test_a_product_has_the_dtype_of_what_goes_in() -> None:
    x, weight, bias, _ = inputs()
    for dtype in (torch.bfloat16, torch.float32):
        assert multiply(x.to(dtype), weight, bias).dtype == multiply(x.to(dtype), weight, None).dtype == dtype


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_bias_may_be_summed_where_its_outputs_gradient_is_written(
    is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way of a GPU, with the plain versions of its kernels."""
    tokens = torch.randint(0, 50, (2, 16), generator=torch.Generator().manual_seed(0))
    found = []
    for in_passing in (False, True):
        for module in (linear, norm):
            monkeypatch.setattr(module, "sums_in_passing", lambda x, value=in_passing: value)
        gpt = built(tiny_model(num_layers=2))
        call = torch.compile(gpt, backend="aot_eager") if is_compiled else gpt
        call(tokens, tokens).backward()
        found.append({name: parameter.grad for name, parameter in gpt.named_parameters()})
    assert len(found[0]) == len(found[1]) and found[1]["blocks.1.attention.qkv.bias"].abs().max() > 1e-3
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize(("granularity", "fewer"), [(None, 2), ("core_attn", 2), ("full", 0)])
def test_gelus_output_is_made_again_where_a_model_is_wide(
    granularity: str | None, fewer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (linear, norm):
        monkeypatch.setattr(module, "sums_in_passing", lambda x: True)
    model = tiny_model(num_layers=2, use_recompute=granularity is not None, recompute_granularity=granularity or "full")
    tokens = random_tokens(2, 16, 50)
    gradients, kept = [], []
    for again_from in (2**30, 1):
        monkeypatch.setattr(linear, "GELU_AGAIN_FROM", again_from)
        torch.compiler.reset()
        gpt = compiled(built(model))
        apply_recompute(gpt, model)
        widths: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, to=widths: to.append(t.shape[-1]) or t, lambda t: t):
            loss = gpt(tokens, tokens)
        loss.backward()
        gradients.append({name: parameter.grad for name, parameter in gpt.named_parameters()})
        kept.append(widths.count(sizes(model)[1]))
    assert kept[0] - kept[1] == fewer
    for name, gradient in gradients[0].items():
        assert gradient.equal(gradients[1][name]), name


def test_casts_are_freed_as_backward_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that a compiled backward turned itself would be held until all of it has ended."""
    made: list[StorageWeakRef] = []

    def watched(*arguments: Any, plain: Callable[..., Any] = float8.plain_cast) -> Any:
        casts = plain(*arguments)
        made.extend(StorageWeakRef(cast.untyped_storage()) for cast in casts)
        return casts

    def alive() -> int:
        return sum(not ref.expired() for ref in made)

    monkeypatch.setattr(float8, "plain_cast", watched)
    torch.compiler.reset()
    weights = [torch.randn(64, 64, requires_grad=True) for _ in range(2)]
    ys, left = [torch.randn(16, 64, requires_grad=True)], []
    for weight in weights:
        product = Float8Product(has_gelu=False, keeps_input=False, frees_weight=False)
        product.compile(dynamic=False, backend="aot_eager_decomp_partition")
        ys.append(product(ys[-1], weight, None))
    assert alive() == 4  # of each product its input and its weight, turned
    ys[1].register_hook(lambda _: left.append(alive()))
    ys[2].sum().backward()
    assert left == [2] and alive() == 0


def compiled(gpt: GPT) -> GPT:
    """Block by block, with what the compiler keeps for backward, but without its code."""
    for block in gpt.blocks.values():
        block.compile(dynamic=False, backend="aot_eager_decomp_partition")
    return gpt


def test_blocks_are_compiled_once_for_all_layers() -> None:
    """Beyond eight variants of one function PyTorch gives up and runs it as it is, which nobody would notice."""
    graphs = []

    def count(graph: nn.Module, _: object) -> nn.Module:
        graphs.append(graph)
        return graph

    model = tiny_model(num_layers=10, hidden_dropout_prob=0.1)
    gpt = built(model)
    for block in gpt.blocks.values():
        block.compile(dynamic=False, backend=count)
    tokens = torch.zeros(2, sizes(model)[3], dtype=torch.int64)
    gpt(tokens, tokens, torch.arange(2))
    assert len(graphs) == 1
