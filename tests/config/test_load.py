from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.config.flags import parse_flags
from fourfold.config.keys import LEAVES, RENAMED, describe_keys
from fourfold.config.load import dump_config, load_config
from fourfold.config.presets import PRESETS
from fourfold.config.schema import Config, Data, Distributed, Engine, Global, Model, Optimizer, Profiler, Sharding
from fourfold.errors import ConfigError


def write(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text)
    return path


def problems_of(folder: Path, text: str | None, args: str = "") -> list[str]:
    _, overrides = parse_flags(args.split())
    with pytest.raises(ConfigError) as caught:
        load_config(None if text is None else write(folder, text), overrides)
    return caught.value.problems


def only_problem_of(folder: Path, text: str | None, args: str = "") -> str:
    (problem,) = problems_of(folder, text, args)
    return problem


def from_args(args: str) -> Config:
    path, overrides = parse_flags(args.split())
    return load_config(path, overrides)


# Names


def test_no_file_and_no_flags_are_the_defaults() -> None:
    assert load_config(None) == Config()


def test_section_names_match_in_any_case(tmp_path: Path) -> None:
    text = "Distributed:\n  Sharding:\n    sharding_degree: 8\n    sharding_offload: False\nGLOBAL:\n  seed: 7\n"
    config = load_config(write(tmp_path, text))
    assert (config.distributed.sharding.sharding_degree, config.global_.seed) == (8, 7)


def test_a_section_with_nothing_under_it_is_empty(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "model:\n")) == Config()


def test_an_unknown_key_gets_the_nearest_name(tmp_path: Path) -> None:
    problem = only_problem_of(tmp_path, "model:\n  hiden_size: 12\n")
    assert problem == "model.hiden_size = 12 is not a key; did you mean model.hidden_size?"


def test_the_nearest_name_is_sought_in_all_sections(tmp_path: Path) -> None:
    assert only_problem_of(tmp_path, "model:\n  max_lrr: 1\n").endswith("did you mean optimizer.max_lr?")


def test_a_key_in_the_wrong_section_is_told_its_own(tmp_path: Path) -> None:
    problem = only_problem_of(tmp_path, "distributed:\n  sharding_degree: 2\n")
    assert "move sharding_degree to the section distributed.sharding" in problem


def test_a_key_outside_all_sections_is_told_its_own(tmp_path: Path) -> None:
    assert "move max_lr to the section optimizer" in only_problem_of(tmp_path, "max_lr: 1\n")


def test_a_section_in_the_wrong_place_is_told_its_own(tmp_path: Path) -> None:
    problem = only_problem_of(tmp_path, "sharding:\n  sharding_degree: 2\n")
    assert problem.endswith("write this section as distributed.sharding")


def test_an_unknown_section_gets_the_nearest_name(tmp_path: Path) -> None:
    assert only_problem_of(tmp_path, "optimiser:\n  max_lr: 1\n").endswith("did you mean optimizer?")


@pytest.mark.parametrize("paddle_name", ["to_static", "save_total_limit", "log_freq", "logging_steps"])
def test_a_paddle_name_is_told_what_it_is_called_here(tmp_path: Path, paddle_name: str) -> None:
    here = LEAVES[RENAMED[paddle_name]].name
    assert f"it is called {here} here" in only_problem_of(tmp_path, f"engine:\n  {paddle_name}: 1\n")
    assert f"it is called --{RENAMED[paddle_name]} here" in only_problem_of(tmp_path, None, f"--{paddle_name} 1")


def test_every_paddle_name_leads_to_a_key_and_is_none_itself() -> None:
    assert all(ours in LEAVES and theirs not in LEAVES for theirs, ours in RENAMED.items())


def test_use_sharding_is_accepted_and_changes_nothing(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "distributed:\n  use_sharding: true\n")) == Config()
    assert (
        from_args("--use_sharding") == from_args("--use_sharding true") == from_args("--use_sharding false") == Config()
    )


