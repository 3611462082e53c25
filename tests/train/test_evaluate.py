from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from fourfold.train.evaluate import count_eval_batches
from fourfold.train.loop import Outcome
from tests.tiny import curve, run_training, tiny_config

DROPOUT = {"hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.3}


def mean_loss(outcome: Outcome, starts: list[int]) -> float:
    """By hand: every named sample once, in float64, without chunks, batches or padding."""
    tokens = torch.from_numpy(outcome.run.corpus.splits.valid.tokens.astype("int64"))
    gpt = outcome.run.parallel.parts[0].eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for start in starts:
            span = tokens[start : start + 17]
            logits = gpt(span[None, :-1])[0].double()
            total += F.cross_entropy(logits, span[1:], reduction="sum").item()
            count += 16
    return total / count


@pytest.mark.parametrize("micro", [1, 8])
def test_the_whole_split_is_evaluated_and_each_token_weighs_the_same(tmp_path: Path, micro: int) -> None:
    """A last batch of three samples must not weigh as much as the full ones, nor its padding at all."""
    outcome = run_training(tiny_config(tmp_path, max_steps=2, eval_iters=-1, micro_batch_size=micro, **DROPOUT))
    starts = outcome.run.corpus.splits.valid.starts.tolist()
    assert len(starts) > 8 and len(starts) % 8 not in (0, 1)
    assert outcome.eval_loss == pytest.approx(mean_loss(outcome, starts), rel=1e-6)
    assert curve(tmp_path / "run", "eval_loss") == {2: outcome.eval_loss}


def test_a_few_batches_are_spread_over_the_whole_split(tmp_path: Path) -> None:
    outcome = run_training(tiny_config(tmp_path, max_steps=1, eval_iters=2, **DROPOUT))
    starts = outcome.run.corpus.splits.valid.starts.tolist()
    chosen = [starts[i * len(starts) // 16] for i in range(16)]
    assert len(set(chosen)) == 16
    assert outcome.eval_loss == pytest.approx(mean_loss(outcome, chosen), rel=1e-6)


@pytest.mark.parametrize("compute", [{}, {"use_amp": True}])
def test_evaluating_does_not_change_what_is_trained(tmp_path: Path, compute: dict[str, bool]) -> None:
    for name, keys in {"with": {"eval_freq": 1, "eval_iters": 1}, "without": {}}.items():
        run_training(tiny_config(tmp_path, max_steps=4, output_dir=tmp_path / name, **DROPOUT, **compute, **keys))
    assert curve(tmp_path / "with", "loss") == curve(tmp_path / "without", "loss")
    assert list(curve(tmp_path / "with", "eval_loss")) == [1, 2, 3, 4]


def test_no_evaluation_was_asked_for_and_none_happens(tmp_path: Path) -> None:
    outcome = run_training(tiny_config(tmp_path, max_steps=2, eval_freq=1, eval_iters=0))
    assert outcome.eval_loss is None
    assert curve(tmp_path / "run", "eval_loss") == {}
    assert count_eval_batches(outcome.run) == 0
