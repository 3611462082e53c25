"""The manifest of a checkpoint: its format, its step, and the size and checksum of every file. It is written last, and
a folder without it does not exist for anyone.

It has a checksum of its own and is written in exactly one way, so that every changed byte of it is noticed too.
"""

import json
from dataclasses import dataclass
from typing import Any

import xxhash

from fourfold.checkpoint.paths import AnyPath, FileEntry, files_below, read_entry
from fourfold.errors import CheckpointError

FORMAT = 2
"""1 held pickled data and is not read."""
MANIFEST = "manifest.json"


class DamagedError(CheckpointError):
    """What lies there is not what was written; an earlier checkpoint may stand in where nobody has named this one."""


@dataclass(frozen=True)
class Manifest:
    path: AnyPath
    """The folder of the checkpoint."""
    step: int
    files: dict[str, FileEntry]
    """By name relative to the folder, the manifest itself left out."""


def render_manifest(step: int, files: dict[str, FileEntry]) -> bytes:
    body: dict[str, Any] = {
        "format": FORMAT,
        "step": step,
        "files": {name: entry._asdict() for name, entry in sorted(files.items())},
    }
    body["xxh3"] = xxhash.xxh3_64_hexdigest(json.dumps(body).encode())
    return (json.dumps(body, indent=1) + "\n").encode()


def read_manifest(path: AnyPath) -> Manifest:
    """Of the checkpoint in this folder; what it lists is not looked at yet."""
    file = path / MANIFEST
    content = read_bytes(file)
    try:
        values = json.loads(content)
        version = values["format"]
        if isinstance(version, int) and version != FORMAT and _is_of_other_format(values):
            raise CheckpointError(_other_format(path, version))
        files = {name: FileEntry(**entry) for name, entry in values["files"].items()}
        is_whole = content == render_manifest(values["step"], files)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        is_whole = False
    if not is_whole or any(name.startswith("/") or ".." in name.split("/") for name in files):
        raise DamagedError(f"{file} is damaged; resume from another checkpoint")
    return Manifest(path, values["step"], files)


def _is_of_other_format(values: dict[str, Any]) -> bool:
    """And not merely of this one with a flipped bit in its number."""
    body = {key: value for key, value in values.items() if key != "xxh3"}
    return "xxh3" not in values or values["xxh3"] == xxhash.xxh3_64_hexdigest(json.dumps(body).encode())


def _other_format(path: AnyPath, version: int) -> str:
    if version > FORMAT:
        return (
            f"{path} is in checkpoint format {version}, and this version of fourfold reads up to {FORMAT}; "
            "use a newer version of fourfold"
        )
    return f"{path} is in checkpoint format {version}, which is not read any more; use the version that wrote it"


def verify_files(manifest: Manifest, share: int = 0, shares: int = 1) -> None:
    """Every file that the manifest lists is there, whole and unchanged, and there is no other. The bytes can be divided
    between `shares` ranks: all of them together check every file, and the first also looks for foreign ones."""
    if share == 0:
        foreign = sorted(set(files_below(manifest.path)) - {*manifest.files, MANIFEST})
        if foreign:
            raise DamagedError(
                f"{manifest.path / foreign[0]} is not a file of this checkpoint: {MANIFEST} does not list it; "
                "move it away, or resume from another checkpoint"
            )
    by_size = sorted(manifest.files, key=lambda name: (manifest.files[name].bytes, name))
    for name in by_size[share::shares]:
        _check(manifest.path / name, manifest.files[name], read_entry)


def read_listed(manifest: Manifest, name: str) -> bytes:
    """A small file of the checkpoint, checked as it is read."""
    if name not in manifest.files:
        raise DamagedError(f"{manifest.path} has no {name}; resume from another checkpoint")
    content = b""

    def read(file: AnyPath) -> FileEntry:
        nonlocal content
        content = file.read_bytes()
        return FileEntry(len(content), xxhash.xxh3_64_hexdigest(content))

    _check(manifest.path / name, manifest.files[name], read)
    return content


def _check(file: AnyPath, expected: FileEntry, read: Any) -> None:
    try:
        found = read(file)
    except FileNotFoundError:
        raise DamagedError(f"{file} is missing from its checkpoint; resume from another one") from None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}") from error
    if found.bytes != expected.bytes:
        raise DamagedError(
            f"{file} has {found.bytes} bytes, and its manifest says {expected.bytes}; the file was cut or "
            "changed, so resume from another checkpoint"
        )
    if found.xxh3 != expected.xxh3:
        raise DamagedError(f"{file} does not match its checksum; it is damaged, so resume from another checkpoint")


def read_bytes(file: AnyPath) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}") from error