def test_use_sharding_false_contradicts_a_sharding_degree(tmp_path: Path) -> None:
    problem = only_problem_of(tmp_path, None, "--use_sharding false --sharding_degree 4")
    assert "contradicts distributed.sharding.sharding_degree = 4" in problem


# Files


def test_corrupt_yaml_is_located(tmp_path: Path) -> None:
    problem = only_problem_of(tmp_path, "model:\n  hidden_size: [1\n  num_layers: 2\n")
    assert problem.startswith(f"{tmp_path}/config.yaml, line 3, column 13: this is not valid YAML")


def test_a_key_written_twice_is_located_and_the_rest_is_still_checked(tmp_path: Path) -> None:
    problems = problems_of(tmp_path, "model:\n  num_layers: 1\n  num_layers: 2\n  hidden_size: 0\n")
    assert (
        problems[0]
        == f"{tmp_path}/config.yaml, line 3, column 3: the key num_layers is written twice; keep one of them"
    )
    assert problems[1].startswith("model.hidden_size = 0")


def test_a_section_written_twice_in_different_case_is_refused(tmp_path: Path) -> None:
    assert "the section model is written twice" in only_problem_of(tmp_path, "model:\nModel:\n")


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n"])
def test_an_empty_file_is_refused(tmp_path: Path, text: str) -> None:
    assert "is empty" in only_problem_of(tmp_path, text)


def test_a_file_without_sections_is_refused(tmp_path: Path) -> None:
    assert "holds no sections" in only_problem_of(tmp_path, "- hidden_size\n")


def test_a_value_where_a_section_belongs_is_refused(tmp_path: Path) -> None:
    assert only_problem_of(tmp_path, "model: 3\n").startswith("model = 3 is not a section")


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "latin1.yaml").write_bytes(b"data: {input_dir: caf\xe9}\n")
    for name, what in [
        ("absent.yaml", "does not exist"),
        (".", "cannot be read"),
        ("latin1.yaml", "is not UTF-8 text"),
    ]:
        with pytest.raises(ConfigError) as caught:
            load_config(tmp_path / name)
        assert what in str(caught.value) and str(tmp_path) in str(caught.value)


# Values


@pytest.mark.parametrize(
    ("written", "value"), [("1e-4", 1e-4), ("1.5e-4", 1.5e-4), ("1E-4", 1e-4), (".5", 0.5), ("2", 2.0)]
)
def test_a_number_is_a_number_however_it_is_written(tmp_path: Path, written: str, value: float) -> None:
    assert load_config(write(tmp_path, f"optimizer:\n  max_lr: {written}\n")).optimizer.max_lr == value
    assert from_args(f"--max_lr {written}").optimizer.max_lr == value


@pytest.mark.parametrize("written", ["949,50,1", "[949, 50, 1]", "'949, 50, 1'"])
def test_split_is_a_list_or_text_with_commas(tmp_path: Path, written: str) -> None:
    assert load_config(write(tmp_path, f"data:\n  split: {written}\n")).data.split == (949, 50, 1)


def test_text_that_yaml_1_1_bends_stays_text(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, "engine:\n  output_dir: 2024-01-01\n  resume: no\n"))
    assert (config.engine.output_dir, config.engine.resume) == ("2024-01-01", "no")


@pytest.mark.parametrize("written", ["010", "10", "+10", "1_0", "1e1", "10.0"])
def test_ten_is_ten(tmp_path: Path, written: str) -> None:
    assert load_config(write(tmp_path, f"global:\n  seed: {written}\n")).global_.seed == 10


