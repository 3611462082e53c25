import itertools
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fourfold.checkpoint.store import complete_checkpoints
from fourfold.config.load import load_config
from fourfold.config.resolve import resolve
from fourfold.config.schema import Config
from fourfold.errors import CheckpointError, ConfigError, DataError
from fourfold.train import loop
from fourfold.train.loop import Outcome
from tests.tiny import curve, metrics_of, run_training, tiny_config, write_text

# 49 samples of 16 characters: eight steps of eight rows go through one epoch and into the next, in mid-batch
SHORT_TEXT = 1000


def stopped_after(config: Config, step: int, monkeypatch: pytest.MonkeyPatch, number: int = signal.SIGINT) -> Outcome:
    """The run, asked to stop just before the given step, which it finishes."""
    real, taken = loop.train_step, itertools.count(1)

    def counted(*args: Any) -> Any:
        result = real(*args)
        if next(taken) == step - 1:
            signal.raise_signal(number)
        return result

    with monkeypatch.context() as patched:
        patched.setattr(loop, "train_step", counted)
        return run_training(config)


def weights(outcome: Outcome) -> dict[str, torch.Tensor]:
    return dict(outcome.run.parallel.named_parameters())


def assert_equal_weights(one: Outcome, other: Outcome) -> None:
    found, expected = weights(one), weights(other)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    "keys",
    [
        {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1, "micro_batch_size": 2},
        {"hidden_dropout_prob": 0.1, "use_amp": True, "amp_dtype": "float16", "scale_loss": 2.0**18},
        {"use_amp": True, "use_recompute": True, "num_workers": 0},
    ],
    ids=["dropouts and accumulation", "float16", "bfloat16 and recompute"],
)
def test_a_resumed_run_goes_on_as_if_it_had_never_stopped(
    tmp_path: Path, keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_text(tmp_path, SHORT_TEXT)
    whole = run_training(tiny_config(tmp_path, output_dir=tmp_path / "whole", **keys))
    config = tiny_config(tmp_path, output_dir=tmp_path / "parts", **keys)

    first = stopped_after(config, 4, monkeypatch)
    assert (first.step, first.exit_code) == (4, 130)
    second = run_training(config)
    assert (second.run.first_step, second.step, second.exit_code) == (4, 8, 0)

    for key in ("loss", "grad_norm", "lr", "epoch", "batch", "skipped_steps", "loss_scale"):
        assert curve(tmp_path / "parts", key) == curve(tmp_path / "whole", key), key
    assert_equal_weights(second, whole)
    assert len(set(curve(tmp_path / "whole", "epoch").values())) == 2, "the run crosses the end of an epoch"
    if "scale_loss" in keys:
        assert curve(tmp_path / "whole", "skipped_steps")[4] > 0, "the scale has a past that must be remembered"


def test_what_a_killed_run_wrote_after_its_checkpoint_is_written_once(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, save_steps=3, eval_freq=2, eval_iters=1, keep_last=0)
    run_training(config)
    expected = curve(tmp_path / "run", "loss")
    folder = tmp_path / "run" / "checkpoints"
    for step in (6, 8):
        shutil.rmtree(folder / f"step_{step:08d}")
    with (tmp_path / "run" / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 9, "loss": 3.0')  # a line that a kill has cut

    outcome = run_training(config)

    assert outcome.run.first_step == 3
    train_steps = [values["step"] for values in metrics_of(tmp_path / "run") if "loss" in values]
    eval_steps = [values["step"] for values in metrics_of(tmp_path / "run") if "eval_loss" in values]
    assert train_steps == list(range(1, 9))
    assert eval_steps == [2, 4, 6, 8]
    assert curve(tmp_path / "run", "loss") == expected


def test_the_config_left_behind_repeats_the_run_bit_for_bit(tmp_path: Path) -> None:
    keys = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1, "seed": 77, "micro_batch_size": 4}
    first = run_training(tiny_config(tmp_path, **keys))
    left = load_config(tmp_path / "run" / "config.yaml", [("output_dir", str(tmp_path / "again"))])
    again = run_training(resolve(left, 1, has_gpu=False))
    assert curve(tmp_path / "again", "loss") == curve(tmp_path / "run", "loss")
    assert_equal_weights(again, first)


def test_a_run_counted_in_epochs_sees_every_sample_and_repeats_from_its_config(tmp_path: Path) -> None:
    write_text(tmp_path, SHORT_TEXT)
    config = load_config(
        None,
        [
            (key, str(value))
            for key, value in {
                "input_dir": tmp_path / "text.txt",
                "output_dir": tmp_path / "run",
                "num_train_epochs": 2,
                "max_seq_len": 16,
                "hidden_size": 16,
                "num_layers": 1,
                "num_attention_heads": 2,
                "global_batch_size": 8,
                "split": "80,20,0",
                "logging_freq": 1,
                "eval_iters": 0,
            }.items()
        ],
    )
    outcome = run_training(resolve(config, 1, has_gpu=False))
    samples = len(outcome.run.corpus.splits.train)
    assert outcome.step == -(-2 * samples // 8)
    assert outcome.run.config.optimizer.decay_steps == outcome.step
    left = load_config(tmp_path / "run" / "config.yaml", [("output_dir", str(tmp_path / "again"))])
    run_training(resolve(left, 1, has_gpu=False))
    assert curve(tmp_path / "again", "loss") == curve(tmp_path / "run", "loss")


def test_seeds_differ(tmp_path: Path) -> None:
    for seed in (1, 2):
        run_training(tiny_config(tmp_path, max_steps=1, seed=seed, output_dir=tmp_path / str(seed)))
    assert curve(tmp_path / "1", "loss") != curve(tmp_path / "2", "loss")


def test_a_finished_run_started_again_changes_nothing(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, max_steps=3)
    first = run_training(config)
    metrics = (tmp_path / "run" / "metrics.jsonl").read_text()
    [checkpoint] = complete_checkpoints(tmp_path / "run")
    manifest = (checkpoint / "manifest.json").stat().st_mtime_ns

    again = run_training(config)

    assert (again.step, again.exit_code) == (3, 0)
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == metrics
    assert (checkpoint / "manifest.json").stat().st_mtime_ns == manifest
    assert_equal_weights(again, first)


def test_checkpoints_come_every_save_steps_and_at_the_end_and_the_last_few_stay(tmp_path: Path) -> None:
    run_training(tiny_config(tmp_path, max_steps=7, save_steps=2, keep_last=2, output_dir=tmp_path / "two"))
    run_training(tiny_config(tmp_path, max_steps=7, save_steps=2, keep_last=0, output_dir=tmp_path / "all"))
    assert [path.name for path in complete_checkpoints(tmp_path / "two")] == ["step_00000006", "step_00000007"]
    assert [path.name for path in complete_checkpoints(tmp_path / "all")] == [
        f"step_{step:08d}" for step in (2, 4, 6, 7)
    ]


def test_checkpoints_come_every_save_epochs(tmp_path: Path) -> None:
    write_text(tmp_path, SHORT_TEXT)
    config = tiny_config(tmp_path, max_steps=26, save_epochs=2, keep_last=0)
    samples = len(run_training(config).run.corpus.splits.train)
    expected = [-(-epochs * samples // 8) for epochs in (2, 4)]  # the first steps that finish them
    assert [path.name for path in complete_checkpoints(tmp_path / "run")] == [
        f"step_{step:08d}" for step in (*expected, 26)
    ]


def test_sigterm_saves_too_and_says_so_by_its_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = stopped_after(tiny_config(tmp_path), 3, monkeypatch, signal.SIGTERM)
    assert (outcome.step, outcome.exit_code) == (3, 143)
    assert len(complete_checkpoints(tmp_path / "run")) == 1


def test_a_second_ctrl_c_stops_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(loop, "train_step", interrupted)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run_training(tiny_config(tmp_path))
    assert signal.getsignal(signal.SIGINT) is before, "and Ctrl-C means again what it meant"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", 64),
        ("num_layers", 3),
        ("num_attention_heads", 2),
        ("ffn_hidden_size", 96),
        ("max_position_embeddings", 32),
        ("tie_word_embeddings", False),
        ("vocab_size", 200),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, key: str, value: object, trained: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"^model\.{key} = {value} differs from .* in the checkpoint"):
        run_training(tiny_config(tmp_path, output_dir=trained, input_dir=trained.parent / "text.txt", **{key: value}))


def test_every_difference_from_the_checkpoints_model_is_named_at_once(tmp_path: Path, trained: Path) -> None:
    keys = {"hidden_size": 64, "num_layers": 3, "input_dir": trained.parent / "text.txt"}
    with pytest.raises(CheckpointError) as caught:
        run_training(tiny_config(tmp_path, output_dir=trained, **keys))
    sentences = str(caught.value).splitlines()
    assert [sentence.split(" ")[0] for sentence in sentences] == [
        "model.hidden_size",
        "model.num_layers",
        "model.ffn_hidden_size",
    ]


def test_a_text_with_another_vocabulary_is_refused(tmp_path: Path, trained: Path) -> None:
    (tmp_path / "text.txt").write_text((trained.parent / "text.txt").read_text() + "éß" * 20)
    with pytest.raises(DataError, match=r"different characters, not the .* of the checkpoint's tokenizer: new are"):
        run_training(tiny_config(tmp_path, output_dir=trained))


def test_a_text_that_changed_under_the_same_vocabulary_is_said_in_the_log(tmp_path: Path, trained: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    text = (trained.parent / "text.txt").read_text()
    (tmp_path / "text.txt").write_text(text[500:] + text[:500])
    run_training(tiny_config(tmp_path, max_steps=2))
    assert "text.txt has changed since" in (folder / "logs" / "workerlog.0").read_text()


def test_a_vocabulary_smaller_than_the_text_needs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.vocab_size = 5 is smaller than the tokenizer's \d+ tokens"):
        run_training(tiny_config(tmp_path, vocab_size=5))


def test_a_run_may_go_on_from_another_runs_checkpoint(tmp_path: Path, trained: Path) -> None:
    keys = {"output_dir": tmp_path / "run", "input_dir": trained.parent / "text.txt", "max_steps": 4}
    whole = run_training(tiny_config(tmp_path, **{**keys, "output_dir": tmp_path / "whole"}, decay_steps=4))
    for source in (trained, complete_checkpoints(trained)[0]):
        outcome = run_training(tiny_config(tmp_path, resume=source, decay_steps=4, **keys))
        assert outcome.run.first_step == 2
        shutil.rmtree(tmp_path / "run")
    assert whole.step == 4


@pytest.mark.parametrize("resume", ["never", "step 2"])
def test_a_run_is_not_begun_among_checkpoints_that_it_would_mistake_for_its_own(tmp_path: Path, resume: str) -> None:
    """They would keep its own from being saved, and the next `resume: auto` would go on from them."""
    run_training(tiny_config(tmp_path, max_steps=4, save_steps=2))
    [second, fourth] = complete_checkpoints(tmp_path / "run")
    with pytest.raises(CheckpointError, match="step_00000004 is newer than where this run begins"):
        run_training(tiny_config(tmp_path, max_steps=4, resume="never" if resume == "never" else second))
    assert complete_checkpoints(tmp_path / "run") == [second, fourth]


@pytest.mark.parametrize(
    "which", ["tokenizer.json", "config.yaml", "progress.json", "tensors/index.json", "tensors/rank_00000.safetensors"]
)
def test_a_damaged_checkpoint_is_passed_over_loudly_and_the_run_goes_on_from_the_one_before(
    tmp_path: Path, which: str
) -> None:
    config = tiny_config(tmp_path, max_steps=4, save_steps=2, num_layers=1)
    run_training(config)
    expected = curve(tmp_path / "run", "loss")
    file = complete_checkpoints(tmp_path / "run")[-1] / which
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)

    outcome = run_training(config)

    assert outcome.run.first_step == 2
    assert curve(tmp_path / "run", "loss") == expected
    [line] = [line for line in (tmp_path / "run" / "logs" / "workerlog.0").read_text().splitlines() if "PASSED" in line]
    assert str(file) in line


def test_two_runs_do_not_share_an_output_dir(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, max_steps=1)
    holder = (
        "import sys; from pathlib import Path\n"
        "from tests.tiny import alone; from fourfold.checkpoint.lock import Lock\n"
        "with alone(), Lock(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", holder, str(tmp_path / "run")],
        cwd=root,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(CheckpointError, match=rf"is in use by another run, process {other.pid} on "):
            run_training(config)
        other.kill()
    assert run_training(config).step == 1, "a lock ends with its process, however that ends"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a finished run of two steps; its text lies beside it."""
    folder = tmp_path_factory.mktemp("trained")
    run_training(tiny_config(folder, max_steps=2))
    return folder / "run"


def test_what_a_run_leaves_is_where_it_should_be(trained: Path) -> None:
    assert {path.name for path in trained.iterdir()} == {
        ".lock",
        "config.yaml",
        "metrics.jsonl",
        "checkpoints",
        "logs",
        "tensorboard",
    }
    [checkpoint] = complete_checkpoints(trained)
    assert {path.name for path in checkpoint.iterdir()} == {
        "config.yaml",
        "manifest.json",
        "progress.json",
        "tensors",
        "tokenizer.json",
    }
    assert json.loads((checkpoint / "progress.json").read_text())["step"] == 2


def test_float8_that_is_not_used_is_said(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, max_steps=1, amp_dtype="float8")
    run_training(config)
    [log_file] = (Path(config.engine.output_dir) / "logs").iterdir()
    assert "engine.amp_dtype = float8 has no effect" in log_file.read_text(encoding="utf-8")
