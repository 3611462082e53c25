"""Kill it anywhere: SIGKILL to one rank or to all, at random moments, saving included. No complete checkpoint is lost,
none that is not sound is accepted, and what is started again ends with the losses of a run that was left alone."""

import os
import random
import signal
import time
from pathlib import Path

import pytest

from fourfold.checkpoint.paths import AnyPath
from fourfold.checkpoint.store import complete_checkpoints, verify_checkpoint
from tests.runs.forked import Forks
from tests.runs.test_launch import is_alive
from tests.tiny import curve, write_text

TINY = """
global: {{device: cpu, global_batch_size: 8, micro_batch_size: 2}}
model: {{num_layers: 2, hidden_size: 32, num_attention_heads: 2, hidden_dropout_prob: 0.1}}
data: {{input_dir: {text}, max_seq_len: 16, split: "90,10,0"}}
distributed: {{sharding: {{sharding_degree: 2, sharding_stage: 3}}}}
engine:
  {{max_steps: {steps}, logging_freq: 1, eval_iters: 0, save_steps: 2, keep_last: 0, output_dir: {output}}}
"""
RANKS = 2


def write_config(folder: Path, name: str, steps: int) -> Path:
    if not (folder / "text.txt").exists():
        write_text(folder)
    path = folder / f"{name}.yaml"
    path.write_text(TINY.format(text=folder / "text.txt", output=folder / name, steps=steps), encoding="utf-8")
    return path


def is_writing(output: Path) -> bool:
    return any((output / "checkpoints").glob(".step_*.writing"))


def wait_for_the_moment(rng: random.Random, output: Path, pid: int) -> None:
    """Any moment of a run, or a moment inside of a save."""
    if rng.random() < 0.4:
        time.sleep(rng.uniform(0.0, 2.5))
        return
    wanted = rng.randrange(1, 4)  # the first save of this attempt, or a later one
    for _ in range(wanted):
        while is_writing(output) and is_alive(pid):
            time.sleep(0.0005)
        while not is_writing(output) and is_alive(pid):
            time.sleep(0.0005)
    time.sleep(rng.uniform(0.0, 0.02))


def kill_until_done(config: Path, output: Path, rng: random.Random, forks: Forks, most: int) -> tuple[int, int]:
    """How many kills landed before the run came to its end, and how many of them inside of a save."""
    log = output.with_suffix(".log")
    known: set[AnyPath] = set()
    kills = inside = 0
    while True:
        pids = forks.start(config, RANKS, log)
        if kills < most:
            wait_for_the_moment(rng, output, pids[0])
            victims = rng.choice([[pids[0]], [pids[1]], pids])
            inside += is_writing(output)
            for pid in victims:
                os.kill(pid, signal.SIGKILL)
        codes = forks.wait(pids)
        complete = set(complete_checkpoints(output))
        assert known <= complete, "a complete checkpoint was lost"
        for path in complete - known:
            verify_checkpoint(path)
        known = complete
        if codes == [0, 0]:
            return kills, inside
        kills += 1
        assert -signal.SIGKILL in codes, log.read_text()[-3000:]


def kill_many(folder: Path, forks: Forks, wanted: int, steps: int) -> None:
    rng = random.Random(4)
    undisturbed = forks.start(write_config(folder, "undisturbed", steps), RANKS, folder / "undisturbed.log")
    assert forks.wait(undisturbed) == [0, 0], (folder / "undisturbed.log").read_text()[-3000:]
    expected = {key: curve(folder / "undisturbed", key) for key in ("loss", "grad_norm", "lr")}
    assert len(expected["loss"]) == steps
    kills = inside = rounds = 0
    while kills < wanted:
        rounds += 1
        config, output = write_config(folder, f"killed{rounds}", steps), folder / f"killed{rounds}"
        more, more_inside = kill_until_done(config, output, rng, forks, wanted - kills)
        kills, inside = kills + more, inside + more_inside
        for key, values in expected.items():
            assert curve(output, key) == values, f"{key} after {more} kills"
    assert kills == wanted and inside >= wanted // 10, f"{kills} kills, {inside} of them inside of a save"


def test_a_run_killed_a_few_times_ends_as_if_it_had_never_been(tmp_path: Path, forks: Forks) -> None:
    kill_many(tmp_path, forks, 4, 24)


@pytest.mark.slow
def test_a_run_killed_fifty_times_ends_as_if_it_had_never_been(tmp_path: Path, forks: Forks) -> None:
    kill_many(tmp_path, forks, 50, 60)