@pytest.mark.parametrize(
    ("section", "key", "written", "problem"),
    [
        (
            "model",
            "hidden_size",
            "wide",
            "model.hidden_size = 'wide' is not a whole number of at least 1; the default is 768",
        ),
        (
            "model",
            "hidden_size",
            "true",
            "model.hidden_size = true is not a whole number of at least 1; the default is 768",
        ),
        (
            "model",
            "hidden_size",
            "",
            "model.hidden_size = null is not a whole number of at least 1; the default is 768",
        ),
        (
            "model",
            "vocab_size",
            "1.5",
            "model.vocab_size = 1.5 is not a whole number of at least 1, or auto; the default is auto",
        ),
        (
            "engine",
            "compile",
            "maybe",
            "engine.compile = 'maybe' is not one of true, false or auto; the default is auto",
        ),
        ("engine", "output_dir", "3", "engine.output_dir = 3 is not text; put it in quotes"),
        ("data", "split", "1,2", "data.split = '1,2' is not three numbers such as 949,50,1; the default is 949,50,1"),
        ("data", "truncate", "0", "data.truncate = 0 is not a number greater than 0 and at most 1; the default is 1.0"),
        ("optimizer", "max_lr", ".nan", "optimizer.max_lr = nan is not a number greater than 0; the default is 0.0003"),
        (
            "optimizer",
            "grad_clip",
            ".inf",
            "optimizer.grad_clip = inf is not a number of at least 0; the default is 1.0",
        ),
        (
            "engine",
            "amp_dtype",
            "bf16",
            "engine.amp_dtype = 'bf16' is not one of bfloat16, float16 or float8; did you mean bfloat16?",
        ),
        (
            "engine",
            "float8_except",
            "first,tail",
            "engine.float8_except = 'first,tail' is not words such as first,head, or none; the default is head",
        ),
    ],
)
def test_a_wrong_value_is_told_the_legal_ones(
    tmp_path: Path, section: str, key: str, written: str, problem: str
) -> None:
    assert only_problem_of(tmp_path, f"{section}:\n  {key}: {written}\n") == problem


def test_every_problem_of_the_file_and_the_flags_is_told_at_once(tmp_path: Path) -> None:
    text = "model:\n  hiden_size: 1\n  num_layers: few\ndata:\n  max_lr: 1\n"
    problems = problems_of(tmp_path, text, "--sed 1 --max_steps --device tpu")
    assert [problem.split(" ")[0] for problem in problems] == [
        "model.hiden_size",
        "data.max_lr",
        "--sed",
        "--max_steps",
        "global.device",
        "model.num_layers",
    ]


# Flags


def test_the_config_file_is_given_in_any_of_three_ways() -> None:
    assert parse_flags(["a.yaml", "--seed", "1"]) == ("a.yaml", [("seed", "1")])
    assert parse_flags(["--seed", "1", "-c", "a.yaml"]) == ("a.yaml", [("seed", "1")])
    assert parse_flags(["--config=a.yaml", "--use_recompute"]) == ("a.yaml", [("use_recompute", True)])


def test_a_boolean_flag_does_not_swallow_the_config_file() -> None:
    assert parse_flags(["--use_recompute", "a.yaml"]) == ("a.yaml", [("use_recompute", True)])


@pytest.mark.parametrize(
    "args",
    [
        "--sharding_degree 2",
        "--sharding-degree=2",
        "-o distributed.sharding.sharding_degree=2",
        "-o Distributed.SHARDING.sharding_degree=2",
    ],
)
def test_a_key_is_set_in_any_of_four_spellings(args: str) -> None:
    assert from_args(args).distributed.sharding.sharding_degree == 2


def test_a_bare_boolean_is_true_and_its_words_are_read() -> None:
    assert from_args("--use_recompute --seed 1").model.use_recompute is True
    assert from_args("--use_recompute true").model.use_recompute is True
    assert from_args("--use_recompute False").model.use_recompute is False
    assert from_args("--tie_word_embeddings=no").model.tie_word_embeddings is False
    assert from_args("--compile auto").engine.compile == "auto"


def test_a_negative_number_is_a_value() -> None:
    assert from_args("--eval_iters -1 --use_recompute").engine.eval_iters == -1


def test_text_on_the_command_line_needs_no_quotes() -> None:
    assert from_args("--output_dir 2024").engine.output_dir == "2024"
    assert from_args("--input_dir null").data.input_dir is None


