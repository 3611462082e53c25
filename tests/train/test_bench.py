import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fourfold.cli import app
from fourfold.commands import bench as command
from fourfold.data.loader import Batch
from fourfold.errors import ConfigError
from fourfold.train import bench as module
from fourfold.train.bench import Measured, bench_config, measure, open_batches
from tests.tiny import alone, write_text

TINY = {"hidden_size": "32", "num_layers": "1", "num_attention_heads": "2", "vocab_size": "97"}
CPU = torch.device("cpu")
GOOD = Measured("fourfold", "124M", "bfloat16", 4, 1, 9e5, 10.0, 9.0, 11.0, 450.0, 0.45, 10.0, 1.0, 3.0, 0.5)


def tiny_bench(**keys: str) -> Any:
    return bench_config("124M", 4, 16, [*TINY.items(), *keys.items()], CPU)


def test_real_tokens_are_a_runs_own_and_a_new_batch_at_every_step(tmp_path: Path) -> None:
    text = write_text(tmp_path)
    with open_batches(tiny_bench(input_dir=str(text)), CPU) as next_batch:
        first, second = next_batch(), next_batch()
    assert not torch.equal(first.tokens_bt, second.tokens_bt)
    assert torch.equal(first.tokens_bt[:, 1:], first.targets_bt[:, :-1])
    with open_batches(tiny_bench(), CPU) as next_batch:
        assert next_batch() is next_batch()


def test_a_measurement_has_the_spread_of_its_steps_and_their_last_gradient_norm(tmp_path: Path) -> None:
    config = tiny_bench(input_dir=str(write_text(tmp_path)))
    with alone() as process:
        found = measure("fourfold", "124M", config, process, tmp_path, warmup=1, steps=5)
    assert found.step_ms_p10 <= found.step_ms <= found.step_ms_p90
    assert found.tokens_per_s == pytest.approx(4 * 16 / found.step_ms * 1000)
    assert found.tflops_per_s > 0 and found.has_learnt
    assert found.precision == "float32"
    json.dumps(found.__dict__, allow_nan=False)


def test_a_norm_that_is_not_finite_is_null_in_json(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = module.train_step

    def spoilt(run: Any, batch: Batch, step: int) -> Any:
        return real(run, batch, step)._replace(grad_norm=torch.tensor(torch.inf))

    monkeypatch.setattr(module, "train_step", spoilt)
    with alone() as process:
        found = measure("fourfold", "124M", tiny_bench(), process, tmp_path, warmup=1, steps=1)
    assert found.last_grad_norm is None and not found.has_learnt


def test_a_peer_that_is_not_there_is_named_with_a_remedy(tmp_path: Path) -> None:
    with alone() as process, pytest.raises(ConfigError, match=r"holds no model\.py; clone nanoGPT"):
        measure("nanogpt", "124M", tiny_bench(), process, tmp_path, warmup=1, steps=1)


@pytest.mark.parametrize(
    ("measured", "says", "code"),
    [
        (GOOD, "450", 0),
        (replace(GOOD, last_grad_norm=0.0), "the gradient norm of the last step is zero", 1),
        (replace(GOOD, last_grad_norm=None), "the gradient norm of the last step is not finite", 1),
        (None, "", 1),
    ],
    ids=["good", "zero", "not finite", "failed"],
)
def test_steps_that_learn_nothing_and_contenders_that_fail_end_with_an_error(
    measured: Measured | None, says: str, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(command, "measure_in_process", lambda arguments, contender, size: measured)
    path = tmp_path / "found.json"
    done = CliRunner().invoke(app, ["bench", "--json", str(path)])
    assert done.exit_code == code
    assert says in done.stdout
    assert len(json.loads(path.read_text())) == (measured is not None)


def test_a_contender_that_failed_says_why_in_one_sentence(tmp_path: Path) -> None:
    result = tmp_path / "measured.json"

    def ended(code: int, stderr: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], code, "", stderr)

    assert command.failure_of(ended(-9), result) == "its process was ended by SIGKILL"
    assert command.failure_of(ended(3), result) == "its process ended with exit code 3"
    assert command.failure_of(ended(3, "one\ntwo\n"), result) == "two"

    arguments = ["--sizes", "124M", "--fp8", "--batch", "2", "--seq_len", "16", "--hidden_size", "33"]
    own = ["--contender", "fourfold", "--json", str(result)]
    done = subprocess.run([sys.executable, "-m", "fourfold", "bench", *arguments, *own], capture_output=True, text=True)
    assert done.returncode == 2
    assert command.failure_of(ended(2), result).startswith("model.num_attention_heads = 12 does not divide")
