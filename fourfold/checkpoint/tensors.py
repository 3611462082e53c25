"""Tensors on disk: each rank's blocks in one file of the safetensors format, and an index of all blocks of all tensors.

The files are written here and not by the safetensors package because that copies every tensor before it writes it. An
index entry has a checksum of its own, so what a rank reads is checked as it reads it, whoever wrote it.
"""

import json
from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

import torch
import xxhash

from fourfold.checkpoint.manifest import DamagedError
from fourfold.checkpoint.paths import AnyPath, FileEntry, write_file
from fourfold.checkpoint.state import Piece
from fourfold.errors import CheckpointError

# torch's dtypes by the names of the safetensors format
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

Index = dict[str, dict[str, Any]]
"""By tensor: `dtype`, `shape`, and `pieces`, each with `file`, `offsets`, `shape`, `bytes` (begin, end) and `xxh3`."""


class Block(NamedTuple):
    """A region of a whole tensor."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """A tensor's own memory if it is contiguous and on the host, else that of a copy."""
    return memoryview(tensor.cpu().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def write_pieces(path: AnyPath, pieces: dict[str, Piece]) -> tuple[FileEntry, Index]:
    """One file with all the blocks, and their part of the index."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, piece in pieces.items():
        begin, end = end, end + piece.tensor.nbytes
        header[name] = {
            "dtype": NAMES[piece.tensor.dtype],
            "shape": list(piece.tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    first = 8 + len(text)
    index: Index = {}

    def blocks() -> Iterator[bytes | memoryview]:
        yield len(text).to_bytes(8, "little")
        yield text
        for name, piece in pieces.items():
            content = as_bytes(piece.tensor)
            where = [first + offset for offset in header[name]["data_offsets"]]
            index[name] = {
                "dtype": header[name]["dtype"],
                "shape": list(piece.shape),
                "pieces": [
                    {
                        "file": path.name,
                        "offsets": list(piece.offsets),
                        "shape": list(piece.tensor.shape),
                        "bytes": where,
                        "xxh3": xxhash.xxh3_64_hexdigest(content),
                    }
                ],
            }
            yield content

    return write_file(path, blocks()), index


def merge_indexes(indexes: list[Index]) -> Index:
    """Those of all ranks as one."""
    merged: Index = {}
    for index in indexes:
        for name, entry in index.items():
            known = merged.setdefault(name, {**entry, "pieces": []})
            known["pieces"] += entry["pieces"]
    return {name: merged[name] for name in sorted(merged)}


@torch.no_grad()
def read_pieces(folder: AnyPath, index: Index, wanted: dict[str, Piece]) -> None:
    """Fill the wanted blocks from whatever blocks were saved; a byte that is not what was written is an error."""
    problems = [problem for name, piece in wanted.items() for problem in _misfits(name, piece, index)]
    if problems:
        raise CheckpointError("\n".join(f"{folder.parent} cannot be read into this model: {each}" for each in problems))
    for name, piece in wanted.items():
        entry = index[name]
        here, missing = Block(piece.offsets, tuple(piece.tensor.shape)), piece.tensor.numel()
        for saved in entry["pieces"]:
            there = Block(tuple(saved["offsets"]), tuple(saved["shape"]))
            common = _intersection(here, there)
            if common is None:
                continue
            block = _read_block(folder / saved["file"], name, saved, DTYPES[entry["dtype"]])
            piece.tensor[_slices(common, here)].copy_(block[_slices(common, there)])
            missing -= prod(common.shape)
        if missing:
            raise DamagedError(f"{folder} lacks {missing} numbers of {name}; resume from another checkpoint")


def _misfits(name: str, piece: Piece, index: Index) -> Iterator[str]:
    if name not in index:
        yield f"it has no {name}"
    elif tuple(index[name]["shape"]) != piece.shape:
        yield f"its {name} has the shape {tuple(index[name]['shape'])}, and this model's has {piece.shape}"


def _read_block(file: AnyPath, name: str, saved: dict[str, Any], dtype: torch.dtype) -> torch.Tensor:
    begin, end = saved["bytes"]
    try:
        with file.open("rb") as stream:
            stream.seek(begin)
            content = bytearray(stream.read(end - begin))
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}") from error
    if xxhash.xxh3_64_hexdigest(content) != saved["xxh3"]:
        raise DamagedError(f"{file} is damaged where {name} lies in it; resume from another checkpoint")
    return torch.frombuffer(content, dtype=dtype).reshape(saved["shape"])


def _intersection(one: Block, other: Block) -> Block | None:
    begins = [max(a, b) for a, b in zip(one.offsets, other.offsets, strict=True)]
    ends = [min(a + m, b + n) for a, m, b, n in zip(one.offsets, one.shape, other.offsets, other.shape, strict=True)]
    if any(begin >= end for begin, end in zip(begins, ends, strict=True)):
        return None
    return Block(tuple(begins), tuple(end - begin for begin, end in zip(begins, ends, strict=True)))


def _slices(common: Block, block: Block) -> tuple[slice, ...]:
    """Where the common region lies inside a block."""
    return tuple(
        slice(at - first, at - first + length)
        for at, first, length in zip(common.offsets, block.offsets, common.shape, strict=True)
    )
