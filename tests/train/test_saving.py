"""Runs that save while they train: what happens when that fails, when time runs out, and where a run may begin."""

import math
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fourfold.checkpoint import saver as module
from fourfold.checkpoint.saver import Saver
from fourfold.checkpoint.store import checkpoint_path, complete_checkpoints, load_progress, verify_checkpoint
from fourfold.errors import CheckpointError
from fourfold.train import interrupt, loop
from fourfold.train.interrupt import Deadline
from tests.checkpoint.saving import names
from tests.checkpoint.test_store import flip_a_bit
from tests.tiny import curve, run_training, tiny_config


def test_what_fails_behind_is_heard_at_the_next_step_and_not_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []
    real_save = module.write_share

    def full(folder: Path, *args: object) -> object:
        if "step_00000004" in str(folder):
            raise OSError(28, "No space left on device")
        return real_save(folder, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "write_share", full)
    monkeypatch.setattr(module.Saver, "has_failed", property(lambda saver: _settled(saver, taken)))
    with pytest.raises(CheckpointError, match=r"step 4 could not be saved: No space left on device"):
        run_training(tiny_config(tmp_path, max_steps=100, save_steps=2))
    assert names(tmp_path / "run") == ["step_00000002"], "the older one is untouched, and nothing else was begun"
    assert len(taken) == 5, "one step after the fourth, and no more"
    verify_checkpoint(checkpoint_path(tmp_path / "run", 2))


def _settled(saver: Saver, taken: list[int]) -> bool:
    """Asked once per step; the thread is given its time, so that the test does not depend on who is faster."""
    taken.append(1)
    if saver.thread:
        saver.thread.join()
    return saver.error is not None


def test_a_run_falls_back_past_a_damaged_checkpoint_and_ends_as_if_nothing_had_been(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, save_steps=3, keep_last=0)
    run_training(config)
    expected = curve(tmp_path / "run", "loss")
    flip_a_bit(checkpoint_path(tmp_path / "run", 8) / "tensors" / "rank_00000.safetensors")
    shutil.rmtree(checkpoint_path(tmp_path / "run", 6) / "tensors")
    outcome = run_training(config)
    assert outcome.run.first_step == 3
    said = (tmp_path / "run" / "logs" / "workerlog.0").read_text()
    assert said.count("PASSED OVER") == 2 and "is missing from its checkpoint" in said
    assert curve(tmp_path / "run", "loss") == expected
    assert names(tmp_path / "run") == ["step_00000003", "step_00000006", "step_00000008"]


@pytest.mark.parametrize("is_async", [True, False])
def test_saving_behind_and_waiting_for_the_disk_leave_the_same_bytes(tmp_path: Path, is_async: bool) -> None:
    for folder in ("one", "other"):
        run_training(
            tiny_config(tmp_path, output_dir=tmp_path / folder, async_save=is_async, save_steps=2, keep_last=0)
        )
    for step in (2, 4, 8):
        found, expected = (checkpoint_path(tmp_path / folder, step) / "tensors" for folder in ("one", "other"))
        for file in expected.iterdir():
            assert (found / file.name).read_bytes() == file.read_bytes()


def test_sigusr1_saves_and_says_so_by_its_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = loop.train_step

    def warned(run: Any, batch: Any, step: int, is_asked: bool) -> Any:
        if step == 2:
            signal.raise_signal(signal.SIGUSR1)
        return real(run, batch, step, is_asked)

    monkeypatch.setattr(loop, "train_step", warned)
    outcome = run_training(tiny_config(tmp_path))
    assert (outcome.step, outcome.exit_code) == (4, 128 + signal.SIGUSR1)
    assert names(tmp_path / "run") == ["step_00000004"]


