import dataclasses
import math
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from fourfold.layout.layout import Layout
from fourfold.mesh.process import Process
from fourfold.optim.scaler import LossScale
from fourfold.train.build import Run, build_run
from fourfold.train.step import StepResult, attention_dropout_key, train_step
from tests.tiny import alone, curve, metrics_of, run_training, tiny_config


@pytest.fixture
def process() -> Iterator[Process]:
    with alone() as joined:
        yield joined


def steps(run: Run, count: int) -> list[StepResult]:
    with run.open_loader() as loader:
        return [train_step(run, loader.next_batch(), step) for step in range(count)]


def weights(run: Run) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in run.parallel.named_parameters().items()}


def test_the_micro_batch_size_does_not_change_the_result(tmp_path: Path) -> None:
    curves = {}
    for micro in (1, 2, 4, 8):
        folder = tmp_path / f"micro{micro}"
        run_training(
            tiny_config(tmp_path, micro_batch_size=micro, max_steps=5, hidden_dropout_prob=0.1, output_dir=folder)
        )
        curves[micro] = curve(folder, "loss"), curve(folder, "grad_norm")
    for micro in (1, 2, 4):
        for found, expected in zip(curves[micro], curves[8], strict=True):
            assert found == pytest.approx(expected, rel=1e-6)
    assert len(curves[8][0]) == 5


@pytest.mark.parametrize("num_workers", [0, 3])
def test_the_number_of_workers_does_not_change_a_bit(tmp_path: Path, num_workers: int) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    run_training(tiny_config(tmp_path, max_steps=3, output_dir=one))
    run_training(tiny_config(tmp_path, max_steps=3, output_dir=other, num_workers=num_workers))
    assert curve(one, "loss") == curve(other, "loss")


def test_the_loss_is_the_mean_over_the_tokens_of_the_whole_batch(tmp_path: Path, process: Process) -> None:
    run = build_run(tiny_config(tmp_path, micro_batch_size=2), process)
    with run.open_loader() as loader:
        batch = loader.next_batch()
    with torch.no_grad():
        logits = run.parallel.parts[0](batch.tokens_bt)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets_bt.flatten())
    torch.testing.assert_close(train_step(run, batch, 0).loss, expected, rtol=1e-6, atol=0)


def test_targets_that_do_not_count_change_neither_loss_nor_norm_however_they_are_divided(
    tmp_path: Path, process: Process
) -> None:
    """Micro batches with few valid tokens must not weigh more than those with many."""
    results = []
    for micro in (1, 8):
        run = build_run(tiny_config(tmp_path, micro_batch_size=micro, output_dir=tmp_path / str(micro)), process)
        with run.open_loader() as loader:
            batch = loader.next_batch()
        batch.targets_bt[0, 1:] = -100
        batch.targets_bt[3] = -100
        results.append(train_step(run, batch, 0))
    assert results[0].loss.item() == pytest.approx(results[1].loss.item(), rel=1e-6)
    assert results[0].grad_norm.item() == pytest.approx(results[1].grad_norm.item(), rel=1e-6)


@pytest.mark.parametrize("grad_clip", [0.0, 0.1])
def test_the_loss_scale_changes_no_bit_of_the_update(tmp_path: Path, process: Process, grad_clip: float) -> None:
    """Clipping compares the unscaled norm: were it before unscaling, a scale of 2**15 would shrink every step."""
    outcomes = []
    for scale in (1.0, 2.0**15, 2.0**-8):
        run = build_run(tiny_config(tmp_path, grad_clip=grad_clip, warmup_rate=0.0), process)
        run = dataclasses.replace(run, loss_scale=LossScale(scale, True, process.device))
        results = steps(run, 3)
        assert run.loss_scale.scale.item() == scale
        outcomes.append((weights(run), [(r.loss.item(), r.grad_norm.item()) for r in results]))
    expected, expected_results = outcomes[0]
    assert expected_results[0][1] > 0.1, "clipping has something to do"
    for found, results in outcomes[1:]:
        assert results == expected_results
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_skips_the_step_and_halves_the_scale(
    tmp_path: Path, process: Process, bad: float
) -> None:
    run = build_run(tiny_config(tmp_path), process)
    run = dataclasses.replace(run, loss_scale=LossScale(64.0, True, process.device))
    with run.open_loader() as loader:
        assert not train_step(run, loader.next_batch(), 0).is_skipped
        before = weights(run)
        moments = [tensor.clone() for named in run.optimizer.moments().values() for tensor in named.values()]
        spoil = run.parallel.named_parameters()["norm.weight"].register_hook(lambda grad: grad * bad)
        result = train_step(run, loader.next_batch(), 1)
        spoil.remove()
        assert result.is_skipped and not math.isfinite(result.grad_norm) and math.isfinite(result.loss)
        assert run.loss_scale.scale.item() == 32.0
        assert run.optimizer.updates == 1
        assert all(torch.equal(weight, before[name]) for name, weight in weights(run).items())
        after = [tensor for named in run.optimizer.moments().values() for tensor in named.values()]
        assert all(map(torch.equal, moments, after))

        # the bad gradients are not left behind to spoil what follows
        assert not train_step(run, loader.next_batch(), 2).is_skipped
        assert run.optimizer.updates == 2
        assert not all(torch.equal(weight, before[name]) for name, weight in weights(run).items())


