"""Which rank holds up the others. They wait for each other in every step, so by the wall clock all are equally slow;
what differs is each rank's own time: what its step takes less what it waits for other ranks.

Own time is the time the main thread computes, or would if the system gave it a core, and the time it waits for its
batch. On a GPU that is the host's share of the step alone: a device that is slow makes its neighbours' collectives wait
on their devices, which no clock of the host can tell from computing.
"""

import logging
import os
import time
from typing import NamedTuple

log = logging.getLogger("fourfold")

RATIO = 1.5
"""How many times the median a rank's own time has to be for it to be named."""
STEPS, WORK_S = 10, 2.0
"""How many steps are averaged at least, and how much work of the slowest: less differs by chance."""
AGAIN_S = 600.0
"""When a rank that is still the slowest is named again."""
QUIET_S = 60.0
"""No rank is named so soon after another."""


def busy_s() -> float:
    """This thread's time on a core and in the queue for one."""
    try:
        file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)  # a third of what a `Path` takes, at every step
        try:
            on_core, queued, _ = os.read(file, 100).split()
        finally:
            os.close(file)
        return (int(on_core) + int(queued)) / 1e9
    except (OSError, ValueError):  # a kernel that does not count the queue
        return time.thread_time()


class Slowest(NamedTuple):
    rank: int
    own_s: float
    median_s: float
    """The lower one of two in the middle, so that one of two ranks can stand out."""

    @property
    def ratio(self) -> float:
        return self.own_s / self.median_s if self.median_s > 0.0 else 1.0


def find_slowest(rank_s: list[float]) -> Slowest:
    own_s = max(rank_s)
    return Slowest(rank_s.index(own_s), own_s, sorted(rank_s)[(len(rank_s) - 1) // 2])


class Stragglers:
    """Names the slowest rank in the log when it stands out, and not at every line."""

    def __init__(self, hosts: list[str]) -> None:
        self.hosts = hosts
        self.summed_s, self.steps, self.is_warm = [0.0] * len(hosts), 0, False
        self.told: int | None = None
        self.told_s = float("-inf")

    def add(self, rank_s: list[float], steps: int, now_s: float) -> None:
        """The mean own times of some steps. Among the first is the run's first step, which readies what others use."""
        if not self.is_warm:
            self.is_warm = True
            return
        self.summed_s = [old + new * steps for old, new in zip(self.summed_s, rank_s, strict=True)]
        self.steps += steps
        if self.steps < STEPS or max(self.summed_s) < WORK_S:
            return
        found = find_slowest([each / self.steps for each in self.summed_s])
        self.summed_s, self.steps = [0.0] * len(self.hosts), 0
        quiet_s = AGAIN_S if found.rank == self.told else QUIET_S
        if found.ratio >= RATIO and now_s - self.told_s >= quiet_s:
            self.told, self.told_s = found.rank, now_s
            log.warning(
                f"rank {found.rank} on {self.hosts[found.rank]} takes {found.ratio:.1f} times as long as the median "
                f"rank ({found.own_s:.3g} s against {found.median_s:.3g} s per step), and the others wait for it"
            )
