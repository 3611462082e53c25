"""Being asked to stop. The first SIGINT, SIGTERM or SIGUSR1 is remembered and answered between two steps, as is the
approach of `max_time`; a second SIGINT stops at once.
"""

import os
import signal
import time
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Self

import torch
import torch.distributed as dist

from fourfold.train.readback import read_later

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
OUT_OF_TIME = 75
"""The exit code of a run that `max_time` stopped: the shell's word for "try again"."""


def agree_on_exit_code(mine: signal.Signals | None) -> int:
    """The same on all ranks after a stop that all agreed to: 128 + signal, as a shell has it, if one of them got it."""
    signals: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(signals, int(mine or 0))
    return 128 + max(signals) if any(signals) else OUT_OF_TIME


class Interrupt:
    """Catches the signals for the length of a `with` block. `signal` is the first that came, or None."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._has_sigint = False
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            if self._has_sigint:
                raise KeyboardInterrupt
            self._has_sigint = True
        self.signal = self.signal or signal.Signals(number)


class Deadline:
    """`max_time`, counted from the beginning of this process. It is near while there is still time for a step and a
    save; `is_near` is asked once per step, and so knows how long steps take."""

    def __init__(self, max_time_s: float | None) -> None:
        self.end_s = None if max_time_s is None else time.monotonic() - process_age_s() + max_time_s
        self.asked_s: deque[float] = deque(maxlen=11)

    def is_near(self, save_s: float) -> bool:
        if self.end_s is None:
            return False
        self.asked_s.append(time.monotonic())
        times = list(self.asked_s)
        slowest_step_s = max((after - before for before, after in pairwise(times)), default=0.0)
        return times[-1] + 2 * slowest_step_s + save_s >= self.end_s


def process_age_s() -> float:
    """Start-up counts too: a queue's clock was running all the while."""
    began_ticks = int(Path("/proc/self/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began_ticks / os.sysconf("SC_CLK_TCK")


class Agreement:
    """All ranks stop after the same step, whichever of them was asked. Votes travel with each step's results; on a GPU
    they are read one step late, so that nobody waits for them."""

    def __init__(self, device: torch.device) -> None:
        self.unread: deque[Callable[[], torch.Tensor]] = deque()
        self.delay = 1 if device.type == "cuda" else 0

    def is_reached(self, votes: torch.Tensor) -> bool:
        self.unread.append(read_later(votes))
        return len(self.unread) > self.delay and bool(self.unread.popleft()() > 0)
