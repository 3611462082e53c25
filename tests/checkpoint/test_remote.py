"""Checkpoints at an address: the manifest is the commit there."""

import io
import json
import os
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from upath import UPath

from fourfold.checkpoint import lock as module
from fourfold.checkpoint.lock import Lock, owner_here
from fourfold.checkpoint.manifest import DamagedError
from fourfold.checkpoint.paths import local_folder, locate
from fourfold.checkpoint.store import checkpoint_path, complete_checkpoints, is_complete, verify_checkpoint
from fourfold.checkpoint.together import find_together
from fourfold.errors import CheckpointError
from fourfold.generate.load import load_for_generation
from fourfold.train.loop import Outcome, train
from tests.checkpoint.saving import is_equal, loaded, names, save, tensors
from tests.tiny import alone, curve, run_training, tiny_config


@pytest.fixture(params=["memory", "s3"])
def address(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)  # what is kept locally is kept below the working folder
    top = "memory://bucket" if request.param == "memory" else request.getfixturevalue("s3")
    return f"{top}/{uuid.uuid4().hex}"


def run_remotely(folder: Path, address: str, **keys: Any) -> Outcome:
    config = tiny_config(folder, output_dir=address, **keys)
    local_folder(address).mkdir(parents=True, exist_ok=True)
    with alone() as process:
        return train(config, process, Console(file=io.StringIO()))


def test_what_is_loaded_is_what_was_saved(address: str) -> None:
    with alone():
        path = save(address)
        assert is_equal(loaded(path), tensors())
        for step in (5, 6):
            save(address, step, keep_last=2)
        assert names(locate(address)) == ["step_00000005", "step_00000006"]
        assert not path.exists(), "nothing of the old one is left"


def test_the_manifest_is_written_last_and_is_the_commit(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with alone():
        save(address, 4)
        path = save(address, 8)
        (path / "manifest.json").unlink()
        assert names(locate(address)) == ["step_00000004"]
        found = find_together(locate(address), "auto")
        assert found and found.step == 4
        assert is_equal(loaded(save(address, 8, seed=1)), tensors(1))


def test_damage_is_found_and_the_object_named(address: str) -> None:
    with alone():
        save(address, 4)
        file = save(address, 8) / "tensors" / "rank_00000.safetensors"
        content = bytearray(file.read_bytes())
        content[-3] ^= 1
        file.write_bytes(bytes(content))
        with pytest.raises(DamagedError, match="does not match its checksum") as caught:
            verify_checkpoint(checkpoint_path(locate(address), 8))
        assert str(caught.value).startswith(f"{address}/checkpoints/step_00000008/tensors/rank_00000")
        found = find_together(locate(address), "auto")
        assert found and found.step == 4
        assert names(locate(address)) == ["step_00000004"], "set aside"
        save(address, 8)  # a start, which removes leftovers
        aside = locate(address) / "checkpoints" / "step_00000008.damaged1"
        assert (aside / "tensors" / "rank_00000.safetensors").read_bytes() == bytes(content), "and not lost"
        assert names(locate(address)) == ["step_00000004", "step_00000008"]


def test_a_store_that_cannot_be_reached_is_an_error_and_no_empty_folder(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **keys: Any) -> None:
        raise RuntimeError("no route to host")  # as S3's EndpointConnectionError, no OSError

    output = locate(address)
    for name in ("info", "ls"):
        monkeypatch.setattr(output.fs, name, fail)  # type: ignore[union-attr]
    for ask in (is_complete, complete_checkpoints):
        with pytest.raises(CheckpointError, match=r"cannot be read: no route to host"):
            ask(output)


def test_an_address_that_no_package_knows_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match=r"nonsense://a/b cannot be used: .*nonsense.*; install the package"):
        locate("nonsense://a/b")
    monkeypatch.setitem(sys.modules, "adlfs", None)
    with pytest.raises(CheckpointError, match=r"abfs://a/b cannot be used: .*adlfs"):
        locate("abfs://a/b")


def test_a_run_trains_and_resumes_there_and_its_curves_go_on_elsewhere(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_training(tiny_config(tmp_path, output_dir=tmp_path / "here", decay_steps=8))
    run_remotely(tmp_path, address, max_steps=4, save_steps=2, decay_steps=8)
    elsewhere = tmp_path / "another machine"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    second = run_remotely(tmp_path, address, decay_steps=8)
    assert (second.run.first_step, second.step) == (4, 8)
    assert curve(local_folder(address), "loss") == curve(tmp_path / "here", "loss")
    output = locate(address)
    assert (output / "metrics.jsonl").read_text() == (local_folder(address) / "metrics.jsonl").read_text()
    assert (output / "config.yaml").exists() and len(list((output / "tensorboard").iterdir())) >= 1
    assert not (output / ".lock").exists()
    gpt, _, _ = load_for_generation(complete_checkpoints(output)[-1], torch.device("cpu"))
    trained = dict(second.run.parallel.named_parameters())
    assert all(torch.equal(each, trained[name]) for name, each in gpt.named_parameters())


def test_weights_may_come_from_there(address: str, tmp_path: Path) -> None:
    run_remotely(tmp_path, address, max_steps=2)
    config = tiny_config(tmp_path, output_dir=tmp_path / "new", max_steps=1, model_name_or_path=address)
    assert run_training(config).run.first_step == 0


def write_lock(address: str, **changed: Any) -> UPath:
    file = locate(address) / ".lock"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(owner_here() | changed))
    return file  # type: ignore[return-value]


def test_one_writer_where_there_are_no_locks(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BEAT_S", 0.1)
    monkeypatch.setattr(module, "SETTLE_S", 0.05)
    with alone():
        with (
            Lock(locate(address)),
            pytest.raises(CheckpointError, match=rf"in use by another run, process {os.getpid()}"),
        ):
            Lock(locate(address)).__enter__()
        write_lock(address, started="1")  # a number used again: its owner is dead
        with Lock(locate(address)):
            pass
        write_lock(address, host="elsewhere", pid=7)  # and silent
        with Lock(locate(address)):
            pass
        file = write_lock(address, host="elsewhere", pid=7)
        beat = threading.Timer(
            0.15, lambda: file.write_text(json.dumps(owner_here() | {"host": "elsewhere", "pid": 7, "beat": 5}))
        )
        beat.start()
        with pytest.raises(CheckpointError, match="in use by another run, process 7 on elsewhere"):
            Lock(locate(address)).__enter__()
        beat.join()
        file = write_lock(address, host="elsewhere", pid=7)
        released = threading.Timer(0.15, file.unlink)
        released.start()
        with Lock(locate(address)):
            pass
        released.join()


def test_a_lock_that_was_taken_over_is_left_to_its_new_owner(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BEAT_S", 0.05)
    monkeypatch.setattr(module, "SETTLE_S", 0.01)
    with alone(), Lock(locate(address)) as lock:
        file = write_lock(address, host="elsewhere", pid=7)
        assert lock.heart
        lock.heart.join(5)
        assert not lock.heart.is_alive()
    assert json.loads(file.read_text())["pid"] == 7


def test_a_heart_that_skips_a_beat_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BEAT_S", 0.02)
    monkeypatch.setattr(module, "SETTLE_S", 0.01)
    lock = Lock(locate(f"memory://bucket/{uuid.uuid4().hex}"))

    def fail(file: object) -> None:
        raise RuntimeError("no route to host")

    with alone(), lock:
        with monkeypatch.context() as patched:
            patched.setattr(module, "read_owner", fail)
            time.sleep(0.1)
        assert lock.heart and lock.heart.is_alive()
