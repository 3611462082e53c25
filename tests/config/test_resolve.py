from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.config.load import load_config
from fourfold.config.resolve import (
    accumulation,
    divisors,
    layout_of,
    padded_vocab_size,
    processes_needed,
    resolve,
    with_decay_steps,
    with_vocab_size,
)
from fourfold.config.schema import Config
from fourfold.layout.layout import Layout


def config_of(**keys: object) -> Config:
    return load_config(None, [(key, str(value)) for key, value in keys.items()])


def micro_batch_of(world_size: int = 1, **keys: object) -> int | str:
    return resolve(config_of(**keys), world_size, has_gpu=False).global_.micro_batch_size


# Degrees


def test_one_missing_degree_is_inferred_whichever_it_is() -> None:
    names = ("pp_degree", "dp_degree", "sharding_degree", "mp_degree")
    for missing in names:
        given_degrees = {name: 2 for name in names if name != missing}
        assert layout_of(config_of(**given_degrees), 24).degrees == tuple(3 if n == missing else 2 for n in names)


def test_dp_is_inferred_where_several_degrees_are_missing() -> None:
    assert layout_of(Config(), 8) == Layout(dp=8)
    assert layout_of(config_of(mp_degree=2), 8) == Layout(dp=4, mp=2)


def test_the_other_missing_degrees_are_one_where_dp_is_given() -> None:
    assert layout_of(config_of(dp_degree=2), 8) == Layout(dp=2)


def test_degrees_that_do_not_fit_still_make_a_layout() -> None:
    assert layout_of(config_of(mp_degree=3), 8) == Layout(dp=2, mp=3)
    assert layout_of(config_of(mp_degree=16), 8) == Layout(dp=1, mp=16)


def test_the_processes_needed_are_the_product_of_the_degrees_given() -> None:
    assert processes_needed(Config()) == 1
    assert processes_needed(config_of(mp_degree=2, sharding_degree=4)) == 8


@given(st.tuples(*[st.integers(1, 8)] * 4))
def test_degrees_given_in_full_are_the_layout(degrees: tuple[int, int, int, int]) -> None:
    pp, dp, sharding, mp = degrees
    config = config_of(pp_degree=pp, dp_degree=dp, sharding_degree=sharding, mp_degree=mp)
    assert layout_of(config, prod(degrees)).degrees == degrees
    assert processes_needed(config) == prod(degrees)


# Micro batches


def test_without_a_pipe_a_micro_batch_is_the_whole_share() -> None:
    assert micro_batch_of(4, global_batch_size=864) == 216


def test_a_given_micro_batch_size_stays() -> None:
    assert micro_batch_of(4, global_batch_size=64, micro_batch_size=2) == 2


def test_a_pipe_gets_two_micro_batches_per_pipe_stage_if_it_can() -> None:
    assert micro_batch_of(4, global_batch_size=64, pp_degree=4) == 8
    interleaved = {"pp_schedule": "Interleaved1F1B", "virtual_pp_degree": 2}
    assert micro_batch_of(4, global_batch_size=64, pp_degree=4, **interleaved) == 4
    assert micro_batch_of(4, global_batch_size=64, pp_degree=4, pp_schedule="ZBV") == 4


def test_a_short_batch_fills_the_pipe_at_least_once_if_it_can() -> None:
    assert micro_batch_of(4, global_batch_size=6, pp_degree=4) == 1
    assert micro_batch_of(4, global_batch_size=4, pp_degree=4, pp_schedule="GPipe") == 1
    assert micro_batch_of(4, global_batch_size=3, pp_degree=4) == 1


def test_an_interleaved_schedule_gets_rounds_of_one_size() -> None:
    # 18 and 9 micro batches over 4 processes make 4 and 2 rounds, which do not come out even; 6 make one.
    interleaved = {"pp_schedule": "Interleaved1F1B", "virtual_pp_degree": 2}
    assert micro_batch_of(4, global_batch_size=18, pp_degree=4, **interleaved) == 3


def test_accumulation_is_what_completes_the_global_batch() -> None:
    config = config_of(global_batch_size=64, micro_batch_size=2, dp_degree=2, sharding_degree=4)
    assert accumulation(resolve(config, 8, has_gpu=False)) == 4


# The rest


def test_resolving_leaves_auto_only_where_the_data_decides() -> None:
    resolved = resolve(Config(), 2, has_gpu=True)
    autos = [
        key
        for section in resolved.model_dump().values()
        for key, value in section.items()
        if value == "auto" and key != "resume"
    ]
    assert autos == ["vocab_size", "tokenizer", "eos_token_id", "decay_steps"]
    assert (resolved.model.ffn_hidden_size, resolved.model.max_position_embeddings) == (3072, 1024)
    assert (resolved.data.sample_stride, resolved.engine.num_train_epochs) == (1024, 1)


def test_resolving_twice_changes_nothing() -> None:
    resolved = resolve(Config(), 2, has_gpu=True)
    assert resolve(resolved, 2, has_gpu=False) == resolved


def test_resolving_leaves_the_config_it_was_given_alone() -> None:
    config = Config()
    resolve(config, 2, has_gpu=True)
    assert config == Config()


@pytest.mark.parametrize(
    ("device", "has_gpu", "resolved"),
    [("auto", True, "gpu"), ("auto", False, "cpu"), ("cpu", True, "cpu"), ("gpu", False, "gpu")],
)
def test_precision_and_compilation_follow_the_device(device: str, has_gpu: bool, resolved: str) -> None:
    config = resolve(config_of(device=device), 1, has_gpu)
    assert config.global_.device == resolved
    assert config.engine.use_amp is config.engine.compile is (resolved == "gpu")


def test_compilation_is_not_chosen_for_a_schedule_that_cannot_have_it() -> None:
    config = config_of(pp_degree=2, pp_schedule="ZBV")
    assert resolve(config, 2, has_gpu=True).engine.compile is False


def test_decay_ends_with_max_steps_if_that_is_known() -> None:
    assert resolve(config_of(max_steps=70), 1, False).optimizer.decay_steps == 70
    assert resolve(config_of(max_steps=70, decay_steps=50), 1, False).optimizer.decay_steps == 50
    assert resolve(config_of(max_steps=70), 1, False).engine.num_train_epochs is None


def test_what_the_data_decides_is_filled_in_only_where_it_was_left_open() -> None:
    assert with_vocab_size(Config(), 59).model.vocab_size == 59
    assert with_vocab_size(config_of(vocab_size=100), 59).model.vocab_size == 100
    assert with_decay_steps(Config(), 580).optimizer.decay_steps == 580
    assert with_decay_steps(config_of(decay_steps=100), 580).optimizer.decay_steps == 100


def test_the_vocabulary_is_padded_to_a_multiple_of_128() -> None:
    assert [padded_vocab_size(size) for size in (59, 128, 129, 50257, 50304)] == [128, 128, 256, 50304, 50304]


@given(st.integers(1, 10**4))
def test_divisors_are_all_the_numbers_that_divide(number: int) -> None:
    assert divisors(number) == [divisor for divisor in range(1, number + 1) if number % divisor == 0]
