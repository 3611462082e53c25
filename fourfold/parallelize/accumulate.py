"""Forward and backward without a pipe: one micro batch after the other."""

import torch

from fourfold.config.resolve import accumulation
from fourfold.config.schema import Config
from fourfold.cost.sharding import sharding_stage
from fourfold.data.loader import Batch
from fourfold.layout.layout import Layout
from fourfold.model.gpt import GPT
from fourfold.parallelize.precision import keep_casts, keeps_casts
from fourfold.parallelize.shard import free_gathered, set_micro_batch


def split_batch(batch: Batch, parts: int) -> list[Batch]:
    size = len(batch.tokens_bt) // parts

    def rows_from(first: int) -> Batch:
        return batch.each(lambda tensor: tensor[first : first + size])

    return [rows_from(part * size) for part in range(parts)]


def boundary_tensors(batch: Batch) -> dict[str, torch.Tensor]:
    """What the model is told about documents, by the names of its arguments: nothing, unless the config asks."""
    found = {"positions_bt": batch.positions_bt, "documents_bt": batch.documents_bt}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


class Accumulated:
    def __init__(self, gpt: GPT, config: Config, layout: Layout) -> None:
        self.gpt = gpt
        self.micro_batches = accumulation(config)
        self.stage = sharding_stage(config, layout)
        self.keeps_casts = keeps_casts(config, layout)

    def train(self, batch: Batch, weight: torch.Tensor) -> torch.Tensor:
        """Add the gradients of `weight` times the summed loss; return the summed loss of this rank's rows."""
        self.gpt.train()
        if self.keeps_casts:
            keep_casts(self.gpt)
        total = torch.zeros(1, device=batch.tokens_bt.device)
        for index, micro in enumerate(split_batch(batch, self.micro_batches)):
            set_micro_batch(self.gpt, self.stage, is_last=index == self.micro_batches - 1)
            beside = boundary_tensors(micro)
            if self.gpt.compute_dtype == torch.float16:  # weighted before they are summed, small ones would be lost
                loss = self.gpt(micro.tokens_bt, micro.targets_bt, micro.sample_keys_b, **beside)
                (loss * weight).sum().backward()
            else:
                loss = self.gpt(micro.tokens_bt, micro.targets_bt, micro.sample_keys_b, loss_weight=weight, **beside)
                loss.sum().backward()
            total += loss.detach()
        return total

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> torch.Tensor:
        self.gpt.eval()
        if self.keeps_casts:
            keep_casts(self.gpt)
        total = torch.zeros(1, device=batch.tokens_bt.device)
        for micro in split_batch(batch, self.micro_batches):
            total += self.gpt(micro.tokens_bt, micro.targets_bt, **boundary_tensors(micro))
        free_gathered(self.gpt)
        return total
