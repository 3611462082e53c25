"""Checkpoints in an output folder: `checkpoints/step_00000100/` with tensors, config, tokenizer, progress and manifest.

On a local disk a checkpoint is written under a temporary name, every file is flushed, the manifest comes last, and a
rename commits. On a remote store, where nothing can be renamed at once, the manifest is the commit. Either way a folder
without its manifest does not exist for anyone, and a complete one is never written to. Nothing here is collective.
"""

import json
import math
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from fourfold.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    read_listed,
    read_manifest,
    render_manifest,
    verify_files,
)
from fourfold.checkpoint.paths import (
    AnyPath,
    FileEntry,
    files_below,
    is_local,
    locate,
    remove_folder,
    sync_folder,
    write_file,
)
from fourfold.checkpoint.state import Piece, Progress
from fourfold.checkpoint.tensors import Index, merge_indexes, read_pieces, write_pieces
from fourfold.errors import CheckpointError

CHECKPOINTS = "checkpoints"
TENSORS = "tensors"
INDEX = f"{TENSORS}/index.json"
PROGRESS = "progress.json"
STEP = re.compile(r"step_(\d{8,})")
WRITING = ".writing"
DAMAGED = ".damaged"


def checkpoint_path(output_dir: AnyPath, step: int) -> AnyPath:
    return output_dir / CHECKPOINTS / f"step_{step:08d}"


def step_of(path: AnyPath) -> int:
    found = STEP.fullmatch(path.name)
    assert found
    return int(found[1])


# --- writing -------------------------------------------------------------------------------------------------------


def begin_checkpoint(output_dir: AnyPath, step: int) -> AnyPath:
    """An empty folder to write into, which is no checkpoint yet."""
    folder = writing_path(output_dir, step)
    remove_folder(folder)
    (folder / TENSORS).mkdir(parents=True, exist_ok=True)
    return folder


def writing_path(output_dir: AnyPath, step: int) -> AnyPath:
    """Where `begin_checkpoint` has everybody write."""
    path = checkpoint_path(output_dir, step)
    return path.with_name(f".{path.name}{WRITING}") if is_local(path) else path


Written = tuple[str, FileEntry, Index]
"""A tensor file: its name in the checkpoint, what the manifest says of it, and its part of the index."""


def write_share(folder: AnyPath, rank: int, pieces: dict[str, Piece]) -> Written | None:
    """One rank's blocks; None if it has nothing to write."""
    if not pieces:
        return None
    name = f"{TENSORS}/rank_{rank:05d}.safetensors"
    (folder / TENSORS).mkdir(parents=True, exist_ok=True)  # NFS may not show us yet that the first rank has made it
    return name, *write_pieces(folder / name, pieces)


def commit_checkpoint(
    output_dir: AnyPath, progress: Progress, texts: dict[str, str], shares: list[Written | None]
) -> AnyPath:
    """The small files, the index, the manifest, and the moment in which all of it becomes a checkpoint."""
    path, folder = checkpoint_path(output_dir, progress.step), writing_path(output_dir, progress.step)
    written = [share for share in shares if share]
    files = {name: entry for name, entry, _ in written}
    for name, entry in files.items():
        if not (folder / name).exists() or (folder / name).stat().st_size != entry.bytes:
            raise CheckpointError(
                f"{folder / name} was written by another machine and is not seen by the first rank; engine.output_dir "
                "must be a folder that all machines share"
            )
    index = merge_indexes([index for _, _, index in written])
    small = {**texts, PROGRESS: json.dumps(asdict(progress), indent=1), INDEX: json.dumps(index, indent=0)}
    for name, text in small.items():
        files[name] = write_file(folder / name, [text.encode()])
    write_file(folder / MANIFEST, [render_manifest(progress.step, files)])
    for each in (folder / TENSORS, folder):
        sync_folder(each)
    if folder != path:
        remove_folder(path)  # has no manifest, so it is nobody's checkpoint
        folder.rename(path)  # type: ignore[arg-type]
        for each in (path.parent, output_dir):
            sync_folder(each)
    return path


def is_complete(path: AnyPath) -> bool:
    file = path / MANIFEST
    return file.exists() if isinstance(file, Path) else _ask(file, file.fs.info) is not None


def _ask(path: AnyPath, question: Callable[[str], Any]) -> Any:
    """What a remote store answers, None if nothing is there. For fsspec's `exists` a dead network is that, too."""
    try:
        return question(path.path)  # type: ignore[union-attr]
    except FileNotFoundError:
        return None
    except Exception as error:  # every store has its own kinds
        raise CheckpointError(f"{path} cannot be read: {error}; see that its store can be reached") from error


def remove_old(output_dir: AnyPath, keep_last: int, keep_best: bool) -> None:
    """All but the last few and, if wished, the one with the lowest evaluation loss."""
    found = complete_checkpoints(output_dir)
    kept = found[-keep_last:] if keep_last else found
    if keep_best and (best := best_checkpoint(found)):
        kept = [*kept, best]
    for old in found:
        if old not in kept:
            (old / MANIFEST).unlink(missing_ok=True)  # first: half a removal must not look like a checkpoint
            remove_folder(old)


