"""What every format gives: tokens that are mapped, not read, and the lengths of the documents in them."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fourfold.errors import DataError

Ints = npt.NDArray[np.int64]


class TokenFile(NamedTuple):
    path: Path
    """The file that holds the tokens; messages name it."""
    format: str
    tokens: npt.NDArray[Any]
    lengths: Ints | None
    """Tokens of each document, in order; None if the format does not know where documents end."""
    tokenizer_path: Path | None = None
    tokenizer_fingerprint: str | None = None
    """Of the tokenizer that made the tokens, where the format says so."""
    checksum: str | None = None


def map_tokens(path: Path, dtype: str, offset: int, count: int) -> npt.NDArray[Any]:
    """`count` tokens from byte `offset` on. The caller has compared them with the file's size."""
    if not count:
        return np.empty(0, dtype)
    try:
        # A plain view: indexing a memmap object costs more than the copy it makes.
        return np.asarray(np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=(count,)))
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"'{path}' cannot be read ({error.strerror}); make it readable for the user who trains")


def check_lengths(path: Path, lengths: Ints, num_tokens: int, where: str) -> None:
    """Documents must be exactly the tokens there are."""
    if len(lengths) and lengths.min() < 0:
        number = int(np.argmin(lengths))
        raise DataError(
            f"'{where}' says that document {number} has {lengths[number]} tokens; the index is damaged: make it again"
        )
    total = int(lengths.sum())
    if total > num_tokens:
        raise DataError(
            f"'{path}' is truncated: it holds {num_tokens:,} tokens, but '{where}' speaks of {total:,}; "
            "copy it again from where it was made"
        )
    if total < num_tokens:
        raise DataError(
            f"'{where}' speaks of {total:,} tokens, but '{path}' holds {num_tokens:,}; the two are not of one corpus"
        )
