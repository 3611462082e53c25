"""Where ranks stand: their Python stacks, who of them is to blame for a hang, and the report that says so.

Nothing here talks to another process. A rank's stack is a list of frames, outermost first, however it was taken: from
the interpreter that runs this, or from what `faulthandler` has written for a rank that could not speak for itself.
"""

import linecache
import re
import sys
import threading
import traceback
from typing import NamedTuple

WORK = ("training", "evaluating", "saving")
DUMPED_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
# where a run begins; what lies outside of it is the same on every rank and says nothing
OUTERMOST = "fourfold/train/loop.py"
# torch's own wrappers, between a call and what is called
WRAPPERS = ("torch/nn/modules/module.py", "_contextlib.py", "_dynamo/eval_frame.py", "distributed/c10d_logger.py")
COLLECTIVES = "torch/distributed/"
# its frames stand around the computation of a stage as well as around the waiting for another
PIPE = "torch/distributed/pipelining/"
INNERMOST = 4

Frame = tuple[str, int, str]
"""File, line, function."""


class Standing(NamedTuple):
    """What is known of one rank at one moment."""

    rank: int
    host: str
    pid: int
    beats: int = 0
    """How often it has begun something; the same on all ranks that are equally far. 0 if that is not known."""
    step: int = 0
    work: str = ""
    idle_s: float = 0.0
    trouble: str = ""
    """Why it could not speak for itself, in words."""
    stacks: dict[str, list[Frame]] = {}  # noqa: RUF012  never changed
    """By thread: the main one's and, while that waits for it, the saver's."""

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} (pid {self.pid})"

    @property
    def place(self) -> str:
        return f"in step {self.step} while {self.work}" if self.beats else "in a step that is not known"


# --- taking --------------------------------------------------------------------------------------------------------


def take_stacks(work: str) -> dict[str, list[Frame]]:
    """Of this process, now."""
    frames = sys._current_frames()
    wanted = {"main": threading.main_thread()}
    if work == "saving":
        wanted |= {thread.name: thread for thread in threading.enumerate() if thread.name == "saver"}
    found = {}
    for name, thread in wanted.items():
        if thread.ident in frames:
            walked = traceback.walk_stack(frames[thread.ident])
            found[name] = [(f.f_code.co_filename, line, f.f_code.co_name) for f, line in walked][::-1]
    return found


def read_dump(text: str) -> list[Frame]:
    """The main thread's frames, which come last in what `faulthandler` writes; other lines are passed over."""
    threads = re.split(r"^(?:Current thread|Thread) .*$", text, flags=re.MULTILINE)
    if len(threads) < 2:
        return []
    found = [DUMPED_FRAME.fullmatch(line) for line in threads[-1].splitlines()]
    return [(each[1], int(each[2]), each[3]) for each in found if each][::-1]


# --- judging -------------------------------------------------------------------------------------------------------


def waits_for_others(standing: Standing) -> bool:
    """Whether its innermost frames lie in torch.distributed, or in a step's numbers not yet there."""
    frames = standing.stacks.get("saver") or standing.stacks.get("main", [])
    if not frames:
        return False
    if COLLECTIVES in frames[-1][0] or any(each[0].endswith("fourfold/train/readback.py") for each in frames[-2:]):
        return True
    return any(COLLECTIVES in file and PIPE not in file for file, _, _ in frames[-INNERMOST:])


def is_debugged(stacks: dict[str, list[Frame]]) -> bool:
    """Whether somebody sits before it and thinks."""
    return any(file.endswith(("/pdb.py", "/bdb.py")) for file, _, _ in stacks.get("main", []))


def find_suspects(standings: list[Standing]) -> dict[int, str]:
    """Rank to what is wrong with it: those that cannot speak; else those behind; else those that wait for nobody."""
    silent = {each.rank: each.trouble for each in standings if each.trouble}
    if silent:
        return silent
    furthest = max(each.beats for each in standings)
    behind = {each.rank: "has not come as far as others" for each in standings if each.beats < furthest}
    if behind:
        return behind
    busy = {each.rank: "waits for no other rank" for each in standings if not waits_for_others(each)}
    return busy if len(standings) == 1 or len(busy) < len(standings) else {}


# --- telling -------------------------------------------------------------------------------------------------------


def headline(standings: list[Standing], limit_s: float) -> str:
    suspects = find_suspects(standings)
    told = [f"{each} {suspects[each.rank]} {each.place}" for each in standings if each.rank in suspects]
    if len(standings) == 1:
        told = [f"{standings[0]} stands {standings[0].place}"]
    elif not told:
        told = [f"all ranks wait for each other {standings[0].place}"]
    listed = told if len(told) <= 8 else [*told[:8], f"and {len(told) - 8} more"]
    return f"nothing has moved for {limit_s:g} s (engine.hang_timeout), so the job is ended: {'; '.join(listed)}"


def render_report(standings: list[Standing], limit_s: float, logs: str) -> str:
    """One block for all ranks; those with the same stack share it, the suspects' stacks come first. Only what the run
    has called is shown, without torch's wrappers: everything is in the logs."""
    suspects = find_suspects(standings)
    groups: dict[str, list[Standing]] = {}
    for each in sorted(standings, key=lambda each: (each.rank not in suspects, each.rank)):
        groups.setdefault(render_stacks(each), []).append(each)
    lines = [headline(standings, limit_s)]
    for stack, members in groups.items():
        lines += [f"{name_ranks([each.rank for each in members])}, {members[0].place}:", stack]
    return "\n".join([*lines, f"all threads of each rank are in {logs}"])


def name_ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def render_stacks(standing: Standing) -> str:
    if not any(standing.stacks.values()):
        return f"  no stack: {standing.trouble or 'it has none'}"
    parts = []
    for name, frames in standing.stacks.items():
        parts += [f"  (thread {name})"] if name != "main" else []
        first = next((i for i, frame in enumerate(frames) if frame[0].endswith(OUTERMOST)), 0)
        for file, line, function in frames[first:]:
            if file.endswith(WRAPPERS):
                continue
            parts.append(f'  File "{file}", line {line}, in {function}')
            parts += [f"    {text}"] if (text := linecache.getline(file, line).strip()) else []
    return "\n".join(parts)
