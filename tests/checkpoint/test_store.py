import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from fourfold.checkpoint import store
from fourfold.checkpoint.state import Progress
from fourfold.checkpoint.store import (
    checkpoint_path,
    complete_checkpoints,
    find_checkpoint,
    load_progress,
    load_tensors,
    save_checkpoint,
    verify_checkpoint,
)
from fourfold.errors import CheckpointError
from tests.tiny import alone


@pytest.fixture(autouse=True, scope="module")
def process_group() -> Iterator[None]:
    with alone():
        yield


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"model.a": (3, 5), "model.b": (7,), "optimizer.exp_avg.a": (3, 5)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def progress(step: int) -> Progress:
    return Progress(step=step, updates=step - 1, loss_scale={"scale": 512.0, "good_steps": 3}, corpus="abc")


def save(folder: Path, step: int = 4, keep_last: int = 0, seed: int = 0) -> Path:
    return save_checkpoint(folder, tensors(seed), progress(step), {"config.yaml": "model: {}\n"}, keep_last)


def names(folder: Path) -> list[str]:
    return [path.name for path in complete_checkpoints(folder)]


def entries(folder: Path) -> list[str]:
    """Everything that lies beside the checkpoints, hidden or not."""
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_what_is_loaded_is_what_was_saved_bit_for_bit(tmp_path: Path) -> None:
    path = save(tmp_path)
    assert path == checkpoint_path(tmp_path, 4) == tmp_path / "checkpoints" / "step_00000004"
    verify_checkpoint(path)
    found = {name: torch.full_like(tensor, torch.nan) for name, tensor in tensors().items()}
    load_tensors(path, found)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors().items())
    assert load_progress(path) == progress(4)
    assert (path / "config.yaml").read_text() == "model: {}\n"


def test_a_part_of_the_tensors_can_be_loaded_alone(tmp_path: Path) -> None:
    found = {"model.b": torch.zeros(7)}
    load_tensors(save(tmp_path), found)
    assert torch.equal(found["model.b"], tensors()["model.b"])


def test_a_folder_without_its_manifest_does_not_exist(tmp_path: Path) -> None:
    save(tmp_path, 4)
    path = save(tmp_path, 8)
    (path / "manifest.json").unlink()
    assert names(tmp_path) == ["step_00000004"]
    assert find_checkpoint(tmp_path, "auto") == checkpoint_path(tmp_path, 4)
    with pytest.raises(CheckpointError, match=r"step_00000008 is not a checkpoint: it has no manifest.json"):
        find_checkpoint(tmp_path, str(path))
    # and saving that step again puts a whole one in its place
    verify_checkpoint(save(tmp_path, 8, seed=1))
    assert names(tmp_path) == ["step_00000004", "step_00000008"]


