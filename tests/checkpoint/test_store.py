import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from fourfold.checkpoint import saver, store
from fourfold.checkpoint.manifest import FORMAT, DamagedError, read_manifest
from fourfold.checkpoint.saver import Saver
from fourfold.checkpoint.state import Progress, whole_piece
from fourfold.checkpoint.store import (
    begin_checkpoint,
    checkpoint_path,
    complete_checkpoints,
    load_pieces,
    load_progress,
    named_checkpoint,
    newest_checkpoint,
    verify_checkpoint,
    write_share,
)
from fourfold.checkpoint.together import find_together
from fourfold.config.schema import Engine
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


def pieces(named: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {name: whole_piece(tensor) for name, tensor in named.items()}


def progress(step: int, eval_loss: float | None = None) -> Progress:
    return Progress(step, step - 1, {"scale": 512.0, "good_steps": 3}, "abc", eval_loss)


def save(folder: Path, step: int = 4, keep_last: int = 0, seed: int = 0, eval_loss: float | None = None) -> Path:
    engine = Engine(output_dir=str(folder), keep_last=keep_last, keep_best=eval_loss is not None)
    with Saver(engine, folder) as opened:
        opened.save(pieces(tensors(seed)), progress(step, eval_loss), {"config.yaml": "model: {}\n"})
    return folder / "checkpoints" / f"step_{step:08d}"


def load(path: Path, *names: str) -> dict[str, torch.Tensor]:
    found = {name: torch.full_like(tensor, torch.nan) for name, tensor in tensors().items() if name in names}
    load_pieces(verify_checkpoint(path), pieces(found))
    return found


def names(folder: Path) -> list[str]:
    return [path.name for path in complete_checkpoints(folder)]


def entries(folder: Path) -> list[str]:
    """Everything that lies beside the checkpoints, hidden or not."""
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_what_is_loaded_is_what_was_saved_bit_for_bit(tmp_path: Path) -> None:
    path = save(tmp_path)
    assert path == checkpoint_path(tmp_path, 4)
    found = load(path, *tensors())
    assert len(found) == 3
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors().items())
    assert load_progress(read_manifest(path)) == progress(4)
    assert (path / "config.yaml").read_text() == "model: {}\n"


def test_a_part_of_the_tensors_can_be_loaded_alone(tmp_path: Path) -> None:
    assert torch.equal(load(save(tmp_path), "model.b")["model.b"], tensors()["model.b"])


def test_what_is_saved_is_what_the_tensors_held_when_saving_began(tmp_path: Path) -> None:
    """The next step changes them while they are being written."""
    changing = tensors()
    with Saver(Engine(output_dir=str(tmp_path)), tmp_path) as opened:
        opened.save(pieces(changing), progress(4), {})
        for tensor in changing.values():
            tensor.zero_()
    found = load(checkpoint_path(tmp_path, 4), *tensors())  # type: ignore[arg-type]
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors().items())


def test_a_folder_without_its_manifest_does_not_exist(tmp_path: Path) -> None:
    save(tmp_path, 4)
    path = save(tmp_path, 8)
    (path / "manifest.json").unlink()
    assert names(tmp_path) == ["step_00000004"]
    assert newest_checkpoint(tmp_path) == checkpoint_path(tmp_path, 4)
    with pytest.raises(CheckpointError, match=r"step_00000008 is not a checkpoint: it has no manifest.json"):
        named_checkpoint("engine.resume", str(path))
    # and saving that step again puts a whole one in its place
    verify_checkpoint(save(tmp_path, 8, seed=1))
    assert names(tmp_path) == ["step_00000004", "step_00000008"]


