"""The loss scale that keeps float16 gradients from underflowing: doubled after a long run of good steps, halved after
one that overflowed. It lives on the device and is never read back inside a step.
"""

import torch

GROWTH_INTERVAL = 2000
MAX_SCALE = 2.0**24


class LossScale:
    """Constant 1 unless `is_dynamic`. `scale` and `good_steps` are saved with a checkpoint."""

    def __init__(self, first_scale: float, is_dynamic: bool, device: torch.device) -> None:
        self.is_dynamic = is_dynamic
        self.scale = torch.tensor(first_scale if is_dynamic else 1.0, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int64, device=device)

    def update(self, is_skipped: torch.Tensor) -> None:
        if not self.is_dynamic:
            return
        grows = self.good_steps + 1 >= GROWTH_INTERVAL
        grown = torch.where(grows, (self.scale * 2.0).clamp(max=MAX_SCALE), self.scale)
        # in place: a recorded step knows these tensors
        self.scale.copy_(torch.where(is_skipped, (self.scale * 0.5).clamp(min=1.0), grown))
        self.good_steps.copy_(torch.where(is_skipped | grows, 0, self.good_steps + 1))

    def state(self) -> dict[str, float]:
        """Nothing where the scale is constant, so that a later run in float16 begins with a scale of its own."""
        return {"scale": float(self.scale), "good_steps": int(self.good_steps)} if self.is_dynamic else {}

    def load_state(self, state: dict[str, float]) -> None:
        if self.is_dynamic and state:
            self.scale.fill_(state["scale"])
            self.good_steps.fill_(int(state["good_steps"]))
