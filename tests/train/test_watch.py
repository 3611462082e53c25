import faulthandler
import logging
import math
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from fourfold.config.schema import Engine
from fourfold.train.stacks import Frame, Standing, find_suspects, read_dump, render_report, take_stacks
from fourfold.train.stragglers import AGAIN_S, QUIET_S, Stragglers, busy_s, find_slowest
from fourfold.train.watch import HUNG, Watch
from tests.tiny import alone, metrics_of, run_training, tiny_config

LOOP: Frame = ("/x/fourfold/train/loop.py", 1, "train_alone")
COMPUTES: list[Frame] = [LOOP, ("/x/fourfold/model/gpt.py", 3, "forward")]
WAITS: list[Frame] = [LOOP, ("/x/torch/distributed/distributed_c10d.py", 7, "all_reduce")]
# a pipe's schedule stands around what a stage computes
PIPED: list[Frame] = [LOOP, ("/x/torch/distributed/pipelining/schedules.py", 9, "step"), *COMPUTES[1:]]


def standing(rank: int, stack: list[Frame], **known: Any) -> Standing:
    return Standing(rank, "host", 100 + rank, **{"beats": 5, "step": 17, "work": "training", **known})._replace(
        stacks={"main": stack}
    )


# --- who is to blame -----------------------------------------------------------------------------------------------


def test_a_rank_that_cannot_speak_is_blamed_before_one_that_is_behind() -> None:
    ranks = [standing(0, WAITS), standing(1, COMPUTES, trouble="is suspended"), standing(2, WAITS, beats=4)]
    assert find_suspects(ranks) == {1: "is suspended"}


def test_a_rank_that_is_behind_is_blamed_before_one_that_computes() -> None:
    assert list(find_suspects([standing(0, COMPUTES), standing(1, WAITS, beats=4), standing(2, WAITS)])) == [1]


@pytest.mark.parametrize("stack", [COMPUTES, PIPED])
def test_among_ranks_that_are_equally_far_the_one_that_waits_for_nobody_is_blamed(stack: list[Frame]) -> None:
    assert list(find_suspects([standing(0, WAITS), standing(1, stack), standing(2, WAITS)])) == [1]


def test_nobody_is_blamed_when_all_wait_for_each_other() -> None:
    assert find_suspects([standing(0, WAITS), standing(1, WAITS)]) == {}
    assert "all ranks wait for each other in step 17" in render_report([standing(0, WAITS), standing(1, WAITS)], 5, "")


def test_the_report_names_the_suspect_and_shows_each_stack_once() -> None:
    report = render_report([standing(0, WAITS), standing(1, COMPUTES), standing(2, WAITS)], 30, "logs/workerlog.*")
    first, *rest = report.splitlines()
    assert "30 s" in first and "rank 1 on host (pid 101) waits for no other rank in step 17 while training" in first
    assert rest[0].startswith("rank 1, in step 17") and "ranks 0, 2, in step 17" in report
    assert report.count("all_reduce") == 1 and "logs/workerlog.*" in rest[-1]


def test_what_faulthandler_writes_is_read_as_the_stack_that_python_knows(tmp_path: Path) -> None:
    done = threading.Event()
    other = threading.Thread(target=done.wait)
    other.start()
    with (tmp_path / "dump").open("w+") as file:
        file.write("[a line of the log]\n")
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)
        known = take_stacks("training")["main"]
    done.set()
    other.join()
    found = read_dump((tmp_path / "dump").read_text())
    assert [(file, name) for file, _, name in found] == [(file, name) for file, _, name in known[: len(found)]]
    assert found[-1][2] == "test_what_faulthandler_writes_is_read_as_the_stack_that_python_knows"


# --- when ----------------------------------------------------------------------------------------------------------

WRITES_THEN_HANGS = """
import sys, time
from pathlib import Path
from fourfold.config.schema import Engine
from fourfold.train.watch import Watch
from tests.tiny import alone

def write_slowly(path):
    for _ in range(35):
        path.write_bytes(bytes(2**20))
        time.sleep(0.1)

with alone() as process, Watch(process, Engine(hang_timeout=2, compile=False), None) as watch:
    time.sleep(2.5)
    watch.beat(3, "saving")
    write_slowly(Path(sys.argv[1]))
    print("written", flush=True)
    time.sleep(60)
"""


def test_a_save_that_still_writes_is_no_hang_and_one_that_has_stopped_is(tmp_path: Path) -> None:
    """Nor is what comes before the first beat."""
    done = subprocess.run(
        [sys.executable, "-c", WRITES_THEN_HANGS, str(tmp_path / "file")], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == HUNG and done.stdout == "written\n"
    # without a log, the dump of all threads goes to standard error
    assert "Current thread" in done.stderr and "time.sleep(60)" not in done.stderr


def test_only_what_is_compiled_has_all_the_time_and_only_at_first(tmp_path: Path) -> None:
    with alone() as process, Watch(process, Engine(hang_timeout=60, compile=True), None) as watch:
        limits = []
        for step in (1, 2):
            for work in ("training", "evaluating"):
                watch.beat(step, work)
                limits.append(watch.limit_s)
        assert limits == [math.inf, math.inf, 60, 60]
    with alone() as process, Watch(process, Engine(hang_timeout=60, compile=False), None) as watch:
        watch.beat(1, "training")
        assert watch.limit_s == 60


# --- stragglers ----------------------------------------------------------------------------------------------------


def test_one_of_two_ranks_can_stand_out() -> None:
    assert find_slowest([0.2, 0.5]) == (1, 0.5, 0.2)
    assert find_slowest([0.2, 0.9, 0.3, 0.1]) == (1, 0.9, 0.2)


def test_the_slowest_rank_is_named_once_and_again_when_it_is_another_or_after_a_while(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ranks = Stragglers(["a", "b", "c"])
    even, second, third = [0.2, 0.2, 0.29], [0.2, 0.42, 0.2], [0.2, 0.2, 0.301]
    with caplog.at_level(logging.WARNING, logger="fourfold"):
        ranks.add(second, 10, 0.0)  # the first steps make ready
        ranks.add(even, 10, 1.0)
        assert not caplog.messages
        for now_s in (2.0, 3.0, 2.0 + AGAIN_S - 1):
            ranks.add(second, 10, now_s)
        assert len(caplog.messages) == 1
        ranks.add(second, 10, 2.0 + AGAIN_S)
        assert len(caplog.messages) == 2
        ranks.add(third, 10, 3.0 + AGAIN_S)
        assert len(caplog.messages) == 2
        ranks.add(third, 10, 3.0 + AGAIN_S + QUIET_S)
    assert caplog.messages[0].startswith("rank 1 on b takes 2.1 times as long as the median rank (0.42 s against 0.2 s")
    assert caplog.messages[-1].startswith("rank 2 on c takes 1.5 times")


def test_a_few_short_steps_name_nobody(caplog: pytest.LogCaptureFixture) -> None:
    ranks = Stragglers(["a", "b"])
    for _ in range(20):
        ranks.add([0.001, 0.005], 10, 0.0)
    assert not caplog.messages


def test_own_time_is_work_and_not_waiting() -> None:
    began_s = busy_s()
    threading.Event().wait(0.3)
    waited_s = busy_s() - began_s
    while busy_s() - began_s - waited_s < 0.1:
        pass
    assert waited_s < 0.1


def test_one_process_is_not_compared_with_itself(tmp_path: Path) -> None:
    run_training(tiny_config(tmp_path, max_steps=2))
    assert not any("rank" in key for values in metrics_of(tmp_path / "run") for key in values)