def test_a_run_stops_and_saves_before_its_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step takes 10 s by this clock, and saving 5 s: after 60 s there is no time for two more steps of 100 s."""
    now = 1000.0

    def step_of_ten(*args: Any) -> Any:
        nonlocal now
        now += 10.0
        return real(*args)

    real = loop.train_step
    monkeypatch.setattr(loop, "train_step", step_of_ten)
    monkeypatch.setattr(interrupt.time, "monotonic", lambda: now)
    monkeypatch.setattr(interrupt, "process_age_s", lambda: 3.0)
    monkeypatch.setattr(Saver, "expected_s", 5.0)
    outcome = run_training(tiny_config(tmp_path, max_time=100, max_steps=50))
    assert outcome.exit_code == 75
    assert now - 1000 + 3.0 + 5.0 <= 100
    assert outcome.step == 9, "and no sooner than it must"
    assert names(tmp_path / "run") == ["step_00000009"]


def test_without_max_time_there_is_no_deadline() -> None:
    assert not Deadline(None).is_near(math.inf)


def test_the_age_of_a_process_counts_its_start_up() -> None:
    assert 0.1 < interrupt.process_age_s() < 3600


def test_the_best_checkpoint_is_found_by_evaluating_whenever_it_saves(tmp_path: Path) -> None:
    keys = {"save_steps": 2, "eval_freq": 0, "eval_iters": 1, "keep_last": 1, "keep_best": True, "max_lr": 0.5}
    run_training(tiny_config(tmp_path, **keys))
    losses = curve(tmp_path / "run", "eval_loss")
    assert list(losses) == [2, 4, 6, 8]
    best = min(losses, key=lambda step: losses[step])
    assert names(tmp_path / "run") == [f"step_{step:08d}" for step in sorted({best, 8})]
    assert load_progress(verify_checkpoint(checkpoint_path(tmp_path / "run", best))).eval_loss == losses[best]


def test_a_new_run_starts_from_a_checkpoints_weights_alone(tmp_path: Path) -> None:
    first = run_training(tiny_config(tmp_path, output_dir=tmp_path / "first", save_steps=4, num_layers=3))
    for source in (tmp_path / "first", checkpoint_path(tmp_path / "first", 8)):
        folder = tmp_path / f"from {source.name}"
        config = tiny_config(tmp_path, output_dir=folder, max_steps=2, **fresh(source))
        outcome = run_training(config)
        assert outcome.run.config.model.num_layers == 3
        assert (outcome.run.first_step, outcome.run.optimizer.updates) == (0, 2), "the optimizer is a fresh one"
        assert curve(folder, "loss")[1] < curve(tmp_path / "first", "loss")[1] - 0.2
    begun = run_training(
        tiny_config(tmp_path, output_dir=tmp_path / "again", max_steps=1, max_lr=1e-30, min_lr=0, **fresh(source))
    )
    weights = dict(first.run.parallel.named_parameters())
    assert all(torch.equal(weights[name], each) for name, each in begun.run.parallel.named_parameters().items())
    # and going on from there needs the first run no more
    shutil.rmtree(tmp_path / "first")
    assert run_training(tiny_config(tmp_path, output_dir=folder, max_steps=3, **shape_of(begun))).run.first_step == 2


def fresh(source: Path) -> dict[str, Any]:
    return {"model_name_or_path": source, "num_layers": 3}


def shape_of(outcome: loop.Outcome) -> dict[str, Any]:
    model = outcome.run.config.model
    keys = ("num_layers", "ffn_hidden_size", "vocab_size", "max_position_embeddings", "model_name_or_path")
    return {**{key: getattr(model, key) for key in keys}, "tie_word_embeddings": True}


def test_what_differs_from_the_checkpoints_config_is_told(tmp_path: Path) -> None:
    run_training(tiny_config(tmp_path, max_steps=2))
    moved = {"input_dir": shutil.copy(tmp_path / "text.txt", tmp_path / "moved.txt"), "num_workers": 0}
    run_training(tiny_config(tmp_path, max_steps=4, decay_steps=2, adam_beta2=0.9, logging_freq=2, **moved))
    said = (tmp_path / "run" / "logs" / "workerlog.0").read_text().splitlines()
    warned = [line for line in said if "WARNING" in line and "the run that would have been" in line]
    assert len(warned) == 1 and "optimizer.adam_beta2 is 0.9, and was 0.95 in" in warned[0]
    for key in ("engine.logging_freq is 2, and was 1", "moved.txt, and was", "engine.max_steps is 4"):
        assert any("INFO" in line and key in line for line in said), key


def test_a_clock_that_was_set_back_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Order is by step, and the curves are one: TensorBoard reads files in the order of the clocks that named them."""
    real = time.time
    with monkeypatch.context() as patched:
        patched.setattr(time, "time", lambda: real() + 1e6)
        run_training(tiny_config(tmp_path, max_steps=4, decay_steps=8, save_steps=2))
    shutil.rmtree(checkpoint_path(tmp_path / "run", 4))
    outcome = run_training(tiny_config(tmp_path, decay_steps=8, save_steps=2))
    assert outcome.run.first_step == 2
    assert names(tmp_path / "run")[-1] == "step_00000008"
    assert run_training(tiny_config(tmp_path, decay_steps=8)).run.first_step == 8
    curves = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    curves.Reload()
    assert [event.step for event in curves.Scalars("train/loss")] == list(range(1, 9))


def test_a_checkpoint_that_was_copied_half_way_is_passed_over(tmp_path: Path) -> None:
    """In the order of names, as rsync copies, so the manifest is there; and a part under rsync's name for it."""
    run_training(tiny_config(tmp_path, max_steps=4, save_steps=2, decay_steps=8, output_dir=tmp_path / "there"))
    for step in (2, 4):
        source, target = (checkpoint_path(tmp_path / folder, step) for folder in ("there", "run"))
        shutil.copytree(source, target)
    tensors = target / "tensors" / "rank_00000.safetensors"
    part = tensors.with_name(".rank_00000.safetensors.pX3aQ1")
    part.write_bytes(tensors.read_bytes()[:5000])
    tensors.unlink()
    outcome = run_training(tiny_config(tmp_path, decay_steps=8))
    assert outcome.run.first_step == 2
    assert "PASSED OVER" in (tmp_path / "run" / "logs" / "workerlog.0").read_text()
    whole = run_training(tiny_config(tmp_path, decay_steps=8, output_dir=tmp_path / "whole"))
    trained = dict(outcome.run.parallel.named_parameters())
    assert all(torch.equal(trained[name], each) for name, each in whole.run.parallel.named_parameters().items())


def test_only_complete_checkpoints_are_found(tmp_path: Path) -> None:
    run_training(tiny_config(tmp_path, max_steps=1))
    (tmp_path / "run" / "checkpoints" / "step_00000002").mkdir()
    (tmp_path / "run" / "checkpoints" / "step_x").mkdir()
    assert [path.name for path in complete_checkpoints(tmp_path / "run")] == ["step_00000001"]


def test_an_epoch_that_ends_within_a_large_batch_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five epochs to a batch: the epoch after it is 5, 10, 15, and every second one has passed by."""
    monkeypatch.setattr(loop, "epoch_of", lambda passes, batch, step: 5 * step)
    run: Any = SimpleNamespace(
        config=SimpleNamespace(
            engine=SimpleNamespace(save_steps=0, save_epochs=2), global_=SimpleNamespace(global_batch_size=8)
        ),
        corpus=SimpleNamespace(splits=SimpleNamespace(train=SimpleNamespace(passes=None))),
    )
    assert [loop.is_save_due(run, step) for step in (1, 2, 3)] == [True] * 3
