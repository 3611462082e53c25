"""AdamW over named parameters: who decays, where the moments live, and a step that never waits for the device.

It works on the local shards of whatever the layout made of the parameters: the update is elementwise, so nothing else
is needed. Unscaling, clipping and skipping are part of the one pass over memory, with no word from the host: on a GPU
by our own kernel, elsewhere by PyTorch's fused one, which divides gradients by `grad_scale` and does nothing at all
where `found_inf` is set.
"""

from contextlib import nullcontext

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fourfold.config.schema import Optimizer
from fourfold.cost.params import Kind, Parameter
from fourfold.kernels.available import is_fast
from fourfold.kernels.update import update_
from fourfold.mesh.process import all_cores

MOMENTS = ("exp_avg", "exp_avg_sq")


def decays(kind: Kind, optimizer: Optimizer) -> bool:
    return kind in ("matrix", "projection") or (kind == "embedding" and optimizer.decay_embeddings)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """What of a tensor is stored here; the same memory."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


class AdamW:
    """Owns the moments (float32, shaped and placed like the parameters) and the count of updates taken."""

    def __init__(self, table: list[Parameter], placed: dict[str, nn.Parameter], optimizer: Optimizer) -> None:
        self.placed = placed
        self.shards = {name: nn.Parameter(local_tensor(parameter.detach())) for name, parameter in placed.items()}
        groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for parameter in table:
            groups[decays(parameter.kind, optimizer)].append(self.shards[parameter.name])
        self.engine = torch.optim.AdamW(
            [
                {"params": groups[True], "weight_decay": optimizer.weight_decay},
                {"params": groups[False], "weight_decay": 0.0},
            ],
            betas=(optimizer.adam_beta1, optimizer.adam_beta2),
            eps=optimizer.adam_epsilon,
            fused=True,
        )
        self.device = next(iter(self.shards.values())).device
        self.is_fast = is_fast(next(iter(self.shards.values())))
        count = torch.zeros((), device=self.device)
        for shard in self.shards.values():  # made now, so that a checkpoint can be read into them
            self.engine.state[shard] = {
                "step": count if self.is_fast else count.clone(),  # PyTorch's kernel counts for each
                "exp_avg": torch.zeros_like(shard),
                "exp_avg_sq": torch.zeros_like(shard),
            }

    def gradients(self) -> dict[str, torch.Tensor]:
        """The local gradients by parameter name. None may be missing: an engine that lost one must not pass unseen."""
        for name, parameter in self.placed.items():
            assert parameter.grad is not None, f"{name} got no gradient"
        return {name: local_tensor(parameter.grad) for name, parameter in self.placed.items()}  # type: ignore[arg-type]

    def drop_gradients(self) -> None:
        """What a step that was given up may have left."""
        for parameter in self.placed.values():
            parameter.grad = None

    def step(self, lr: torch.Tensor, divisor: torch.Tensor, is_skipped: torch.Tensor) -> None:
        """One update with gradients divided by `divisor`, or none where `is_skipped`; gradients are gone after it."""
        for name, gradient in self.gradients().items():
            self.shards[name].grad = gradient
            self.placed[name].grad = None
        if self.is_fast:
            self._fast_step(lr, divisor, is_skipped)
        else:
            for group in self.engine.param_groups:
                group["lr"] = float(lr)
            self.engine.grad_scale = divisor.to(self.device)  # type: ignore[attr-defined]
            self.engine.found_inf = is_skipped.to(self.device, torch.float32)  # type: ignore[attr-defined]
            is_offloaded = lr.is_cuda and self.device.type == "cpu"
            with all_cores() if is_offloaded else nullcontext():
                self.engine.step()
        self.engine.zero_grad(set_to_none=True)

    def _fast_step(self, lr: torch.Tensor, divisor: torch.Tensor, is_skipped: torch.Tensor) -> None:
        """The same update as PyTorch's, a third faster."""
        states = self.engine.state
        count = next(iter(states.values()))["step"]
        count += ~is_skipped
        updates = count.double()
        for group in self.engine.param_groups:
            beta1, beta2 = group["betas"]
            numbers = torch.stack([divisor, lr, 1 - beta1**updates, 1 - beta2**updates, is_skipped]).float()
            for shard in group["params"]:
                assert shard.grad is not None and shard.grad.stride() == shard.stride()
                mean, square = (states[shard][moment] for moment in MOMENTS)
                update_(shard, shard.grad, mean, square, numbers, group["betas"], group["eps"], group["weight_decay"])

    def moments(self) -> dict[str, dict[str, torch.Tensor]]:
        """By moment and parameter name, placed like the parameters; the tensors themselves."""
        return {
            moment: {
                name: self._placed_like(name, self.engine.state[shard][moment]) for name, shard in self.shards.items()
            }
            for moment in MOMENTS
        }

    def _placed_like(self, name: str, local: torch.Tensor) -> torch.Tensor:
        parameter = self.placed[name]
        if not isinstance(parameter, DTensor):
            return local
        return DTensor.from_local(
            local,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )

    @property
    def updates(self) -> int:
        """Updates taken, skipped ones not counted; the same for every parameter."""
        return int(next(iter(self.engine.state.values()))["step"])

    def set_updates(self, updates: int) -> None:
        for state in self.engine.state.values():
            state["step"].fill_(updates)
