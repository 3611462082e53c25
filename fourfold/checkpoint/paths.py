"""Where checkpoints lie: a local folder, or any address that fsspec knows (`s3://bucket/run`). Both are used through
pathlib's words; what differs is here: only local files are flushed to disk, and only local folders are renamed.
"""

import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import xxhash
from upath import UPath

from fourfold.errors import CheckpointError

AnyPath = Path | UPath

BLOCK_BYTES = 2**24
"""Files are written, read and hashed in blocks of this size."""
SYNC_BYTES = 2**28
"""How much may wait in the system's memory: what counts as written, when a save is watched, has reached the disk."""


class FileEntry(NamedTuple):
    """What a manifest knows about a file."""

    bytes: int
    xxh3: str


def locate(address: str | AnyPath) -> AnyPath:
    """The path that an address means. Nothing is cached of a remote listing: others write there too."""
    if not isinstance(address, str):
        return address
    if address.startswith("file://"):
        return Path(address.removeprefix("file://"))
    if "://" not in address:
        return Path(address)
    try:
        path = UPath(address, use_listings_cache=False)
        _ = path.fs  # here its package is imported
    except (ValueError, ImportError) as error:
        raise CheckpointError(
            f"{address} cannot be used: {error}; install the package of its protocol (for s3:// that is s3fs), or "
            "write a local folder"
        ) from error
    return path


def is_local(path: AnyPath) -> bool:
    return isinstance(path, Path)


def local_folder(output_dir: str) -> Path:
    """Where a run keeps what is written line by line: its output_dir, or for a remote one `output/s3/bucket/run`."""
    path = locate(output_dir)
    if isinstance(path, Path):
        return path
    protocol, _, rest = output_dir.partition("://")
    return Path("output") / protocol / rest.strip("/")


def write_file(path: AnyPath, blocks: Iterable[bytes | memoryview]) -> FileEntry:
    """Write all blocks, flush them to the disk if it is ours, and tell what was written."""
    digest, size, unsynced = xxhash.xxh3_64(), 0, 0
    with path.open("wb") as stream:
        for whole in blocks:
            for begin in range(0, len(whole), BLOCK_BYTES):
                block = whole[begin : begin + BLOCK_BYTES]
                digest.update(block)
                stream.write(block)
                unsynced += len(block)
                if unsynced >= SYNC_BYTES and is_local(path):
                    stream.flush()
                    os.fdatasync(stream.fileno())
                    unsynced = 0
            size += len(whole)
        if is_local(path):
            stream.flush()
            os.fsync(stream.fileno())
    return FileEntry(size, digest.hexdigest())


def read_entry(path: AnyPath) -> FileEntry:
    """What a manifest would say of a file as it lies there now."""
    digest, size = xxhash.xxh3_64(), 0
    with path.open("rb") as stream:
        while block := stream.read(BLOCK_BYTES):
            digest.update(block)
            size += len(block)
    return FileEntry(size, digest.hexdigest())


def sync_folder(folder: AnyPath) -> None:
    """A file's name is in its folder, and that has to reach the disk too."""
    if not is_local(folder):
        return
    descriptor = os.open(str(folder), os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def files_below(folder: AnyPath) -> Iterator[str]:
    """The names of all files in a folder, relative to it."""
    if isinstance(folder, Path):
        yield from (file.relative_to(folder).as_posix() for file in folder.rglob("*") if not file.is_dir())
    else:
        top = folder.path.rstrip("/") + "/"
        yield from (name.removeprefix(top) for name in folder.fs.find(folder.path))


def remove_folder(folder: AnyPath) -> None:
    """All of it; nothing happens if there is none."""
    if isinstance(folder, Path):
        shutil.rmtree(folder, ignore_errors=True)
    elif folder.exists():
        folder.fs.rm(folder.path, recursive=True)


def send_beside(folder: Path, output: AnyPath) -> None:
    """What a run keeps in a local folder follows its checkpoints to a remote output_dir."""
    if not is_local(output):
        for name in files_below(folder):
            (output / name).write_bytes((folder / name).read_bytes())


def fetch_beside(output: AnyPath, folder: Path, name: str) -> None:
    """One file of a run that went on elsewhere, unless it is here already."""
    if not is_local(output) and not (folder / name).exists() and (output / name).exists():
        (folder / name).write_bytes((output / name).read_bytes())
