"""Megatron-LM's `.bin/.idx` pair.

The .idx: magic, version (uint64), dtype code (uint8), number of sequences and of document bounds (uint64 each), lengths
(int32), byte offsets (int64), document bounds (int64, in sequences, from 0). The .bin: the tokens and nothing else.
"""

import struct
from pathlib import Path

import numpy as np

from fourfold.data.formats.tokenfile import TokenFile, check_lengths, map_tokens, unreadable
from fourfold.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
OLD_MAGIC = b"TNTIDX\x00\x00"
VERSION = 1
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
HEADER = struct.Struct("<9sQBQQ")


def open_megatron(prefix: Path) -> TokenFile:
    """`prefix` is the common path of both files, without their suffixes."""
    idx, bin_ = prefix.with_name(prefix.name + ".idx"), prefix.with_name(prefix.name + ".bin")
    dtype, num_sequences, num_bounds = read_header(idx)
    lengths = map_tokens(idx, "<i4", HEADER.size, num_sequences)
    pointers = map_tokens(idx, "<i8", HEADER.size + 4 * num_sequences, num_sequences)
    bounds = map_tokens(idx, "<i8", HEADER.size + 12 * num_sequences, num_bounds)
    size = np.dtype(dtype).itemsize
    ends = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    if not np.array_equal(pointers, ends[:-1] * size):
        place = int(np.argmax(pointers != ends[:-1] * size))
        raise DataError(
            f"'{idx}': sequence {place} begins at byte {pointers[place]}, not where the one before it ends "
            f"({ends[place] * size}); only files whose sequences follow each other are read: write it again"
        )
    if not len(bounds) or bounds[0] != 0 or bounds[-1] != num_sequences or (np.diff(bounds) < 0).any():
        raise DataError(f"'{idx}': its document bounds do not lead from 0 to {num_sequences}; make the index again")
    try:
        num_bytes = bin_.stat().st_size
    except OSError as error:
        raise unreadable(bin_, error) from error
    if num_bytes % size:
        raise DataError(f"'{bin_}' is truncated: {num_bytes:,} bytes are no whole number of {size}-byte tokens")
    documents = np.diff(ends[bounds])
    check_lengths(bin_, documents, num_bytes // size, str(idx))
    return TokenFile(bin_, "megatron", map_tokens(bin_, dtype, 0, num_bytes // size), documents)


def read_header(idx: Path) -> tuple[str, int, int]:
    """Dtype, number of sequences, number of document bounds."""
    try:
        with idx.open("rb") as stream:
            head = stream.read(HEADER.size)
        num_bytes = idx.stat().st_size
    except OSError as error:
        raise unreadable(idx, error) from error
    if head.startswith(OLD_MAGIC):
        raise DataError(
            f"'{idx}' is an index of Megatron's old kind, which is not memory-mapped (TNTIDX); "
            "preprocess again with --dataset-impl mmap"
        )
    if not head.startswith(MAGIC):
        raise DataError(f"'{idx}' does not begin with {MAGIC!r}: it is no Megatron index; remove it, or make it again")
    if len(head) < HEADER.size:
        raise DataError(f"'{idx}' is truncated after {len(head)} bytes; make it again")
    _, version, code, num_sequences, num_bounds = HEADER.unpack(head)
    if version != VERSION:
        raise DataError(f"'{idx}' has version {version}; version {VERSION} is read: make it again with Megatron-LM")
    dtype = DTYPES.get(code, "")
    if dtype[-2:-1] not in ("u", "i"):
        known = ", ".join(f"{code} ({dtype.lstrip('<')})" for code, dtype in DTYPES.items() if "f" not in dtype)
        raise DataError(f"'{idx}' has dtype code {code}; tokens are whole numbers, whose codes are {known}")
    needed = HEADER.size + 12 * num_sequences + 8 * num_bounds
    if num_bytes < needed:
        raise DataError(
            f"'{idx}' is truncated: {num_sequences:,} sequences and {num_bounds:,} document bounds need {needed:,} "
            f"bytes, and it has {num_bytes:,}; make it again"
        )
    return dtype, num_sequences, num_bounds
