"""PaddleNLP's and PaddleFleetX's token files: `X_ids.npy` with `X_idx.npz`, and the older `X_ids.npz`.

`lens` holds one length per sentence, `docs` where documents begin among the sentences, from 0. The older file holds
both ids and lens, the lengths in 16 bits: a document of 65,536 tokens or more has wrapped.
"""

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fourfold.data.formats.tokenfile import Ints, TokenFile, check_lengths, unreadable
from fourfold.errors import DataError

IDS, INDEX, LEGACY = "_ids.npy", "_idx.npz", "_ids.npz"


def open_paddle(prefix: Path) -> TokenFile:
    ids, index = prefix.with_name(prefix.name + IDS), prefix.with_name(prefix.name + INDEX)
    tokens = load_ids(ids)
    if not index.exists():
        raise DataError(f"'{ids}' has no '{index.name}' beside it, which says where documents end; copy it there")
    lengths, docs = load_arrays(index, ("lens", "docs"))
    lengths = lengths.astype(np.int64)
    check_lengths(ids, lengths, len(tokens), str(index))
    docs = docs.astype(np.int64)
    if not len(docs) or docs[0] != 0 or docs[-1] != len(lengths) or (np.diff(docs) < 0).any():
        raise DataError(f"'{index}': docs do not lead from 0 to the {len(lengths)} lengths in lens; make it again")
    ends = np.concatenate(([0], np.cumsum(lengths)))
    return TokenFile(ids, "paddle", tokens, np.diff(ends[docs]))


def open_paddle_legacy(prefix: Path) -> TokenFile:
    """Read whole: a .npz cannot be mapped."""
    path = prefix.with_name(prefix.name + LEGACY)
    ids, stored = load_arrays(path, ("ids", "lens"))
    lengths: Ints = stored.astype(np.int64)
    lost = len(ids) - int(lengths.sum())
    if stored.dtype == np.uint16 and lost > 0 and lost % 65536 == 0:
        raise DataError(
            f"'{path}': lens is uint16 and {lost:,} of the {len(ids):,} tokens are in no document, so "
            f"{lost // 65536} times a document of 65,536 tokens or more has wrapped; make the files again in the newer "
            f"format, {IDS} and {INDEX}"
        )
    check_lengths(path, lengths, len(ids), str(path))
    return TokenFile(path, "paddle legacy", ids, lengths)


def load_ids(path: Path) -> npt.NDArray[Any]:
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, EOFError) as error:
        raise DataError(f"'{path}' is truncated or no .npy file ({error}); copy it again") from error
    if tokens.ndim != 1 or tokens.dtype.kind not in "ui":
        raise DataError(f"'{path}' holds {tokens.dtype} of shape {tokens.shape}, not one row of whole numbers")
    return np.asarray(tokens)


def load_arrays(path: Path, names: tuple[str, ...]) -> list[npt.NDArray[Any]]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            missing = [name for name in names if name not in archive.files]
            if missing:
                raise DataError(
                    f"'{path}' holds {', '.join(archive.files) or 'nothing'}, but not {' and '.join(missing)}; "
                    "make it again with Paddle's create_pretraining_data.py"
                )
            return [archive[name] for name in names]
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"'{path}' is truncated or no .npz file ({error}); copy it again") from error
