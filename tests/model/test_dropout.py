from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.layout.stages import pipe_stages
from fourfold.model.dropout import Dropout
from fourfold.model.gpt import GPT
from fourfold.model.stateless import bernoulli_btd
from tests.tiny import built, tiny_model

P = 0.1
WIDTH = 256


def sample_keys(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (count,), generator=torch.Generator().manual_seed(seed))


def mask(keys_b: torch.Tensor, site: int = 3, first_position: int = 0, t: int = 64, p: float = P) -> torch.Tensor:
    """What dropout keeps, as 0 and 1."""
    dropout = Dropout(p, site)
    dropout.first_position = first_position
    return dropout(torch.ones(len(keys_b), t, WIDTH), keys_b).ne(0).double()


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1].abs().item()


def test_no_dropout_gives_back_the_very_same_tensor() -> None:
    x = torch.randn(2, 3, 4)
    assert Dropout(0.0, 1)(x, sample_keys(2)) is x
    assert Dropout(0.5, 1)(x, None) is x, "no sample keys: an evaluation"


def test_what_is_kept_is_scaled_so_that_the_mean_stays() -> None:
    x = torch.randn(8, 64, WIDTH, dtype=torch.float64) + 3.0
    y = Dropout(0.25, 1)(x, sample_keys(8))
    kept = y != 0
    torch.testing.assert_close(y[kept], x[kept] / 0.75)
    assert abs(y.mean().item() / x.mean().item() - 1) < 0.01


def test_the_dtype_stays() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert Dropout(0.5, 1)(torch.ones(1, 2, 4, dtype=dtype), sample_keys(1)).dtype == dtype


def test_gradients_pass_where_values_do() -> None:
    x = torch.randn(2, 8, WIDTH, requires_grad=True)
    y = Dropout(0.5, 1)(x, sample_keys(2))
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.where(y == 0, 0.0, 2.0))


@settings(max_examples=30)
@given(p=st.floats(0.01, 0.99), site=st.integers(0, 200), seed=st.integers(0, 10**6))
def test_the_share_that_is_dropped_is_p(p: float, site: int, seed: int) -> None:
    kept = mask(sample_keys(4, seed), site, p=p)
    deviation = (p * (1 - p) / kept.numel()) ** 0.5
    assert abs(kept.mean().item() - (1 - p)) < 6 * deviation


def test_the_mask_is_a_function_of_its_arguments_alone() -> None:
    torch.manual_seed(1)
    first = mask(sample_keys(4))
    torch.manual_seed(2)
    assert torch.equal(first, mask(sample_keys(4)))


@settings(max_examples=30)
@given(
    row_cuts=st.lists(st.integers(0, 8), max_size=3),
    time_cuts=st.lists(st.integers(0, 32), max_size=3),
    site=st.integers(0, 200),
)
def test_rows_and_positions_drawn_apart_are_those_drawn_together(
    row_cuts: list[int], time_cuts: list[int], site: int
) -> None:
    """As micro batches, data ranks and sequence parallel ranks divide them."""
    keys_b = sample_keys(8)
    whole = mask(keys_b, site, t=32)
    rows, times = sorted({0, 8, *row_cuts}), sorted({0, 32, *time_cuts})
    parts = [
        torch.cat(
            [mask(keys_b[first:last], site, begin, end - begin) for begin, end in pairwise(times)],
            1,
        )
        for first, last in pairwise(rows)
    ]
    assert torch.equal(torch.cat(parts), whole)


def test_neighbouring_samples_sites_positions_and_channels_are_independent() -> None:
    keys_b = sample_keys(32)
    kept = mask(keys_b)
    bound = 5 / kept[1:].numel() ** 0.5  # five standard deviations of the correlation of independent bits
    assert correlation(kept[1:], kept[:-1]) < bound
    assert correlation(kept[:, 1:], kept[:, :-1]) < bound * 1.1
    assert correlation(kept[..., 1:], kept[..., :-1]) < bound
    assert correlation(kept, mask(keys_b, site=4)) < bound
    assert correlation(kept, mask(sample_keys(32, seed=1))) < bound


def test_no_row_and_no_channel_is_favoured() -> None:
    """Counts along every dim scatter as those of independent draws do: a chi-square of about one per count."""
    kept = mask(sample_keys(64), p=0.5)
    for dims in ((1, 2), (0, 2), (0, 1), (2,), (1,), (0,)):
        counts = kept.sum(dims)
        each = kept.numel() / counts.numel()
        chi_square = ((counts - each / 2) ** 2 / (each / 4)).mean().item()
        assert abs(chi_square - 1) < 6 * (2 / counts.numel()) ** 0.5


def test_every_place_in_a_model_has_a_mask_of_its_own_and_keeps_it_on_a_pipe_stage() -> None:
    model = tiny_model(num_layers=4, hidden_dropout_prob=P)

    def sites(gpt: GPT) -> dict[str, int]:
        """What each adds to a sample's key, with what it was told by the model."""
        found = {}
        for name, module in gpt.named_modules():
            if isinstance(module, Dropout):
                hook = lambda module, inputs, name=name: found.update({name: int(inputs[1][0]) + module.site})  # noqa: E731
                module.register_forward_pre_hook(hook)
        tokens = torch.zeros(1, 4, dtype=torch.int64)
        x = tokens if gpt.stage.has_embedding else torch.zeros(1, 4, model.hidden_size)
        gpt(x, tokens, torch.zeros(1, dtype=torch.int64))
        return found

    whole = sites(built(model))
    assert len(whole) == len(set(whole.values())) == 1 + 2 * 4
    staged = [sites(built(model, stage=stage)) for stage in pipe_stages(4, 3)]
    assert {name: site for each in staged for name, site in each.items()} == whole


def test_rows_and_channels_agree_in_pairs_as_often_as_chance_has_it() -> None:
    """A weak hash would repeat a row's pattern in another row: every pair is compared, and the worst one counts."""
    signs = 2 * mask(sample_keys(8), p=0.5).flatten(0, 1) - 1
    for matrix in (signs, signs.T):
        agreement = matrix @ matrix.T / matrix.shape[1] ** 0.5  # standard normal for independent draws
        pairs = agreement[torch.ones_like(agreement).triu(1).bool()]
        assert abs(pairs.std().item() - 1) < 0.02
        assert pairs.abs().max() < 6


def test_a_probability_next_to_one_still_works() -> None:
    kept = bernoulli_btd(sample_keys(8), 0, torch.arange(64), WIDTH, 1 - 2**-30)
    assert kept.sum() <= 2