@pytest.mark.parametrize("moment", ["_write_synced", "_checksum", "_commit", "_sync_folder"])
def test_a_save_that_is_cut_short_leaves_no_checkpoint_and_harms_none(
    tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = save(tmp_path, 4)

    def cut(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(store, moment, cut)
        save(tmp_path, 8)
    assert list((tmp_path / "checkpoints").glob(".step_00000008.writing/tensors/*")), "it had got as far as the tensors"
    assert names(tmp_path) == ["step_00000004"]
    verify_checkpoint(before)

    path = save(tmp_path, 8, seed=1)
    verify_checkpoint(path)
    found = {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}
    load_tensors(path, found)
    assert torch.equal(found["model.a"], tensors(1)["model.a"])
    assert entries(tmp_path) == ["step_00000004", "step_00000008"]


def test_everything_is_on_disk_before_the_rename_that_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rename that reaches the disk before the bytes do is a checkpoint of zeros after a power cut."""
    events: list[str] = []
    real_fsync, real_rename = os.fsync, Path.rename

    def fsync(descriptor: int) -> None:
        events.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        real_fsync(descriptor)

    def rename(source: Path, target: Path) -> Path:
        if target.name.startswith("step_"):
            events.append("rename")
        return real_rename(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    path = save(tmp_path)
    committed = events.index("rename")
    files = {file.name for file in path.rglob("*") if file.is_file()}
    assert {"manifest.json", "progress.json", "config.yaml", ".metadata"} < files
    synced = {event.removesuffix(".tmp") for event in events[:committed]}
    assert files <= synced
    assert {"tensors", ".step_00000004.writing"} <= set(events[:committed]), "the folders' own entries"
    assert events[committed + 1 :] == ["checkpoints"], "and the rename itself"


def test_a_complete_checkpoint_is_never_written_to(tmp_path: Path) -> None:
    path = save(tmp_path, seed=0)
    before = {file: (file.stat().st_mtime_ns, file.read_bytes()) for file in path.rglob("*") if file.is_file()}
    save(tmp_path, seed=1)
    assert {file: (file.stat().st_mtime_ns, file.read_bytes()) for file in before} == before


@pytest.mark.parametrize(("keep_last", "kept"), [(0, [1, 2, 3, 10]), (1, [10]), (3, [2, 3, 10]), (9, [1, 2, 3, 10])])
def test_the_last_checkpoints_are_kept(tmp_path: Path, keep_last: int, kept: list[int]) -> None:
    for step in (1, 2, 3, 10):
        save(tmp_path, step, keep_last)
    assert names(tmp_path) == [f"step_{step:08d}" for step in kept]
    assert entries(tmp_path) == names(tmp_path), "nothing of the others is left"


def test_a_removal_cut_short_leaves_no_half_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)

    def cut(path: Path, **_: object) -> None:
        if path.name == "step_00000001":
            raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", cut)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 2, keep_last=1)
    assert names(tmp_path) == ["step_00000002"]


def data_file(path: Path) -> Path:
    return max((path / "tensors").iterdir(), key=lambda file: file.stat().st_size)


def cut_short(file: Path) -> None:
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size - 1)


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


FILES: dict[str, Callable[[Path], Path]] = {
    "tensors": data_file,
    "metadata": lambda path: path / "tensors" / ".metadata",
    "progress": lambda path: path / "progress.json",
    "config": lambda path: path / "config.yaml",
}


@pytest.mark.parametrize("which", FILES)
@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (cut_short, r"has \d+ bytes, and its manifest says \d+; the file was cut or changed"),
        (flip_a_bit, "does not match its checksum; it is damaged"),
        (Path.unlink, "is missing from its checkpoint"),
    ],
    ids=["cut short", "bit flipped", "missing"],
)
def test_damage_is_found_and_the_file_named(
    tmp_path: Path, which: str, damage: Callable[[Path], None], sentence: str
) -> None:
    path = save(tmp_path)
    file = FILES[which](path)
    damage(file)
    with pytest.raises(CheckpointError, match=sentence) as caught:
        verify_checkpoint(path)
    assert str(caught.value).startswith(str(file))


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '"format"', '{"format": 1}', "\udcff"])
def test_a_damaged_manifest_is_a_sentence(tmp_path: Path, content: str) -> None:
    path = save(tmp_path)
    (path / "manifest.json").write_text(content, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(CheckpointError, match=r"manifest.json is damaged"):
        verify_checkpoint(path)


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path)
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["format"] == store.FORMAT
    (path / "manifest.json").write_text(json.dumps({**manifest, "format": store.FORMAT + 1}))
    with pytest.raises(CheckpointError, match=r"format 2, and this version of fourfold reads up to 1; use a newer"):
        verify_checkpoint(path)


@pytest.mark.parametrize(
    "wanted",
    [{"model.a": torch.zeros(3, 6)}, {"model.c": torch.zeros(2)}],
    ids=["another shape", "a tensor that is not there"],
)
def test_tensors_that_do_not_fit_are_a_sentence(tmp_path: Path, wanted: dict[str, torch.Tensor]) -> None:
    with pytest.raises(CheckpointError, match=r"step_00000004 cannot be read into this model"):
        load_tensors(save(tmp_path), wanted)


def test_resume_finds_the_newest_none_or_the_one_named(tmp_path: Path) -> None:
    assert find_checkpoint(tmp_path, "auto") is None
    paths = [save(tmp_path, step) for step in (2, 11)]
    assert find_checkpoint(tmp_path, "auto") == paths[1]
    assert find_checkpoint(tmp_path, "never") is None
    assert find_checkpoint(tmp_path / "other", str(paths[0])) == paths[0]
    assert find_checkpoint(tmp_path / "other", str(tmp_path)) == paths[1], "a run's folder means its newest"