def test_every_key_is_a_flag() -> None:
    for leaf in describe_keys():
        text = "949,50,1" if leaf.key == "split" else "null" if leaf.default is None else leaf.default_text
        assert from_args(f"--{leaf.key} {text}") == Config(), leaf.key


def test_every_key_is_described() -> None:
    assert all(leaf.doc and leaf.choices and leaf.section for leaf in describe_keys())


def test_an_unknown_flag_gets_the_nearest_name(tmp_path: Path) -> None:
    assert only_problem_of(tmp_path, None, "--hiden-size 3") == "--hiden_size is not a key; did you mean --hidden_size?"


def test_an_assignment_in_the_wrong_section_is_told_its_own(tmp_path: Path) -> None:
    assert "write optimizer.max_lr or --max_lr" in only_problem_of(tmp_path, None, "-o model.max_lr=1")


@pytest.mark.parametrize("args", ["--hidden_size", "--hidden_size --seed 1", "--hidden_size="])
def test_a_flag_without_its_value_is_told_what_it_takes(tmp_path: Path, args: str) -> None:
    problem = only_problem_of(tmp_path, None, args)
    assert problem == "--hidden_size is not followed by a value; it takes a whole number of at least 1"


@pytest.mark.parametrize(
    ("args", "what"),
    [
        ("a.yaml b.yaml", "a run takes one"),
        ("a.yaml -c b.yaml", "a run takes one"),
        ("-c", "write -c CONFIG"),
        ("-o model.hidden_size", "write -o section.key=value"),
        ("-x 3", "-x is not a flag"),
    ],
)
def test_a_malformed_command_line_is_refused(args: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        parse_flags(args.split())


def test_the_flags_of_a_paddle_command_line_work_as_they_stand() -> None:
    config = from_args(
        "--model_type gpt --model_name_or_path gpt2-en --input_dir ./data --output_dir output/x --max_seq_len 1024 "
        "--micro_batch_size 8 --global_batch_size 32 --sharding_degree 4 --mp_degree 2 --dp_degree 1 --pp_degree 1 "
        "--use_sharding true --use_amp true --use_recompute true --max_lr 0.00015 --min_lr 0.00001 --max_steps 500000 "
        "--save_steps 100000 --decay_steps 320000 --weight_decay 0.01 --warmup_rate 0.01 --grad_clip 1.0 "
        "--logging_freq 1 --eval_freq 10000 --device gpu"
    )
    assert config.model.use_recompute and config.engine.use_amp is True and config.optimizer.min_lr == 1e-5


# Who wins


def test_flags_win_over_the_file_and_the_last_flag_over_the_first(tmp_path: Path) -> None:
    path = write(tmp_path, "global:\n  seed: 1\n  global_batch_size: 8\n")
    config = load_config(path, [("seed", "2"), ("seed", "3")])
    assert (config.global_.seed, config.global_.global_batch_size) == (3, 8)


def test_a_preset_wins_over_defaults_but_not_over_the_file_or_a_flag(tmp_path: Path) -> None:
    path = write(tmp_path, "model:\n  model_name_or_path: gpt3-1.3B\n  num_layers: 2\n")
    model = load_config(path, [("num_attention_heads", "8")]).model
    assert (model.hidden_size, model.num_layers, model.num_attention_heads, model.vocab_size) == (2048, 2, 8, 50304)


def test_a_preset_is_found_in_any_case_and_gpt3_with_paddles_suffix() -> None:
    for name in ("gpt3-13B", "GPT3-13b", "gpt3-13B-en"):
        assert from_args(f"--model_name_or_path {name}").model.hidden_size == 5120


def test_every_preset_has_heads_that_divide_its_width() -> None:
    assert all(fields["hidden_size"] % fields["num_attention_heads"] == 0 for fields in PRESETS.values())


def test_an_unknown_model_is_told_the_presets(tmp_path: Path) -> None:
    problem = only_problem_of(tmp_path, None, "--model_name_or_path gpt5")
    assert "'gpt5' is neither a preset nor a checkpoint" in problem and "gpt3-175B" in problem


def test_a_folder_without_a_config_is_no_checkpoint(tmp_path: Path) -> None:
    assert "neither a preset nor a checkpoint" in only_problem_of(tmp_path, None, f"--model_name_or_path {tmp_path}")


def test_a_checkpoint_as_model_gives_its_shape(tmp_path: Path) -> None:
    saved = from_args("--num_layers 3 --hidden_size 48 --num_attention_heads 6 --ffn_hidden_size 96 --vocab_size 77")
    (tmp_path / "config.yaml").write_text(dump_config(saved), encoding="utf-8")
    found = from_args(f"--model_name_or_path {tmp_path} --hidden_dropout_prob 0.1 --ffn_hidden_size auto").model
    assert (found.num_layers, found.hidden_size, found.num_attention_heads) == (3, 48, 6)
    assert (found.ffn_hidden_size, found.vocab_size, found.hidden_dropout_prob) == (96, 77, 0.1)
    problem = only_problem_of(tmp_path, None, f"--model_name_or_path {tmp_path} --num_layers 4")
    assert "model.num_layers = 4 differs from 3 in the checkpoint" in problem


def test_max_time_is_written_as_slurm_does() -> None:
    for written, seconds in {"90": 90, "30:00": 1800, "1:30:00": 5400, "2-00:00:30": 172830}.items():
        assert from_args(f"--max_time {written}").engine.max_time == seconds


# Dump

counts, shares = st.integers(1, 10**6), st.floats(0, 1, exclude_max=True)
positives = st.floats(1e-12, 1e6)
texts = st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(
    ["1e-4", "yes", "010", "null", "2024-01-01", "a: b", "~", "\x85"]
)
configs = st.builds(
    lambda **sections: Config(**{"global": sections.pop("global_"), **sections}),
    global_=st.builds(Global, seed=st.integers(0, 2**63 - 1), micro_batch_size=counts | st.just("auto")),
    model=st.builds(
        Model,
        model_name_or_path=st.none() | st.sampled_from(sorted(PRESETS)),
        hidden_size=counts,
        vocab_size=counts | st.just("auto"),
        hidden_dropout_prob=shares,
        initializer_range=positives,
    ),
    data=st.builds(
        Data,
        input_dir=st.none() | texts,
        split=st.tuples(positives, positives, positives),
        truncate=positives.map(lambda x: min(x, 1.0)),
    ),
    optimizer=st.builds(
        Optimizer, max_lr=positives, min_lr=positives, adam_epsilon=positives, decay_steps=counts | st.just("auto")
    ),
    distributed=st.builds(
        Distributed,
        pp_schedule=st.sampled_from(["GPipe", "1F1B", "ZBV"]),
        sharding=st.builds(
            Sharding, sharding_stage=st.sampled_from([1, 2, 3]), sharding_degree=counts | st.just("auto")
        ),
    ),
    engine=st.builds(
        Engine,
        max_steps=st.none() | counts,
        eval_iters=st.integers(-1, 10),
        output_dir=texts,
        resume=texts,
        use_amp=st.booleans() | st.just("auto"),
        compile=st.booleans() | st.just("auto"),
    ),
    profiler=st.builds(Profiler, enable=st.booleans(), start_step=counts),
)


@given(config=configs)
def test_a_dumped_config_loads_back_equal(tmp_path_factory: pytest.TempPathFactory, config: Config) -> None:
    path = tmp_path_factory.getbasetemp() / "dumped.yaml"
    path.write_text(dump_config(config), encoding="utf-8", newline="")
    loaded = load_config(path)
    assert loaded == config
    assert dump_config(loaded) == dump_config(config)


def test_a_dump_has_the_sections_of_the_schema_in_their_order() -> None:
    lines = dump_config(Config()).splitlines()
    headings = [line.rstrip(":") for line in lines if not line.startswith(" ")]
    assert headings == ["global", "model", "data", "optimizer", "distributed", "engine", "profiler"]
