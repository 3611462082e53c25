import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.config.load import load_config
from fourfold.config.problems import problems
from fourfold.config.resolve import accumulation, layout_of, processes_needed, resolve
from fourfold.config.schema import Config


def config_of(**keys: object) -> Config:
    keys = {"input_dir": "builtin:pydoc", **keys}
    return load_config(None, [(key, str(value)) for key, value in keys.items()])


def problems_of(world_size: int | None = None, **keys: object) -> list[str]:
    config = config_of(**keys)
    return problems(config, processes_needed(config) if world_size is None else world_size)


def only_problem_of(world_size: int | None = None, **keys: object) -> str:
    (problem,) = problems_of(world_size, **keys)
    return problem


def test_the_defaults_with_a_text_have_no_problems() -> None:
    assert problems_of() == []


def test_a_missing_text_is_a_problem() -> None:
    assert problems(Config(), 1) == [
        "data.input_dir is missing; give a text file, a folder of text files, token files, or builtin:pydoc"
    ]


def test_every_problem_is_told_at_once() -> None:
    found = problems_of(8, num_attention_heads=7, mp_degree=3, max_steps=1, num_train_epochs=1, min_lr=1, split="0,0,0")
    assert [problem.split(" ")[0] for problem in found] == [
        "distributed:",
        "model.num_attention_heads",
        "engine.max_steps",
        "data.split",
        "optimizer.min_lr",
        "model.num_attention_heads",
    ]


def test_problems_change_nothing_and_are_the_same_for_a_resolved_config() -> None:
    config = config_of(num_attention_heads=7, pp_degree=2, global_batch_size=3)
    before = config.model_dump()
    assert problems(config, 2) == problems(resolve(config, 2, has_gpu=False), 2)
    assert config.model_dump() == before


# The model


def test_heads_must_divide_the_width() -> None:
    assert only_problem_of(hidden_size=12, num_attention_heads=5) == (
        "model.num_attention_heads = 5 does not divide model.hidden_size = 12; "
        "num_attention_heads can be 1, 2, 3, 4, 6 or 12"
    )


def test_a_long_list_of_legal_values_keeps_to_the_nearest() -> None:
    problem = only_problem_of(hidden_size=5040, num_attention_heads=50)
    assert problem.endswith("can be 28, 30, 35, 36, 40, 42, 45, 48, 56, 60, 63 or 70")


def test_a_sequence_must_have_a_position_for_each_token() -> None:
    problem = only_problem_of(max_seq_len=2048, max_position_embeddings=1024)
    assert "max_seq_len can be at most 1024, or raise max_position_embeddings" in problem


# The degrees


def test_degrees_must_make_the_world_size() -> None:
    assert only_problem_of(8, dp_degree=2, mp_degree=1, pp_degree=1, sharding_degree=2) == (
        "distributed: pp_degree = 1 * dp_degree = 2 * sharding_degree = 2 * mp_degree = 1 makes 4 processes, but there "
        "are 8; set pp_degree to 2, set dp_degree to 4, set sharding_degree to 4, set mp_degree to 2 "
        "or start 4 processes"
    )


def test_a_world_size_that_no_single_degree_can_mend_still_has_a_remedy() -> None:
    assert only_problem_of(7, dp_degree=2, sharding_degree=2).endswith("but there are 7; start 4 processes")


def test_mp_must_divide_the_heads() -> None:
    assert only_problem_of(num_attention_heads=12, mp_degree=8) == (
        "model.num_attention_heads = 12 cannot be split by mp_degree = 8; mp_degree can be 1, 2, 3, 4, 6 or 12"
    )


def test_mp_must_divide_the_feed_forward_width_and_the_padded_vocabulary() -> None:
    found = problems_of(num_attention_heads=12, mp_degree=3, ffn_hidden_size=1024, vocab_size=59)
    assert found == [
        "model.ffn_hidden_size = 1024 cannot be split by mp_degree = 3; mp_degree can be 1, 2 or 4",
        "model.vocab_size = 59, padded to 128, cannot be split by mp_degree = 3; mp_degree can be 1, 2 or 4",
    ]


def test_a_vocabulary_not_yet_known_is_not_judged() -> None:
    assert problems_of(num_attention_heads=12, mp_degree=3) == []


