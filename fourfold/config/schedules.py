"""What each pipe schedule asks of the number of micro batches, and what it cannot do.

These are the rules of `torch.distributed.pipelining.schedules`, stated once, so that a config is judged without torch.
How many pipe stages a process holds is in `layout/stages.py`.
"""

from fourfold.config.schema import Schedule

INTERLEAVED: frozenset[Schedule] = frozenset({"Interleaved1F1B", "InterleavedZeroBubble"})
"""virtual_pp_degree pipe stages per process."""
SPLITS_BACKWARD: frozenset[Schedule] = frozenset({"InterleavedZeroBubble", "ZBV", "DualPipeV"})
"""Backward is split into input and weight parts, which a compiled model cannot do."""


def fewest_micro_batches(schedule: Schedule, pp_degree: int) -> int:
    """1F1B and DualPipeV need one micro batch per pipe stage; the others run with any number."""
    if pp_degree == 1:
        return 1
    return {"1F1B": pp_degree, "DualPipeV": 2 * pp_degree}.get(schedule, 1)


def is_count_legal(schedule: Schedule, pp_degree: int, micro_batches: int) -> bool:
    """Whether a step of this many micro batches can be scheduled."""
    if pp_degree == 1:
        return True
    if schedule in INTERLEAVED:
        # Micro batches go through the pipe in rounds of pp_degree or a little more, all of one size.
        rounds = max(1, micro_batches // pp_degree)
        return micro_batches % rounds == 0
    return micro_batches >= fewest_micro_batches(schedule, pp_degree)
