"""Being asked to stop. The first SIGINT or SIGTERM is remembered and answered between two steps; the second SIGINT
stops at once.
"""

import signal
from collections import deque
from types import FrameType
from typing import Self

import torch

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def exit_code(number: signal.Signals | None) -> int:
    """As a shell has it: 128 + signal. A rank that stops because another was asked to ends as by SIGTERM."""
    return 128 + (number or signal.SIGTERM)


class Interrupt:
    """Catches the signals for the length of a `with` block. `signal` is the one that came, or None."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)


class Agreement:
    """All ranks stop after the same step, whichever of them was asked. Votes travel with each step's results; on a GPU
    they are read one step late, so that nobody waits for them."""

    def __init__(self, device: torch.device) -> None:
        self.unread: deque[torch.Tensor] = deque()
        self.delay = 1 if device.type == "cuda" else 0

    def is_reached(self, votes: torch.Tensor) -> bool:
        self.unread.append(votes)
        return len(self.unread) > self.delay and bool(self.unread.popleft() > 0)