@pytest.mark.parametrize("moment", ["write_share", "commit_checkpoint"])
def test_a_save_that_fails_is_a_sentence_and_harms_no_checkpoint(
    tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = save(tmp_path, 4)

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device", "/somewhere")

    with monkeypatch.context() as patched:
        patched.setattr(saver, moment, full)
        with pytest.raises(CheckpointError, match=r"step 8 could not be saved: /somewhere: No space left on device"):
            save(tmp_path, 8)
    assert entries(tmp_path) == ["step_00000004"], "nothing is left in the way"
    verify_checkpoint(before)
    assert torch.equal(load(save(tmp_path, 8, seed=1), "model.a")["model.a"], tensors(1)["model.a"])


@pytest.mark.parametrize("moment", ["write_file", "sync_folder", "remove_folder"])
def test_a_save_that_is_killed_leaves_no_checkpoint_and_the_next_run_removes_what_is_left(
    tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = save(tmp_path, 4)

    def kill(*args: object) -> None:
        raise KeyboardInterrupt

    folder = begin_checkpoint(tmp_path, 8)
    share = write_share(folder, 0, pieces(tensors()))
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(store, moment, kill)
        store.commit_checkpoint(tmp_path, progress(8), {}, [share])
    assert entries(tmp_path) == [".step_00000008.writing", "step_00000004"]
    assert names(tmp_path) == ["step_00000004"]
    verify_checkpoint(before)
    with Saver(Engine(output_dir=str(tmp_path)), tmp_path):
        assert entries(tmp_path) == ["step_00000004"]


def test_everything_is_on_disk_before_the_rename_that_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rename that reaches the disk before the bytes do is a checkpoint of zeros after a power cut."""
    events: list[str] = []
    real_fsync, real_rename = os.fsync, Path.rename

    def fsync(descriptor: int) -> None:
        events.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        real_fsync(descriptor)

    def rename(source: Path, target: Path) -> Path:
        events.append("rename")
        return real_rename(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    path = save(tmp_path)
    committed = events.index("rename")
    files = {file.name for file in path.rglob("*") if file.is_file()}
    assert {"manifest.json", "progress.json", "config.yaml", "index.json", "rank_00000.safetensors"} == files
    assert files <= set(events[:committed])
    assert {"tensors", ".step_00000004.writing"} <= set(events[:committed]), "the folders' own entries"
    assert events[committed + 1 :] == ["checkpoints", tmp_path.name], "and the rename itself"


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


def test_the_best_checkpoint_is_kept_too(tmp_path: Path) -> None:
    for step, eval_loss in ((1, 3.0), (2, 2.0), (3, 2.5), (4, 2.6)):
        save(tmp_path, step, keep_last=1, eval_loss=eval_loss)
    assert names(tmp_path) == ["step_00000002", "step_00000004"]


def test_a_removal_cut_short_leaves_no_half_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        save(tmp_path, step)

    def kill(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(store, "remove_folder", kill)
    with pytest.raises(KeyboardInterrupt):
        store.remove_old(tmp_path, keep_last=1, keep_best=False)
    assert names(tmp_path) == ["step_00000002"]


def cut_short(file: Path) -> None:
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size - 1)


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    "name", ["tensors/rank_00000.safetensors", "tensors/index.json", "progress.json", "config.yaml"]
)
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
    tmp_path: Path, name: str, damage: Callable[[Path], None], sentence: str
) -> None:
    path = save(tmp_path)
    damage(path / name)
    with pytest.raises(DamagedError, match=sentence) as caught:
        verify_checkpoint(path)
    assert str(caught.value).startswith(str(path / name))


def test_a_file_that_does_not_belong_is_found(tmp_path: Path) -> None:
    path = save(tmp_path)
    (path / "tensors" / "rank_00001.safetensors").write_bytes(b"")
    with pytest.raises(DamagedError, match=r"rank_00001.safetensors is not a file of this checkpoint"):
        verify_checkpoint(path)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '"format"', '{"format": 2}', "\udcff"])
def test_a_manifest_that_is_none_is_a_sentence(tmp_path: Path, content: str) -> None:
    path = save(tmp_path)
    (path / "manifest.json").write_text(content, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(DamagedError, match=r"manifest.json is damaged"):
        verify_checkpoint(path)


def test_a_bit_flipped_anywhere_in_the_manifest_is_noticed(tmp_path: Path) -> None:
    path = save(tmp_path)
    whole = (path / "manifest.json").read_bytes()
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        (path / "manifest.json").write_bytes(damaged)
        with pytest.raises(DamagedError):
            read_manifest(path)


def test_a_newer_format_is_refused_and_not_taken_for_damage(tmp_path: Path) -> None:
    path = save(tmp_path)
    body = json.loads((path / "manifest.json").read_text())
    assert body.pop("xxh3") and body["format"] == FORMAT
    body["format"] += 1
    body["xxh3"] = xxhash.xxh3_64_hexdigest(json.dumps(body).encode())
    (path / "manifest.json").write_text(json.dumps(body, indent=1) + "\n")
    with pytest.raises(CheckpointError, match=rf"format {FORMAT + 1}, .* reads up to {FORMAT}; use a newer") as caught:
        verify_checkpoint(path)
    assert not isinstance(caught.value, DamagedError)


@pytest.mark.parametrize(
    ("wanted", "sentence"),
    [
        ({"model.a": torch.zeros(3, 6)}, r"its model.a has the shape \(3, 5\), and this model's has \(3, 6\)"),
        ({"model.c": torch.zeros(2)}, "it has no model.c"),
    ],
    ids=["another shape", "a tensor that is not there"],
)
def test_tensors_that_do_not_fit_are_a_sentence(tmp_path: Path, wanted: dict[str, torch.Tensor], sentence: str) -> None:
    with pytest.raises(CheckpointError, match=rf"step_00000004 cannot be read into this model: {sentence}"):
        load_pieces(read_manifest(save(tmp_path)), pieces(wanted))


def test_resume_finds_the_newest_none_or_the_one_named(tmp_path: Path) -> None:
    def found(folder: Path, resume: str) -> object:
        manifest = find_together(folder, resume)
        return manifest and manifest.path

    assert found(tmp_path, "auto") is None
    paths = [save(tmp_path, step) for step in (2, 11)]
    assert found(tmp_path, "auto") == paths[1]
    assert found(tmp_path, "never") is None
    assert found(tmp_path / "other", str(paths[0])) == paths[0]
    assert found(tmp_path / "other", str(tmp_path)) == paths[1], "a run's folder means its newest"


def test_resume_auto_passes_over_a_damaged_checkpoint_and_keeps_what_is_left_of_it(tmp_path: Path) -> None:
    sound, damaged = save(tmp_path, 2), save(tmp_path, 4)
    flip_a_bit(damaged / "tensors" / "rank_00000.safetensors")
    found = find_together(tmp_path, "auto")
    assert found is not None and found.path == sound
    assert entries(tmp_path) == ["step_00000002", "step_00000004.damaged1"]


def test_a_damaged_checkpoint_that_was_named_is_not_replaced_by_another(tmp_path: Path) -> None:
    _, damaged = save(tmp_path, 2), save(tmp_path, 4)
    flip_a_bit(damaged / "config.yaml")
    with pytest.raises(DamagedError):
        find_together(tmp_path, str(damaged))
    assert entries(tmp_path) == ["step_00000002", "step_00000004"]
