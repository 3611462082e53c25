"""Checkpoints on disk: `checkpoints/step_00000100/` with tensors (DCP), config, tokenizer, progress and a manifest.

A checkpoint is written under a temporary name, every file is flushed, the manifest with sizes and checksums comes
last, and a rename commits. A directory without its manifest does not exist for anyone, and a complete one is never
written to.
"""

import json
import os
import shutil
import warnings
import zlib
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from fourfold.checkpoint.state import Progress
from fourfold.errors import CheckpointError

FORMAT = 1
MANIFEST = "manifest.json"
TENSORS = "tensors"
PROGRESS = "progress.json"


def checkpoint_path(output_dir: Path, step: int) -> Path:
    return output_dir / "checkpoints" / f"step_{step:08d}"


def save_checkpoint(
    output_dir: Path, tensors: dict[str, torch.Tensor], progress: Progress, texts: dict[str, str], keep_last: int
) -> Path:
    """Write and commit; all ranks call it together. `texts` are small files that go beside the tensors, by name."""
    path = checkpoint_path(output_dir, progress.step)
    if (path / MANIFEST).exists():
        return path
    temporary = path.with_name(f".{path.name}.writing")
    is_first = dist.get_rank() == 0
    if is_first:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(path, ignore_errors=True)  # has no manifest, so it is nobody's checkpoint
        temporary.mkdir(parents=True)
    dist.barrier()
    dcp.save(tensors, storage_writer=dcp.FileSystemWriter(temporary / TENSORS, sync_files=True))
    if is_first:
        for name, text in {**texts, PROGRESS: json.dumps(asdict(progress), indent=1)}.items():
            _write_synced(temporary / name, text)
        _commit(temporary, path, progress.step)
        _remove_old(path.parent, keep_last)
    dist.barrier()
    return path


def _commit(temporary: Path, path: Path, step: int) -> None:
    files = {
        str(file.relative_to(temporary)): {"bytes": file.stat().st_size, "crc32": _checksum(file)}
        for file in sorted(temporary.rglob("*"))
        if file.is_file()
    }
    manifest = {"format": FORMAT, "step": step, "files": files}
    _write_synced(temporary / MANIFEST, json.dumps(manifest, indent=1))
    for folder in (temporary / TENSORS, temporary):
        _sync_folder(folder)
    temporary.rename(path)
    _sync_folder(path.parent)


def _remove_old(folder: Path, keep_last: int) -> None:
    if keep_last:
        for old in complete_checkpoints(folder.parent)[:-keep_last]:
            (old / MANIFEST).unlink()  # first: half a removal must not look like a checkpoint
            shutil.rmtree(old, ignore_errors=True)


def complete_checkpoints(output_dir: Path) -> list[Path]:
    """Oldest first."""
    return sorted(manifest.parent for manifest in (output_dir / "checkpoints").glob(f"step_*/{MANIFEST}"))


def newest_checkpoint(folder: Path) -> Path | None:
    """The folder itself if it is a checkpoint, or the newest one of the run whose output folder it is."""
    if (folder / MANIFEST).exists():
        return folder
    found = complete_checkpoints(folder)
    return found[-1] if found else None


def find_checkpoint(output_dir: Path, resume: str) -> Path | None:
    """The checkpoint that `engine.resume` means, if there is one."""
    if resume == "never":
        return None
    if resume == "auto":
        return newest_checkpoint(output_dir)
    path = newest_checkpoint(Path(resume))
    if path is None:
        raise CheckpointError(
            f"engine.resume = {resume} is not a checkpoint: it has no {MANIFEST}; name a folder like "
            "output/checkpoints/step_00000100, or write auto or never"
        )
    return path


def verify_checkpoint(path: Path) -> None:
    """Every file that the manifest lists is there, whole and unchanged."""
    manifest = _read_json(path / MANIFEST, ["format", "files"])
    if manifest["format"] > FORMAT:
        raise CheckpointError(
            f"{path} is in checkpoint format {manifest['format']}, and this version of fourfold reads up to {FORMAT}; "
            "use a newer version of fourfold"
        )
    for name, entry in manifest["files"].items():
        file = path / name
        if not file.exists():
            raise CheckpointError(f"{file} is missing from its checkpoint; resume from another one")
        if file.stat().st_size != entry["bytes"]:
            raise CheckpointError(
                f"{file} has {file.stat().st_size} bytes, and its manifest says {entry['bytes']}; the file was cut or "
                "changed, so resume from another checkpoint"
            )
        if _checksum(file) != entry["crc32"]:
            raise CheckpointError(
                f"{file} does not match its checksum; it is damaged, so resume from another checkpoint"
            )


def read_text_file(path: Path, name: str) -> str:
    return _read(path / name)


def load_progress(path: Path) -> Progress:
    return Progress(**_read_json(path / PROGRESS, [field.name for field in fields(Progress)]))


def load_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Read into the given tensors, whatever layout wrote the checkpoint."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # generation reads alone and means to
            dcp.load(dict(tensors), storage_reader=dcp.FileSystemReader(path / TENSORS))
    except CheckpointException as error:  # a BaseException, which nothing else would catch
        raise CheckpointError(f"{path} cannot be read into this model: {error}") from error


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error


def _read_json(file: Path, keys: list[str]) -> dict[str, Any]:
    try:
        values = json.loads(_read(file))
        return {key: values[key] for key in keys}
    except (ValueError, TypeError, KeyError) as error:  # not JSON, not even UTF-8, or not an object with these keys
        raise CheckpointError(f"{file} is damaged; resume from another checkpoint") from error


def _checksum(file: Path) -> int:
    checksum = 0
    with file.open("rb") as stream:
        while block := stream.read(2**24):
            checksum = zlib.crc32(block, checksum)
    return checksum


def _write_synced(file: Path, text: str) -> None:
    with file.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