def test_without_float16_a_bad_step_is_skipped_too(tmp_path: Path, process: Process) -> None:
    run = build_run(tiny_config(tmp_path), process)
    before = weights(run)
    run.parallel.named_parameters()["norm.weight"].register_hook(lambda grad: grad * math.nan)
    [result] = steps(run, 1)
    assert result.is_skipped
    assert run.loss_scale.scale.item() == 1.0
    assert all(torch.equal(weight, before[name]) for name, weight in weights(run).items())


@pytest.mark.parametrize("precision", [{}, {"use_amp": True}, {"use_amp": True, "amp_dtype": "float16"}], ids=str)
def test_a_small_model_learns_in_every_precision(tmp_path: Path, precision: dict[str, Any]) -> None:
    outcome = run_training(tiny_config(tmp_path, max_steps=60, logging_freq=10, **precision))
    losses = curve(tmp_path / "run", "loss")
    assert losses[1] == pytest.approx(math.log(outcome.run.corpus.tokenizer.vocab_size), rel=0.05)
    assert losses[60] < losses[1] - 1.0
    assert outcome.run.optimizer.updates == 60


def test_precisions_agree_at_first(tmp_path: Path) -> None:
    first = {}
    for dtype in ("float32", "bfloat16", "float16"):
        keys = {"use_amp": False} if dtype == "float32" else {"use_amp": True, "amp_dtype": dtype}
        run_training(tiny_config(tmp_path, max_steps=1, output_dir=tmp_path / dtype, **keys))
        [values] = metrics_of(tmp_path / dtype)
        first[dtype] = values["loss"], values["grad_norm"]
    assert first["bfloat16"] != first["float32"] != first["float16"]
    assert first["bfloat16"] == pytest.approx(first["float32"], rel=2e-2)
    assert first["float16"] == pytest.approx(first["float32"], rel=2e-3)


def test_a_loss_scale_that_overflows_costs_a_few_steps_and_then_training_goes_on(tmp_path: Path) -> None:
    outcome = run_training(
        tiny_config(tmp_path, max_steps=40, use_amp=True, amp_dtype="float16", scale_loss=2.0**35, warmup_rate=0.0)
    )
    skipped, scale, losses = (curve(tmp_path / "run", key) for key in ("skipped_steps", "loss_scale", "loss"))
    assert skipped[1] == 1, "the very first step overflows"
    lost = skipped[40]
    assert 10 < lost < 25
    assert [skipped[step] for step in range(1, 11)] == list(range(1, 11))
    assert skipped[30] == lost, "and none any more"
    assert scale[40] == 2.0 ** (35 - lost)
    assert outcome.run.optimizer.updates == 40 - lost
    assert all(math.isfinite(loss) for loss in losses.values())
    assert losses[40] < losses[1] - 0.5


def test_attention_dropout_is_drawn_anew_at_every_step_and_alike_in_every_run(tmp_path: Path, process: Process) -> None:
    def loss(seed: int, step: int) -> float:
        run = build_run(tiny_config(tmp_path, attention_probs_dropout_prob=0.3, seed=1), process)
        run = dataclasses.replace(run, config=tiny_config(tmp_path, attention_probs_dropout_prob=0.3, seed=seed))
        with run.open_loader() as loader:
            batch = loader.next_batch()
        return train_step(run, batch, step).loss.item()

    assert loss(1, 0) == loss(1, 0)
    assert len({loss(1, 0), loss(1, 1), loss(2, 0)}) == 3


def test_a_compiled_model_trains_as_an_eager_one(tmp_path: Path) -> None:
    curves = {}
    for is_compiled in (False, True):
        folder = tmp_path / str(is_compiled)
        keys = {"hidden_dropout_prob": 0.1, "micro_batch_size": 4, "max_steps": 4, "num_layers": 1}
        run_training(tiny_config(tmp_path, compile=is_compiled, output_dir=folder, **keys))
        curves[is_compiled] = curve(folder, "loss"), curve(folder, "grad_norm")
    for found, expected in zip(curves[True], curves[False], strict=True):
        assert found == pytest.approx(expected, rel=1e-5)


def test_attention_dropout_differs_between_shards_and_agrees_between_replicas() -> None:
    layout = Layout(2, 2, 2, 2)
    places = [layout.coordinate(rank) for rank in range(layout.world_size)]
    keys = {at: attention_dropout_key(1234, 7, at) for at in places}
    for one, other in combinations(places, 2):
        are_replicas = (one.pp, one.mp) == (other.pp, other.mp)
        assert (keys[one] == keys[other]) == are_replicas


def test_a_step_without_a_target_that_counts_changes_nothing(tmp_path: Path, process: Process) -> None:
    """Weight decay and old moments would go on without it."""
    run = build_run(tiny_config(tmp_path), process)
    [first] = steps(run, 1)
    before = weights(run)
    with run.open_loader() as loader:
        batch = loader.next_batch()
    result = train_step(run, batch._replace(targets_bt=torch.full_like(batch.targets_bt, -100)), 1)
    assert result.is_skipped and not first.is_skipped
    assert all(tensor.equal(before[name]) for name, tensor in weights(run).items())


def test_a_small_loss_weight_does_not_underflow_the_heads_gradient_in_float16(tmp_path: Path, process: Process) -> None:
    run = build_run(tiny_config(tmp_path, use_amp=True, amp_dtype="float16", tie_word_embeddings=False), process)
    with run.open_loader() as loader:
        batch = loader.next_batch()
    found = []
    for weight in (1.0, 2.0**-20):
        run.optimizer.drop_gradients()
        run.parallel.execution.train(batch, torch.tensor(weight))
        found.append(run.optimizer.gradients()["head.weight"] / weight)
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-4)
