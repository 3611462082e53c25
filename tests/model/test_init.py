import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.config.schema import Model
from fourfold.cost.params import Parameter, parameters
from fourfold.layout.stages import pipe_stages
from fourfold.model.init import initialize_shard
from tests.tiny import built, tiny_model

WIDE = tiny_model(hidden_size=256, num_layers=3, vocab_size=512, max_position_embeddings=128)


def whole(parameter: Parameter, model: Model = WIDE, seed: int = 1) -> torch.Tensor:
    tensor = torch.full(parameter.shape, torch.nan)
    initialize_shard(tensor, parameter, (0,) * tensor.dim(), model, seed)
    return tensor


def of_kind(kind: str) -> list[Parameter]:
    return [parameter for parameter in parameters(WIDE) if parameter.kind == kind]


@pytest.mark.parametrize(
    ("kind", "std"), [("embedding", 0.02), ("matrix", 0.02), ("projection", 0.02 / math.sqrt(2 * 3))]
)
def test_matrices_are_normal_and_those_into_the_residual_stream_are_smaller(kind: str, std: float) -> None:
    for parameter in of_kind(kind):
        values = whole(parameter).double().flatten() / std
        n = len(values)
        assert abs(values.mean()) < 5 / math.sqrt(n)
        assert abs(values.var() - 1) < 5 * math.sqrt(2 / n)
        assert abs((values**4).mean() - 3) < 5 * math.sqrt(96 / n), "tails of a normal distribution"
        assert abs((values.abs() < 1).double().mean() - 0.682689) < 5 * math.sqrt(0.217 / n)


def test_initializer_range_scales_every_matrix() -> None:
    double = tiny_model(hidden_size=256, num_layers=3, vocab_size=512, initializer_range=0.04)
    for parameter in (*of_kind("matrix"), *of_kind("projection"), *of_kind("embedding")):
        torch.testing.assert_close(whole(parameter, double), 2 * whole(parameter), rtol=1e-6, atol=0)


def test_biases_are_zero_and_norms_one() -> None:
    assert all(whole(parameter).eq(0).all() for parameter in of_kind("bias"))
    assert all(whole(parameter).eq(1).all() for parameter in of_kind("norm"))


@settings(max_examples=40)
@given(st.data())
def test_a_shard_drawn_alone_is_the_slice_of_the_whole(data: st.DataObject) -> None:
    parameter = data.draw(st.sampled_from([p for p in parameters(WIDE) if not p.name.startswith("blocks.1")]))
    bounds = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in parameter.shape]
    shard = torch.full([last - first for first, last in bounds], torch.nan)
    initialize_shard(shard, parameter, tuple(first for first, _ in bounds), WIDE, 1)
    assert torch.equal(shard, whole(parameter)[tuple(slice(*pair) for pair in bounds)])


def test_a_strided_shard_is_filled_like_any_other() -> None:
    [parameter] = [p for p in parameters(WIDE) if p.name == "blocks.0.attention.out.weight"]
    room = torch.full((256, 256), torch.nan)
    initialize_shard(room[:, 64:128], parameter, (0, 64), WIDE, 1)
    assert torch.equal(room[:, 64:128], whole(parameter)[:, 64:128])


def test_weights_differ_between_names_and_between_seeds() -> None:
    random = [p for p in parameters(WIDE) if p.kind not in ("bias", "norm")]
    drawn = [whole(p, seed=seed).flatten()[:4096].double() for p in random for seed in (1, 2)]
    correlations = torch.corrcoef(torch.stack(drawn))
    correlations.fill_diagonal_(0)
    assert correlations.abs().max() < 6 / math.sqrt(4096)


def test_weights_do_not_depend_on_the_other_parameters() -> None:
    deeper = tiny_model(num_layers=3, vocab_size=300, tie_word_embeddings=False)
    small, large = dict(built(tiny_model()).named_parameters()), dict(built(deeper).named_parameters())
    assert torch.equal(small["blocks.1.attention.qkv.weight"], large["blocks.1.attention.qkv.weight"])
    assert torch.equal(small["embedding.tokens.weight"], large["embedding.tokens.weight"][:128])


@pytest.mark.parametrize("is_tied", [True, False])
def test_every_pipe_stage_starts_as_its_part_of_the_whole_model(is_tied: bool) -> None:
    model = tiny_model(num_layers=3, tie_word_embeddings=is_tied)
    expected = dict(built(model).named_parameters())
    for stage in pipe_stages(3, 3):
        for name, parameter in built(model, stage=stage).named_parameters():
            # the last stage's copy of a tied head starts as the embedding
            source = "embedding.tokens.weight" if is_tied and name == "head.weight" else name
            assert torch.equal(parameter, expected[source]), name