def test_sequence_parallel_needs_mp_and_a_length_it_divides() -> None:
    assert "does nothing with mp_degree = 1" in only_problem_of(sequence_parallel=True)
    problem = only_problem_of(sequence_parallel=True, mp_degree=4, max_seq_len=1022)
    assert "max_seq_len can be 1020 or 1024" in problem


def test_float8_needs_matrices_of_whole_sixteens() -> None:
    assert problems_of(amp_dtype="float8", mp_degree=4) == []
    assert only_problem_of(amp_dtype="float8", hidden_size=1032, ffn_hidden_size=4096, num_attention_heads=8) == (
        "model.hidden_size = 1032 does not make 8-bit matrices of a multiple of 16 on each process; "
        "hidden_size can be 1024 or 1040"
    )
    many = {"mp_degree": 16, "num_attention_heads": 16, "hidden_size": 1024, "vocab_size": 50304}
    assert problems_of(amp_dtype="float8", **many) == []
    assert "padded to 50304" in only_problem_of(amp_dtype="float8", float8_except="none", **many)
    problem = only_problem_of(amp_dtype="float8", mp_degree=2, ffn_hidden_size=3088)
    assert problem.endswith("ffn_hidden_size can be 3072 or 3104")
    problem = only_problem_of(amp_dtype="float8", global_batch_size=3, max_seq_len=1020)
    assert "makes 3060 rows" in problem and problem.endswith("max_seq_len can be 1008 or 1024")


def test_a_sharding_stage_needs_a_sharding_degree() -> None:
    assert "does nothing with sharding_degree = 1" in only_problem_of(sharding_stage=3)
    assert problems_of(sharding_stage=3, sharding_degree=2) == []
    assert problems_of(sharding_offload=True) == []


# The batch


def test_the_batch_must_divide_among_the_data_ranks() -> None:
    problem = only_problem_of(global_batch_size=30, dp_degree=2, sharding_degree=2)
    assert "global_batch_size can be 28 or 32, or any other multiple of 4" in problem


def test_a_batch_smaller_than_the_data_ranks_is_told_the_smallest() -> None:
    assert "global_batch_size can be 8, or" in only_problem_of(global_batch_size=3, dp_degree=8)


def test_the_micro_batch_must_divide_a_data_ranks_share() -> None:
    problem = only_problem_of(global_batch_size=32, micro_batch_size=3, dp_degree=4)
    assert "micro_batch_size can be 1, 2, 4 or 8, or global_batch_size 24 or 36" in problem


# The pipe


def test_each_pipe_stage_needs_a_layer() -> None:
    problem = only_problem_of(num_layers=4, pp_degree=8)
    assert "model.num_layers = 4 is fewer than the 8 pipe stages" in problem and "at most 4" in problem
    interleaved = {"pp_schedule": "Interleaved1F1B", "virtual_pp_degree": 3}
    assert "pp_degree can be at most 1" in only_problem_of(num_layers=4, pp_degree=2, **interleaved)
    assert "pp_degree can be at most 2" in only_problem_of(num_layers=4, pp_degree=4, pp_schedule="ZBV")


def test_virtual_pipe_stages_need_a_pipe_and_a_schedule_that_has_them() -> None:
    assert "does nothing with pp_degree = 1" in only_problem_of(virtual_pp_degree=2)
    problem = only_problem_of(pp_degree=2, virtual_pp_degree=2)
    assert problem.endswith("virtual_pp_degree can be 1, or pp_schedule Interleaved1F1B or InterleavedZeroBubble")
    assert problems_of(pp_degree=2, virtual_pp_degree=2, pp_schedule="Interleaved1F1B") == []


@pytest.mark.parametrize("schedule", ["ZBV", "DualPipeV"])
def test_a_v_shaped_schedule_has_two_pipe_stages_on_a_process(schedule: str) -> None:
    assert problems_of(pp_degree=2, pp_schedule=schedule) == []
    assert problems_of(pp_degree=2, pp_schedule=schedule, virtual_pp_degree=2) == []
    assert "use 1 or 2" in only_problem_of(pp_degree=2, pp_schedule=schedule, virtual_pp_degree=3)


