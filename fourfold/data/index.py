"""Indexes that take time to make, kept on disk under a name made of everything they depend on.

An index is a folder of .npy files that appears by one rename: ranks that make the same one at once do not disturb each
other, and what is there is whole. Where nothing can be written, indexes are made anew in memory.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Arrays = dict[str, npt.NDArray[Any]]

VERSION = 2
FEWEST = 1 << 17
"""Entries from which an index is worth keeping; a smaller one is made faster than a folder is."""


def cached_index(folders: Sequence[Path], key: dict[str, object], size: int, build: Callable[[], Arrays]) -> Arrays:
    """The arrays that `build` makes, from the first folder that has them, else made and kept in the first that can be
    written. `key` names everything that `build` depends on; `size` is how many entries it makes, roughly."""
    if size < FEWEST or not folders:
        return build()
    text = json.dumps({"version": VERSION, **key}, sort_keys=True)
    name = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    for folder in folders:
        found = _load(folder / name)
        if found is not None:
            return found
    arrays = build()
    for folder in folders:
        if _save(folder / name, arrays, text):
            return _load(folder / name) or arrays
    return arrays


def cache_folders(asked: str | None, beside: Path) -> list[Path]:
    """Where indexes are kept: as asked, else beside the data, else in the user's cache."""
    if asked is not None:
        return [Path(asked)]
    try:
        home = Path.home()
    except RuntimeError:  # a container may run as a user that has none
        home = Path(tempfile.gettempdir())
    return [beside / ".fourfold_index", home / ".cache" / "fourfold" / "index"]


def digest_of(array: npt.NDArray[Any]) -> str:
    return hashlib.blake2b(np.ascontiguousarray(array).data, digest_size=16).hexdigest()


def _load(path: Path) -> Arrays | None:
    try:
        # mapped, so that the ranks of a machine share one copy
        files = sorted(path.glob("*.npy"))
        return {file.stem: np.asarray(np.load(file, mmap_mode="r", allow_pickle=False)) for file in files} or None
    except (OSError, ValueError, EOFError):
        return None


def _save(path: Path, arrays: Arrays, text: str) -> bool:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=path.parent))
    except OSError:
        return False
    try:
        for name, array in arrays.items():
            with (draft / f"{name}.npy").open("wb") as stream:
                np.save(stream, array)
                # before the rename: else a crash can leave the name with nothing in it
                stream.flush()
                os.fsync(stream.fileno())
        (draft / "key.json").write_text(text + "\n", encoding="utf-8")
        _remove_stale(draft)
        draft.chmod(0o755)
        draft.rename(path)
    except OSError:
        # full, or another rank was first
        return _load(path) is not None
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return True


def _remove_stale(draft: Path) -> None:
    """What killed processes have left, a day or more before this draft."""
    for other in draft.parent.glob(".draft-*"):
        with suppress(OSError):  # another rank does the same
            if draft.stat().st_mtime - other.stat().st_mtime > 86_400:
                shutil.rmtree(other, ignore_errors=True)
