from pathlib import Path

from fourfold.mesh.fingerprint import MOST_TOLD, differences, fingerprint_of
from tests.tiny import tiny_config


def taken_on(host: str, folder: Path, **keys: object) -> dict[str, object]:
    return fingerprint_of(tiny_config(folder, **keys)) | {"host": host}


def test_processes_started_alike_do_not_differ_whatever_their_host(tmp_path: Path) -> None:
    assert differences([taken_on("one", tmp_path), taken_on("two", tmp_path)]) == ""


def test_a_difference_is_told_with_its_key_both_values_and_both_hosts(tmp_path: Path) -> None:
    told = differences([taken_on("one", tmp_path), taken_on("one", tmp_path), taken_on("two", tmp_path, max_lr=0.5)])
    assert "optimizer.max_lr is 0.01 for rank 0 on one, 0.5 for rank 2 on two" in told
    assert "more" not in told


def test_only_a_handful_of_many_differences_is_told(tmp_path: Path) -> None:
    keys = {"max_lr": 0.5, "min_lr": 0.1, "hidden_size": 64, "seed": 7, "max_steps": 3, "grad_clip": 2, "keep_last": 9}
    told = differences([taken_on("one", tmp_path), taken_on("two", tmp_path, **keys)])
    assert told.count(" for rank 1 on two") == MOST_TOLD and "more" in told


def test_another_version_of_the_code_is_a_difference(tmp_path: Path) -> None:
    newer = taken_on("two", tmp_path) | {"fourfold": "9.9.9 (0badc0de)"}
    assert "9.9.9 (0badc0de) for rank 1 on two" in differences([taken_on("one", tmp_path), newer])


def test_caches_may_lie_in_different_places(tmp_path: Path) -> None:
    assert differences([taken_on("one", tmp_path), taken_on("two", tmp_path, cache_dir=str(tmp_path))]) == ""
