import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fourfold.cost.flops import training_flops_per_token
from fourfold.optim.schedule import learning_rate
from fourfold.train import loop
from fourfold.train import metrics as module
from fourfold.train.loop import Outcome
from fourfold.train.metrics import reopen_metrics
from tests.tiny import curve, metrics_of, run_training, tiny_config

NUMBER = r"[0-9.e+-]+"
STAMP = r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}\] \[    INFO\] - "
# as the seed documents print them; fields of our own come after the learning rate
TRAIN_LINE = re.compile(
    STAMP + r"global step (?P<step>\d+), epoch: (?P<epoch>\d+), batch: (?P<batch>\d+), loss: (?P<loss>\d+\.\d{9}), "
    r"avg_reader_cost: (?P<reader>\d+\.\d{5}) sec, avg_batch_cost: (?P<cost>\d+\.\d{5}) sec, "
    r"speed: (?P<speed>\d+\.\d\d) step/s, ips_total: (?P<total>\d+) tokens/s, ips: (?P<ips>\d+) tokens/s, "
    r"learning rate: (?P<lr>\d\.\d{5}e[+-]\d\d), grad_norm: .*$"
)
EVAL_LINE = re.compile(
    STAMP + r"valid step (?P<step>\d+), epoch: (?P<epoch>\d+), batch: (?P<batch>\d+), loss: (?P<loss>\d+\.\d{6}), "
    r"speed: \d+\.\d\d step/s$"
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("metrics")
    return run_training(tiny_config(folder, max_steps=6, eval_freq=3, eval_iters=2, micro_batch_size=4))


def log_lines(outcome: Outcome) -> list[str]:
    return (outcome.run.output_dir / "logs" / "workerlog.0").read_text().splitlines()


def matches(pattern: re.Pattern[str], outcome: Outcome) -> list[re.Match[str]]:
    return [found for line in log_lines(outcome) if (found := pattern.match(line))]


def test_the_log_line_is_the_seed_documents(finished: Outcome) -> None:
    lines = matches(TRAIN_LINE, finished)
    assert [int(line["step"]) for line in lines] == [1, 2, 3, 4, 5, 6]
    values = {v["step"]: v for v in metrics_of(finished.run.output_dir) if "loss" in v}
    for line in lines:
        step = int(line["step"])
        assert float(line["loss"]) == pytest.approx(values[step]["loss"], abs=1e-9)
        assert int(line["epoch"]) == values[step]["epoch"] == 0
        assert int(line["batch"]) == values[step]["batch"] == step - 1
        assert line["total"] == line["ips"], "one process is the whole job"
        assert float(line["cost"]) * float(line["speed"]) == pytest.approx(1, rel=0.05)
        # the line shows the rate of the next update, metrics.jsonl that of this one
        assert float(line["lr"]) == pytest.approx(learning_rate(step + 1, finished.run.config.optimizer), rel=1e-5)
        assert values[step]["lr"] == learning_rate(step, finished.run.config.optimizer)


def test_the_line_of_an_evaluation_is_the_seed_documents(finished: Outcome) -> None:
    lines = matches(EVAL_LINE, finished)
    losses = curve(finished.run.output_dir, "eval_loss")
    assert [int(line["step"]) for line in lines] == [3, 6] == list(losses)
    assert [float(line["loss"]) for line in lines] == pytest.approx(list(losses.values()), abs=1e-6)
    assert [int(line["batch"]) for line in lines] == [2, 5]


def test_every_other_line_of_the_log_has_a_time_and_a_level(finished: Outcome) -> None:
    assert all(re.match(r"\[[0-9 :,-]{23}\] \[ *(INFO|WARNING)\] - \S", line) for line in log_lines(finished))


def test_speed_is_tokens_over_the_time_that_training_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that ticks at every look: the numbers can then only be right by arithmetic. Evaluating and saving take a
    hundred seconds by it, which are not training."""
    now = 0.0

    def look() -> float:
        nonlocal now
        now += 0.5
        return now

    def slow(real: Callable[..., Any]) -> Callable[..., Any]:
        def slowed(*args: Any) -> Any:
            nonlocal now
            now += 100.0
            return real(*args)

        return slowed

    monkeypatch.setattr(module.time, "perf_counter", look)
    monkeypatch.setattr(module, "device_peak_flops", lambda device: 1e9)
    monkeypatch.setattr(loop, "evaluate", slow(loop.evaluate))
    monkeypatch.setattr(loop.Saver, "_copy", slow(loop.Saver._copy))
    keys = {"logging_freq": 2, "num_workers": 0, "eval_freq": 1, "eval_iters": 1, "save_steps": 1, "async_save": False}
    outcome = run_training(tiny_config(tmp_path, max_steps=4, **keys))
    flops = 8 * 16 * training_flops_per_token(outcome.run.config.model, 16)
    values = [v for v in metrics_of(tmp_path / "run") if "loss" in v]
    assert [v["step"] for v in values] == [1, 2, 4]
    for v in values:
        assert v["tokens_per_s"] == pytest.approx(8 * 16 / v["step_s"])
        assert v["mfu"] == pytest.approx(flops / v["step_s"] / 1e9)
        assert 0 < v["step_s"] < 10.0
    assert all(took_s > 100.0 for took_s in curve(tmp_path / "run", "eval_s").values())


def test_logging_every_few_steps_writes_those_the_first_and_the_last(tmp_path: Path) -> None:
    run_training(tiny_config(tmp_path, max_steps=8, logging_freq=3))
    assert list(curve(tmp_path / "run", "loss")) == [1, 3, 6, 8]


def test_a_skipped_step_is_warned_of(tmp_path: Path) -> None:
    outcome = run_training(tiny_config(tmp_path, max_steps=2, use_amp=True, amp_dtype="float16", scale_loss=2.0**40))
    warnings = [line for line in log_lines(outcome) if "[ WARNING]" in line]
    assert len(warnings) == 2
    assert "by global step 2, 1 more step was skipped" in warnings[1] and "(2 skipped so far)" in warnings[1]
    assert list(curve(tmp_path / "run", "skipped_steps").values()) == [1, 2]


def test_metrics_are_json_that_any_reader_accepts(tmp_path: Path) -> None:
    """Python writes NaN and Infinity, which are not JSON: a norm that overflowed is null instead."""
    run_training(tiny_config(tmp_path, max_steps=2, use_amp=True, amp_dtype="float16", scale_loss=2.0**40))

    def refuse(word: str) -> Any:
        raise AssertionError(f"{word} is not JSON")

    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line, parse_constant=refuse)["grad_norm"] for line in lines] == [None, None]


def test_curves_are_in_tensorboard(finished: Outcome) -> None:
    curves = EventAccumulator(str(finished.run.output_dir / "tensorboard"))
    curves.Reload()
    for key, tag in {"loss": "train/loss", "grad_norm": "train/grad_norm", "lr": "train/lr"}.items():
        found = {event.step: event.value for event in curves.Scalars(tag)}
        assert found == pytest.approx(curve(finished.run.output_dir, key), rel=1e-6)
    found = {event.step: event.value for event in curves.Scalars("eval/loss")}
    assert found == pytest.approx(curve(finished.run.output_dir, "eval_loss"), rel=1e-6)
    assert {"speed/tokens_per_s", "speed/mfu", "speed/memory_gib"} <= set(curves.Tags()["scalars"])


def test_after_resuming_a_curve_has_each_step_once(tmp_path: Path) -> None:
    run_training(tiny_config(tmp_path, max_steps=4, decay_steps=6, save_steps=2))
    for path in (tmp_path / "run" / "checkpoints").glob("step_00000004/manifest.json"):
        path.unlink()
    run_training(tiny_config(tmp_path, max_steps=6, decay_steps=6))
    curves = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    curves.Reload()
    assert [event.step for event in curves.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]


def test_reopening_keeps_the_lines_up_to_a_step_and_only_whole_ones(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 2, "eval_loss": 3}\n{"step": 3}\n{"st')
    with reopen_metrics(path, 2) as stream:
        stream.write('{"step": 3, "new": true}\n')
    assert path.read_text().splitlines() == [
        '{"step": 1}',
        '{"step": 2}',
        '{"step": 2, "eval_loss": 3}',
        '{"step": 3, "new": true}',
    ]
