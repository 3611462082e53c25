"""Four real ranks, forked by one process so that they start in a blink."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fourfold.errors import FourfoldError
from fourfold.mesh.process import join_processes, keep_compiled
from tests.mesh.four_ranks import RANKS, TIMEOUT_S

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "tests.mesh.four_ranks", str(tmp_path_factory.mktemp("ranks"))]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, env=environment, check=False)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(found) == RANKS, done.stdout + done.stderr
    return found


def test_every_group_has_the_timeout_that_was_asked_for(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert set(rank["timeouts_s"]) == {TIMEOUT_S}, rank
        assert {2, RANKS} <= set(rank["group_sizes"])  # the whole, and those of pipe and shards
        assert len(rank["timeouts_s"]) >= 4


def test_a_worker_has_one_thread_if_nobody_says_otherwise(ranks: list[dict[str, Any]]) -> None:
    assert [rank["threads"] for rank in ranks] == [1] * RANKS


def test_a_folder_that_machines_do_not_share_is_refused_on_all_in_the_same_words(ranks: list[dict[str, Any]]) -> None:
    assert {rank["shared"] for rank in ranks} == {""}
    assert len({rank["not_shared"].partition(", as ")[2] for rank in ranks}) == 1  # but for the path
    sentence = ranks[0]["not_shared"]
    assert "as rank 2 on" in sentence and "is not the one that rank 0 writes to" in sentence
    assert "that all machines share" in sentence and "s3://" in sentence


def test_a_lone_process_leaves_its_group_after_an_error_too() -> None:
    with pytest.raises(FourfoldError, match="out of paper"), join_processes("cpu", 60.0):
        assert dist.get_world_size() == 1
        raise FourfoldError("out of paper")
    assert not dist.is_initialized()


def test_compiled_code_is_kept_in_a_known_folder_unless_another_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "elsewhere")
    monkeypatch.setenv("TRITON_CACHE_DIR", "theirs")
    assert keep_compiled() == "elsewhere" and os.environ["TRITON_CACHE_DIR"] == "theirs"
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.delenv("TRITON_CACHE_DIR")
    ours = tmp_path / ".cache" / "fourfold" / "compiled"
    assert Path(keep_compiled()) == ours and ours.is_dir()
    assert Path(os.environ["TRITON_CACHE_DIR"]) == ours / "triton"
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    assert keep_compiled() == "the temporary folder" and "TORCHINDUCTOR_CACHE_DIR" not in os.environ
