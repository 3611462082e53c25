"""AdamW over named parameters: who decays, where the moments live, and a step that never waits for the device.

Unscaling, clipping and skipping are folded into PyTorch's fused kernel, which divides gradients by `grad_scale` and does
nothing at all where `found_inf` is set. So a step is one pass over memory and needs no word from the host.
"""

from collections.abc import Iterable

import torch
from torch import nn

from fourfold.config.schema import Model, Optimizer
from fourfold.cost.params import Kind, parameters

MOMENTS = ("exp_avg", "exp_avg_sq")


def decays(kind: Kind, optimizer: Optimizer) -> bool:
    return kind in ("matrix", "projection") or (kind == "embedding" and optimizer.decay_embeddings)


class AdamW:
    """Owns the moments (float32, shaped and placed like the parameters) and the count of updates taken."""

    def __init__(
        self, named_parameters: Iterable[tuple[str, nn.Parameter]], optimizer: Optimizer, model: Model
    ) -> None:
        self.named_parameters = dict(named_parameters)
        kinds = {parameter.name: parameter.kind for parameter in parameters(model)}
        groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for name, parameter in self.named_parameters.items():
            groups[decays(kinds[name], optimizer)].append(parameter)
        self.engine = torch.optim.AdamW(
            [
                {"params": groups[True], "weight_decay": optimizer.weight_decay},
                {"params": groups[False], "weight_decay": 0.0},
            ],
            betas=(optimizer.adam_beta1, optimizer.adam_beta2),
            eps=optimizer.adam_epsilon,
            fused=True,
        )
        for parameter in self.named_parameters.values():  # made now, so that a checkpoint can be read into them
            self.engine.state[parameter] = {
                "step": torch.zeros((), device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    def gradients(self) -> list[torch.Tensor]:
        return [parameter.grad for parameter in self.named_parameters.values() if parameter.grad is not None]

    def step(self, lr: float, divisor: torch.Tensor, is_skipped: torch.Tensor) -> None:
        """One update with gradients divided by `divisor`, or none where `is_skipped`; gradients are gone after it."""
        for group in self.engine.param_groups:
            group["lr"] = lr
        self.engine.grad_scale = divisor  # type: ignore[attr-defined]
        self.engine.found_inf = is_skipped.float()  # type: ignore[attr-defined]
        self.engine.step()
        self.engine.zero_grad(set_to_none=True)

    def moments(self) -> dict[str, torch.Tensor]:
        """`exp_avg.<parameter>` and `exp_avg_sq.<parameter>`, the tensors themselves."""
        return {
            f"{moment}.{name}": self.engine.state[parameter][moment]
            for name, parameter in self.named_parameters.items()
            for moment in MOMENTS
        }

    @property
    def updates(self) -> int:
        """Updates taken, skipped ones not counted; the same for every parameter."""
        return int(next(iter(self.engine.state.values()))["step"])

    def set_updates(self, updates: int) -> None:
        for state in self.engine.state.values():
            state["step"].fill_(updates)