def best_checkpoint(paths: list[AnyPath]) -> AnyPath | None:
    """The first with the lowest evaluation loss; None if none has a finite one."""
    losses = {}
    for path in paths:
        try:
            losses[path] = load_progress(read_manifest(path)).eval_loss
        except CheckpointError:  # whoever loads it is told; it is not the best
            continue
    known = {path: loss for path, loss in losses.items() if loss is not None and math.isfinite(loss)}
    return min(known, key=lambda path: known[path]) if known else None


def remove_leftovers(output_dir: AnyPath) -> None:
    """What killed runs had begun to write."""
    for path in _entries(output_dir / CHECKPOINTS):
        is_step = STEP.fullmatch(path.name) is not None
        if path.name.endswith(WRITING) or (is_step and not is_local(path) and not is_complete(path)):
            remove_folder(path)


def remove_unfinished(output_dir: AnyPath, step: int) -> None:
    """What a failed save has written: on a full disk it is in the way."""
    folder = writing_path(output_dir, step)
    if not is_local(folder) and is_complete(folder):
        return
    with suppress(OSError):
        remove_folder(folder)


def set_aside(path: AnyPath) -> AnyPath:
    """Make a damaged checkpoint stop being one, without losing what is left of it; where it is now."""
    taken = {each.name for each in _entries(path.parent)}
    number = 1
    while (target := path.with_name(f"{path.name}{DAMAGED}{number}")).name in taken:
        number += 1
    if isinstance(path, Path):
        path.rename(target)  # type: ignore[arg-type]
    else:
        for name in files_below(path):  # one by one: on S3 `mv` of a folder stumbles over the folders in it
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            path.fs.cp_file((path / name).path, (target / name).path)  # type: ignore[union-attr]
        (path / MANIFEST).unlink(missing_ok=True)
        remove_folder(path)
    return target


# --- finding and reading -------------------------------------------------------------------------------------------


def _entries(folder: AnyPath) -> Iterator[AnyPath]:
    if isinstance(folder, Path):
        if folder.is_dir():
            yield from folder.iterdir()
        return
    found = _ask(folder, lambda path: folder.fs.ls(path, detail=False)) or []
    names = {name.rstrip("/").rsplit("/", 1)[-1] for name in found if name.strip("/") != folder.path.strip("/")}
    yield from (folder / name for name in sorted(names))


def complete_checkpoints(output_dir: AnyPath) -> list[AnyPath]:
    """Oldest first, by step; no clock is asked."""
    found = [path for path in _entries(output_dir / CHECKPOINTS) if STEP.fullmatch(path.name) and is_complete(path)]
    return sorted(found, key=step_of)


def newest_checkpoint(folder: AnyPath) -> AnyPath | None:
    """The folder itself if it is a checkpoint, or the newest one of the run whose output folder it is."""
    if is_complete(folder):
        return folder
    found = complete_checkpoints(folder)
    return found[-1] if found else None


def named_checkpoint(key: str, address: str) -> AnyPath:
    """The checkpoint that a key of the config names; there is no other in its place."""
    path = newest_checkpoint(locate(address))
    if path is None:
        raise CheckpointError(
            f"{key} = {address} is not a checkpoint: it has no {MANIFEST}; name a folder like "
            "output/checkpoints/step_00000100, or a run's output_dir"
        )
    return path


def verify_checkpoint(path: AnyPath) -> Manifest:
    """Every file that the manifest lists is there, whole and unchanged, and there is no other."""
    manifest = read_manifest(path)
    verify_files(manifest)
    return manifest


def read_text(manifest: Manifest, name: str) -> str:
    try:
        return read_listed(manifest, name).decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{manifest.path / name} is not text; resume from another checkpoint") from error


def load_progress(manifest: Manifest) -> Progress:
    try:
        values = json.loads(read_text(manifest, PROGRESS))
        return Progress(**{field.name: values[field.name] for field in fields(Progress)})
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{manifest.path / PROGRESS} is not what this version of fourfold writes") from error


def load_index(manifest: Manifest) -> Index:
    try:
        index: Index = json.loads(read_text(manifest, INDEX))
        files = {f"{TENSORS}/{piece['file']}" for entry in index.values() for piece in entry["pieces"]}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{manifest.path / INDEX} is not what this version of fourfold writes") from error
    if not files <= manifest.files.keys():
        raise CheckpointError(f"{manifest.path / INDEX} names files that its manifest does not list")
    return index


def load_pieces(manifest: Manifest, pieces: dict[str, Piece]) -> None:
    """Read into the given blocks, whatever layout wrote the checkpoint."""
    read_pieces(manifest.path / TENSORS, load_index(manifest), pieces)
