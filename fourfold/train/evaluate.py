"""The mean loss per token over the validation part. No dropout, no gradients, same rows every time."""

from collections.abc import Callable

import torch

from fourfold.data.loader import boundaries_of, eval_batches
from fourfold.mesh.mesh import sum_over_all
from fourfold.train.build import Run
from fourfold.train.step import count_targets, to_device


def evaluate(run: Run, beat: Callable[[], None] = lambda: None) -> float:
    """The same number on every rank. `beat` is called at every batch."""
    total = torch.zeros(1, device=run.process.device)
    targets = torch.zeros((), dtype=torch.int64, device=run.process.device)
    for batch in eval_batches(
        run.corpus.splits.valid,
        run.config.global_.global_batch_size,
        run.rows,
        run.config.engine.eval_iters,
        boundaries=boundaries_of(run.config.data),
    ):
        beat()
        batch = to_device(batch, run.process.device)
        total += run.parallel.execution.evaluate(batch)
        targets += count_targets(run, batch)
    if not run.parallel.reports_loss:
        total.zero_()
    return sum_over_all(total).item() / targets.item()


def count_eval_batches(run: Run) -> int:
    iters, samples = run.config.engine.eval_iters, len(run.corpus.splits.valid)
    whole = -(-samples // run.config.global_.global_batch_size)
    return whole if iters < 0 else min(iters, whole)
