"""The mean loss per token over the validation part. No dropout, no gradients, same rows every time."""

import torch

from fourfold.config.resolve import accumulation
from fourfold.data.loader import eval_batches
from fourfold.train.build import Run
from fourfold.train.step import count_targets, split_batch, to_device


@torch.no_grad()
def evaluate(run: Run) -> float:
    run.gpt.eval()
    total = torch.zeros(1, device=run.process.device)
    targets = 0
    for batch in eval_batches(
        run.corpus.tokens,
        run.corpus.splits.valid,
        run.config.data.max_seq_len,
        run.config.global_.global_batch_size,
        run.rows,
        run.config.engine.eval_iters,
    ):
        for micro in split_batch(to_device(batch, run.process.device), accumulation(run.config)):
            total += run.gpt(micro.tokens_bt, micro.targets_bt)
        targets += count_targets(batch)
    return total.item() / targets


def count_eval_batches(run: Run) -> int:
    iters, samples = run.config.engine.eval_iters, len(run.corpus.splits.valid)
    whole = -(-samples // run.config.global_.global_batch_size)
    return whole if iters < 0 else min(iters, whole)
