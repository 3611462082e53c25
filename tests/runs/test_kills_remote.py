"""Two real ranks that save to an S3 server, are killed, and go on from what is committed there."""

import os
import random
import signal
import time
from pathlib import Path

import pytest

from fourfold.checkpoint.paths import local_folder, locate
from fourfold.checkpoint.store import complete_checkpoints, verify_checkpoint
from tests.runs.forked import Forks
from tests.runs.test_kills import TINY
from tests.tiny import curve, write_text


@pytest.mark.slow
def test_a_killed_run_goes_on_from_a_remote_folder(tmp_path: Path, s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    address, rng = f"{s3}/killed", random.Random(1)
    configs = {"here": tmp_path / "here.yaml", "there": tmp_path / "there.yaml"}
    for name, output in (("here", str(tmp_path / "here")), ("there", address)):
        text = TINY.format(text=write_text(tmp_path), output=output, steps=12)
        configs[name].write_text(text, encoding="utf-8")
    with Forks(tmp_path) as forks:
        assert forks.wait(forks.start(configs["here"], 2, tmp_path / "here.log")) == [0, 0]
        for _ in range(3):
            pids = forks.start(configs["there"], 2, tmp_path / "there.log")
            time.sleep(rng.uniform(1.0, 3.5))
            os.kill(rng.choice(pids), signal.SIGKILL)
            codes = forks.wait(pids)
            for path in complete_checkpoints(locate(address)):
                verify_checkpoint(path)
        while codes != [0, 0]:
            codes = forks.wait(forks.start(configs["there"], 2, tmp_path / "there.log"))
    assert curve(local_folder(address), "loss") == curve(tmp_path / "here", "loss")
    assert complete_checkpoints(locate(address))[-1].name == "step_00000012"
