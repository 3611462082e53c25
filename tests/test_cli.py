"""The program as a user meets it: real processes, their exit codes and what they print."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch

from fourfold.checkpoint.store import complete_checkpoints
from fourfold.cli import main
from fourfold.config.keys import describe_keys
from fourfold.config.load import load_config
from fourfold.config.resolve import resolve
from fourfold.train import loop
from tests.tiny import curve, metrics_of, run_training, tiny_config, write_text

PROGRAM = [sys.executable, "-m", "fourfold"]
TINY = """\
global: {device: cpu, global_batch_size: 8}
model: {hidden_size: 32, num_layers: 1, num_attention_heads: 4}
data: {input_dir: text.txt, max_seq_len: 16, split: "80,20,0"}
engine: {logging_freq: 1, eval_freq: 0, eval_iters: 2, save_steps: 0, output_dir: run}
"""


def run(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PROGRAM, *arguments], cwd=folder, capture_output=True, text=True, timeout=120, check=False)


# What is refused, by name. The first two by a process of their own, two at a time, since starting one takes seconds.
OUTSIDE = {
    "several problems": ["train", "wrong.yaml", "--max_stepz", "3", "--split", "1,2"],
    "debug": ["train", "tiny.yaml", "--max_stepz", "3", "--debug"],
}
INSIDE = {
    "problems between keys": ["train", "tiny.yaml", "-o", "model.num_attention_heads=5", "-o", "optimizer.min_lr=1"],
    "broken YAML": ["train", "broken.yaml"],
    "missing file": ["train", "-c", "nowhere.yaml"],
    "no text": ["train", "tiny.yaml", "--input_dir", "nowhere.txt", "--max_steps", "1"],
    "unwritable": ["train", "tiny.yaml", "--output_dir", "text.txt"],
    "not a checkpoint": ["generate", "."],
    "empty prompt": ["generate", "trained", "--prompt", ""],
    "unknown character": ["generate", "trained", "--prompt", "\N{SNOWMAN}"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("refused")
    write_text(folder)
    (folder / "tiny.yaml").write_text(TINY)
    (folder / "wrong.yaml").write_text("model: {num_layers: many, hiden_size: 3}\nengin: {}\ndata: {seed: 1}\n")
    (folder / "broken.yaml").write_text("model: {num_layers: 1\ndata: [")
    run_training(tiny_config(folder, max_steps=1, num_layers=1, output_dir=folder / "trained"))
    return folder


@pytest.fixture(scope="module")
def refused(folder: Path) -> dict[str, subprocess.CompletedProcess[str]]:
    with ThreadPoolExecutor(2) as pool:
        done = dict(zip(OUTSIDE, pool.map(lambda arguments: run(arguments, folder), OUTSIDE.values()), strict=True))
    return done | {name: run_here(arguments, folder) for name, arguments in INSIDE.items()}


def run_here(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    stdout, stderr, code = io.StringIO(), io.StringIO(), 0
    with (
        warnings.catch_warnings(),
        pytest.MonkeyPatch.context() as patched,
        redirect_stdout(stdout),
        redirect_stderr(stderr),
    ):
        warnings.simplefilter("ignore")  # torchrun's handler of errors would like stderr to be a real file
        patched.chdir(folder)
        patched.setattr(sys, "argv", ["fourfold", *arguments])
        try:
            main()
        except SystemExit as ended:
            assert isinstance(ended.code, int)
            code = ended.code
    return subprocess.CompletedProcess(arguments, code, stdout.getvalue(), stderr.getvalue())


@pytest.mark.parametrize("name", [name for name in (*OUTSIDE, *INSIDE) if name != "debug"])
def test_a_users_mistake_is_sentences_on_stderr_and_exit_code_2(
    name: str, refused: dict[str, subprocess.CompletedProcess[str]]
) -> None:
    done = refused[name]
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert all(line.startswith("error: ") for line in done.stderr.splitlines())


@pytest.mark.parametrize(
    ("name", "sentences"),
    [
        (
            "several problems",
            [
                "model.num_layers = 'many' is not a whole number",
                "model.hiden_size = 3 is not a key; did you mean model.hidden_size?",
                "engin is not a section; did you mean engine?",
                "data.seed = 1 is in the wrong section; move seed to the section global",
                "--max_stepz is not a key; did you mean --max_steps?",
                "data.split = ",
            ],
        ),
        (
            "problems between keys",
            [
                "model.num_attention_heads = 5 does not divide model.hidden_size = 32",
                "optimizer.min_lr = 1 is above optimizer.max_lr",
            ],
        ),
        ("broken YAML", ["broken.yaml, line 2, column 5: this is not valid YAML"]),
        ("missing file", ["the config file nowhere.yaml does not exist"]),
        ("no text", ["data.input_dir = 'nowhere.txt' does not exist"]),
        ("unwritable", ["engine.output_dir = text.txt cannot be written to"]),
        ("not a checkpoint", [". holds no checkpoint; name a run's output_dir"]),
        ("empty prompt", ["--prompt is empty"]),
        ("unknown character", ["character '\N{SNOWMAN}' (U+2603) at position 0"]),
    ],
)
def test_every_problem_is_named_at_once(
    name: str, sentences: list[str], refused: dict[str, subprocess.CompletedProcess[str]]
) -> None:
    lines = refused[name].stderr.splitlines()
    for sentence in sentences:
        assert any(line.startswith(f"error: {sentence}") for line in lines), refused[name].stderr
    assert len(lines) == len(sentences), refused[name].stderr


def test_debug_shows_the_traceback(refused: dict[str, subprocess.CompletedProcess[str]]) -> None:
    done = refused["debug"]
    assert done.returncode != 0
    assert "Traceback (most recent call last)" in done.stderr
    assert done.stderr.rstrip().endswith("--max_stepz is not a key; did you mean --max_steps?")


def test_a_dry_run_tells_activations_and_the_peak_and_which_micro_batch_auto_takes(folder: Path) -> None:
    big = ["--model_name_or_path", "gpt3-1.3B", "--pp_degree", "2", "--global_batch_size", "64", "--device", "gpu"]
    done = run_here(["train", *big, "--dry_run"], folder)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[1].split("  ")[-2:] == ["activations GiB", "peak GiB "]
    rows = [line.split()[-5:] for line in lines[2:4]]
    for weights, gradients, optimizer, activations, peak in (map(float, row) for row in rows):
        assert peak == pytest.approx(weights + gradients + optimizer + activations, abs=0.1)
    assert "The micro batch is 16, the largest that auto takes" in done.stdout


def test_out_of_memory_is_a_sentence_with_remedies(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(loop, "train_step", fail)
    done = run_here(["train", "tiny.yaml", "--max_steps", "1", "--output_dir", "full"], folder)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        "error: the GPU of rank 0 has no memory left for global.micro_batch_size = 8; set micro_batch_size to 4, "
        "use_recompute to true, sharding_degree above 1 or mp_degree above 1"
    )
    assert "Traceback" not in done.stderr


def test_help_lists_every_key_whole(tmp_path: Path) -> None:
    done = run_here(["train", "--help"], tmp_path)
    assert done.returncode == 0
    for leaf in describe_keys():
        assert re.search(rf"^--{leaf.key}\s", done.stdout, re.MULTILINE), leaf.key


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A run that Ctrl-C stopped after a few steps; bare booleans stand before a flag and before the config file."""
    folder = tmp_path_factory.mktemp("interrupted")
    write_text(folder)
    (folder / "tiny.yaml").write_text(TINY)
    arguments = ["train", "--max_steps", "100000", "--use_recompute", "--vocab_size", "300", "--use_amp", "tiny.yaml"]
    process = start(arguments, folder)
    wait_for_steps(process, folder / "run", 3)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    return folder, subprocess.CompletedProcess(arguments, process.returncode, stdout, stderr)


