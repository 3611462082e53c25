"""Tokens one after the other in a `.bin`: nanoGPT's without a header, llm.c's with one of 256 int32.

Neither says where documents end; where a token ends them, the corpus finds them by it.
"""

from pathlib import Path

import numpy as np

from fourfold.data.formats.tokenfile import TokenFile, map_tokens, unreadable
from fourfold.errors import DataError

HEADER_INTS = 256
# llm.c's magic number: version and dtype of the tokens
HEADERS = {20240520: (1, "<u2"), 20240801: (7, "<u4")}


def open_flat(path: Path) -> TokenFile:
    try:
        num_bytes = path.stat().st_size
        head = np.fromfile(path, "<i4", 3) if num_bytes >= 4 * HEADER_INTS else np.zeros(3, "<i4")
    except OSError as error:
        raise unreadable(path, error) from error
    if int(head[0]) in HEADERS:
        return _open_headed(path, num_bytes, *(int(number) for number in head))
    if num_bytes % 2:
        raise DataError(
            f"'{path}' has {num_bytes:,} bytes, no whole number of 2-byte tokens: it is truncated, or no nanoGPT file; "
            "copy it again, or give the .idx that belongs to it"
        )
    return TokenFile(path, "nanoGPT", map_tokens(path, "<u2", 0, num_bytes // 2), None)


def _open_headed(path: Path, num_bytes: int, magic: int, version: int, count: int) -> TokenFile:
    known, dtype = HEADERS[magic]
    if version != known:
        raise DataError(f"'{path}' has llm.c header version {version}; version {known} is read: make it again")
    found = (num_bytes - 4 * HEADER_INTS) // np.dtype(dtype).itemsize
    if found < count:
        raise DataError(
            f"'{path}' is truncated: its header speaks of {count:,} tokens, it holds {found:,}; copy it again"
        )
    return TokenFile(path, "llm.c", map_tokens(path, dtype, 4 * HEADER_INTS, count), None)
