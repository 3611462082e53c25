"""Dropout on hidden states whose mask is a hash of (sample key, site, position, channel): the same on every layout."""

import torch
from torch import nn

from fourfold.model.stateless import bernoulli_btd


class Dropout(nn.Module):
    """Does nothing when p = 0 or when no sample keys are given, as in evaluation."""

    def __init__(self, p: float, site: int) -> None:
        super().__init__()
        self.p = p
        self.site = site
        self.first_position = 0  # set by whoever splits the sequence between ranks

    def forward(self, x_btd: torch.Tensor, sample_keys_b: torch.Tensor | None) -> torch.Tensor:
        if self.p == 0.0 or sample_keys_b is None:
            return x_btd
        _, t, d = x_btd.shape
        positions_t = torch.arange(self.first_position, self.first_position + t, device=x_btd.device)
        keep_btd = bernoulli_btd(sample_keys_b, self.site, positions_t, d, self.p)
        return torch.where(keep_btd, x_btd * (1.0 / (1.0 - self.p)), 0.0)