def start(arguments: list[str], folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*PROGRAM, *arguments], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for_steps(process: subprocess.Popen[str], output_dir: Path, count: int) -> None:
    ends = time.monotonic() + 60
    while time.monotonic() < ends and process.poll() is None:
        if (output_dir / "metrics.jsonl").exists() and len(metrics_of(output_dir)) >= count:
            return
        time.sleep(0.01)
    process.kill()
    raise AssertionError(f"no steps: {process.communicate()}")


def test_ctrl_c_saves_and_says_how_to_go_on_and_that_goes_on(
    interrupted: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, done = interrupted
    assert done.returncode == 130
    assert "Traceback" not in done.stderr
    [stopped] = re.findall(r"Stopped after step ([\d,]+) of 100,000", done.stdout)
    step = int(stopped.replace(",", ""))
    assert [path.name for path in complete_checkpoints(folder / "run")] == [f"step_{step:08d}"]
    [command] = re.findall(r"^ +fourfold (train .*)$", done.stdout, re.MULTILINE)

    resumed = run([*command.split(), "--max_steps", str(step + 3)], folder)

    assert resumed.returncode == 0, resumed.stderr
    assert f"going on from run/checkpoints/step_{step:08d}" in resumed.stderr
    assert [path.name for path in complete_checkpoints(folder / "run")][-1] == f"step_{step + 3:08d}"
    assert list(curve(folder / "run", "loss")) == list(range(1, step + 4))
    assert f"{step + 3:,} steps done, validation loss " in resumed.stdout
    assert "The model writes:" in resumed.stdout, "though it has room for tokens that no text holds"


def test_bare_booleans_are_true_and_take_nothing_that_follows(
    interrupted: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    config = load_config(interrupted[0] / "run" / "config.yaml")
    assert config.model.use_recompute is True
    assert config.engine.use_amp is True
    assert config.model.vocab_size == 300
    assert config.model.hidden_size == 32, "the config file was read"


def test_generate_continues_the_prompt(interrupted: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, _ = interrupted
    done = run(["generate", "run", "--prompt", "the ", "--max_new_tokens", "20", "--top-k", "3"], folder)
    assert done.returncode == 0
    assert done.stderr == "", "nothing but text, so that it can be piped"
    assert done.stdout.startswith("the ") and len(done.stdout) == len("the ") + 20 + len("\n")


def test_a_run_with_nothing_left_to_do_says_where_it_stands(folder: Path) -> None:
    """Even where it goes on from another run's checkpoint and has none of its own."""
    steps = ["--max_steps", "1", "--eval_iters", "0"]
    done = run_here(["train", "tiny.yaml", "--resume", "trained", "--output_dir", "other", *steps], folder)
    assert done.returncode == 0, done.stderr
    assert "1 steps done." in done.stdout and "The model writes:" in done.stdout


def test_a_killed_run_goes_on_from_its_last_finished_checkpoint(tmp_path: Path) -> None:
    """It saves at every step, so that it is likely in the middle of saving when it is killed."""
    write_text(tmp_path)
    (tmp_path / "tiny.yaml").write_text(TINY)
    flags = ["--max_steps", "400", "--save_steps", "1", "--keep_last", "2", "--hidden_dropout_prob", "0.1"]
    process = subprocess.Popen(
        [*PROGRAM, "train", "tiny.yaml", *flags], cwd=tmp_path, text=True, stderr=subprocess.PIPE
    )
    wait_for_steps(process, tmp_path / "run", 6)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()

    newest = complete_checkpoints(tmp_path / "run")[-1]
    step = json.loads((newest / "progress.json").read_text())["step"]
    assert step >= 4, "a finished checkpoint was lost: that of step 4 is complete before that of step 5 is begun"
    # from there four steps more, and the same steps once more without a pause
    for name in ("run", "whole"):
        changes = {"max_steps": step + 4, "save_steps": 0, "output_dir": tmp_path / name}
        changes["input_dir"] = tmp_path / "text.txt"
        left = load_config(tmp_path / "run" / "config.yaml", [(key, str(value)) for key, value in changes.items()])
        outcome = run_training(resolve(left, 1, has_gpu=False))
        assert outcome.run.first_step == (step if name == "run" else 0)
    assert list(curve(tmp_path / "run", "loss")) == list(range(1, step + 5))
    assert curve(tmp_path / "run", "loss") == curve(tmp_path / "whole", "loss")