@pytest.mark.parametrize(("schedule", "fewest"), [("1F1B", 4), ("DualPipeV", 8)])
def test_a_schedule_is_given_its_fewest_micro_batches(schedule: str, fewest: int) -> None:
    keys = {"pp_degree": 4, "pp_schedule": schedule, "num_layers": 8, "micro_batch_size": 1}
    assert problems_of(**keys, global_batch_size=fewest) == []
    problem = only_problem_of(**keys, global_batch_size=fewest - 1)
    assert f"needs at least {fewest} micro batches" in problem and f"global_batch_size can be {fewest}" in problem


def test_a_micro_batch_too_large_for_the_schedule_is_told_those_that_fit() -> None:
    problem = only_problem_of(pp_degree=4, micro_batch_size=8, global_batch_size=16)
    assert "makes 2; micro_batch_size can be 1, 2 or 4, or global_batch_size can be 32" in problem


def test_an_interleaved_schedule_wants_rounds_of_one_size() -> None:
    keys = {"pp_degree": 4, "pp_schedule": "Interleaved1F1B", "micro_batch_size": 1}
    assert problems_of(**keys, global_batch_size=10) == []
    assert problems_of(**keys, global_batch_size=3) == []
    problem = only_problem_of(**keys, global_batch_size=9)
    assert "needs a multiple of 2 (= 9 // pp_degree)" in problem
    assert "micro_batch_size can be 3 or 9, or global_batch_size can be 8 or 12" in problem


def test_a_schedule_that_splits_the_backward_pass_cannot_be_compiled() -> None:
    assert "engine.compile = true does not work" in only_problem_of(pp_degree=2, pp_schedule="ZBV", compile=True)
    assert problems_of(pp_degree=2, pp_schedule="ZBV") == []


# The run


def test_the_end_of_a_run_is_given_once() -> None:
    assert "give one of them" in only_problem_of(max_steps=1, num_train_epochs=1)


def test_the_learning_rate_falls() -> None:
    assert only_problem_of(max_lr=1e-5) == (
        "optimizer.min_lr = 3e-05 is above optimizer.max_lr = 1e-05; min_lr can be at most 1e-05"
    )
    assert problems_of(max_lr=1e-5, lr_decay_style="constant") == []


def test_warm_up_leaves_room_for_the_decay() -> None:
    assert "leaves no step for the cosine decay" in only_problem_of(warmup_rate=1)
    assert problems_of(warmup_rate=1, lr_decay_style="constant") == []


def test_the_split_leaves_something_to_train_and_to_evaluate_on() -> None:
    assert "leaves nothing at all" in only_problem_of(split="0,0,0")
    assert "leaves nothing to train on" in only_problem_of(split="0,1,1")
    assert "leaves nothing to evaluate on" in only_problem_of(split="1,0,0")
    assert problems_of(split="1,0,0", eval_iters=0) == []


def test_the_best_checkpoint_needs_evaluations() -> None:
    assert "engine.keep_best = true needs evaluations" in only_problem_of(keep_best=True, eval_iters=0)
    assert problems_of(keep_best=True, eval_iters=-1) == []


def test_the_profiler_starts_before_it_stops_and_before_the_run_ends() -> None:
    assert "stop_step must be at least 9" in only_problem_of(enable=True, start_step=9)
    assert "start_step can be at most 3" in only_problem_of(enable=True, max_steps=3)
    assert problems_of(start_step=9, max_steps=3) == []


degrees = st.sampled_from([1, 2, 3, 4, "auto"])


@given(
    world_size=st.integers(1, 16),
    batch=st.integers(1, 64),
    micro=st.integers(1, 8) | st.just("auto"),
    schedule=st.sampled_from(["GPipe", "1F1B", "Interleaved1F1B", "ZBV", "DualPipeV"]),
    axes=st.tuples(degrees, degrees, degrees, degrees),
)
def test_a_config_without_problems_has_a_layout_and_a_whole_number_of_micro_batches(
    world_size: int, batch: int, micro: object, schedule: str, axes: tuple[object, object, object, object]
) -> None:
    pp, dp, sharding, mp = axes
    config = config_of(
        global_batch_size=batch,
        micro_batch_size=micro,
        pp_schedule=schedule,
        pp_degree=pp,
        dp_degree=dp,
        sharding_degree=sharding,
        mp_degree=mp,
    )
    if problems(config, world_size):
        return
    layout, resolved = layout_of(config, world_size), resolve(config, world_size, has_gpu=False)
    assert layout.world_size == world_size
    assert resolved.global_.micro_batch_size * layout.data_ranks * accumulation(resolved) == batch
