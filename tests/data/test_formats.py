"""Readers against files whose bytes are written here by hand, from the description of each format."""

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fourfold.data.formats.find import is_token_path, open_token_files
from fourfold.errors import DataError

DOCUMENTS = [[5, 6, 7], [8], [9, 10, 11, 12, 50256], [1, 2]]
FLAT = [token for document in DOCUMENTS for token in document]


def refusal(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        open_token_files(path)
    return str(caught.value)


def write_megatron(
    prefix: Path, dtype: str = "<H", code: int = 8, version: int = 1, magic: bytes = b"MMIDIDX\x00\x00"
) -> Path:
    """Sentences of one or two tokens within documents, as Megatron's --split-sentences makes them."""
    sentences = [document[i : i + 2] for document in DOCUMENTS for i in range(0, len(document), 2)]
    bounds, seen = [0], 0
    for document in DOCUMENTS:
        seen += -(-len(document) // 2)
        bounds.append(seen)
    size, pointer, pointers = struct.calcsize(dtype), 0, []
    for sentence in sentences:
        pointers.append(pointer)
        pointer += size * len(sentence)
    idx = magic + struct.pack("<Q", version) + struct.pack("<B", code)
    idx += struct.pack("<QQ", len(sentences), len(bounds))
    idx += b"".join(struct.pack("<i", len(sentence)) for sentence in sentences)
    idx += b"".join(struct.pack("<q", pointer) for pointer in pointers)
    idx += b"".join(struct.pack("<q", bound) for bound in bounds)
    Path(f"{prefix}.idx").write_bytes(idx)
    Path(f"{prefix}.bin").write_bytes(b"".join(struct.pack(dtype, token) for token in FLAT))
    return prefix


def npy(array_bytes: bytes, descr: str, count: int) -> bytes:
    header = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': ({count},), }}"
    header += " " * (-(10 + len(header) + 1) % 64) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + array_bytes


def write_paddle(prefix: Path) -> Path:
    ids = b"".join(struct.pack("<H", token) for token in FLAT)
    Path(f"{prefix}_ids.npy").write_bytes(npy(ids, "<u2", len(FLAT)))
    # two sentences in the first document, one in each of the others
    lens, docs = np.array([1, 2, 1, 5, 2], np.int32), np.array([0, 2, 3, 4, 5], np.int64)
    np.savez(f"{prefix}_idx.npz", lens=lens, docs=docs)
    return prefix


def write_legacy(prefix: Path) -> Path:
    lens = np.array([len(document) for document in DOCUMENTS], np.uint16)
    np.savez(f"{prefix}_ids.npz", ids=np.array(FLAT, np.uint16), lens=lens)
    return prefix


def write_nanogpt(prefix: Path) -> Path:
    Path(f"{prefix}.bin").write_bytes(b"".join(struct.pack("<H", token) for token in FLAT))
    return prefix


def write_llmc(prefix: Path, magic: int = 20240520, version: int = 1, count: int | None = None) -> Path:
    header = struct.pack("<iii", magic, version, len(FLAT) if count is None else count) + b"\0" * (253 * 4)
    form = "<H" if magic == 20240520 else "<I"
    Path(f"{prefix}.bin").write_bytes(header + b"".join(struct.pack(form, token) for token in FLAT))
    return prefix


WRITERS = {
    "megatron": write_megatron,
    "paddle": write_paddle,
    "paddle legacy": write_legacy,
    "nanoGPT": write_nanogpt,
    "llm.c": write_llmc,
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_of_each_format_is_read_by_prefix_by_name_and_as_a_folder(tmp_path: Path, name: str) -> None:
    prefix = WRITERS[name](tmp_path / "x")
    main = next(path for path in sorted(tmp_path.iterdir()) if path.suffix in (".bin", ".npy", ".npz"))
    for path in (prefix, main, tmp_path):
        assert is_token_path(path)
        [file] = open_token_files(path)
        assert file.format == name
        assert file.tokens.tolist() == FLAT
        lengths = None if file.lengths is None else file.lengths.tolist()
        assert lengths == (None if name in ("nanoGPT", "llm.c") else [3, 1, 5, 2])


@pytest.mark.parametrize(("dtype", "code"), [("<H", 8), ("<i", 4), ("<q", 5)])
def test_megatron_files_of_every_usual_dtype_are_read(tmp_path: Path, dtype: str, code: int) -> None:
    [file] = open_token_files(write_megatron(tmp_path / "x", dtype, code))
    assert file.tokens.tolist() == FLAT


def test_llama_tokens_of_four_bytes_are_read(tmp_path: Path) -> None:
    [file] = open_token_files(write_llmc(tmp_path / "x", magic=20240801, version=7))
    assert file.tokens.tolist() == FLAT


def test_all_files_of_a_folder_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    write_paddle(tmp_path / "b")
    write_megatron(tmp_path / "a")
    write_nanogpt(tmp_path / "c")
    (tmp_path / "README.md").write_text("x")
    assert [file.format for file in open_token_files(tmp_path)] == ["megatron", "paddle", "nanoGPT"]


def test_files_are_mapped_and_not_read(tmp_path: Path) -> None:
    for name in ("megatron", "paddle", "nanoGPT", "llm.c"):
        folder = tmp_path / name
        folder.mkdir()
        [file] = open_token_files(WRITERS[name](folder / "x"))
        assert not file.tokens.flags.owndata and not file.tokens.flags.writeable


def cut(end: str, keep: int) -> Callable[[Path], None]:
    def damage(prefix: Path) -> None:
        path = Path(f"{prefix}{end}")
        path.write_bytes(path.read_bytes()[:keep])

    return damage


@pytest.mark.parametrize(
    ("name", "damage", "expected"),
    [
        ("megatron", cut(".bin", 20), "x.bin' is truncated: it holds 10 tokens, but"),
        ("megatron", cut(".bin", 21), "are no whole number of 2-byte tokens"),
        ("megatron", cut(".idx", 60), "x.idx' is truncated: 7 sequences and 5 document bounds need"),
        ("megatron", cut(".idx", 20), "x.idx' is truncated after 20 bytes"),
        ("megatron", cut(".idx", 4), "it is no Megatron index"),
        ("paddle", cut("_ids.npy", 140), "x_ids.npy' is truncated or no .npy file"),
        ("paddle", cut("_idx.npz", 50), "x_idx.npz' is truncated or no .npz file"),
        ("paddle", lambda prefix: Path(f"{prefix}_idx.npz").unlink(), "has no 'x_idx.npz' beside it"),
        ("paddle legacy", cut("_ids.npz", 50), "x_ids.npz' is truncated or no .npz file"),
        ("nanoGPT", cut(".bin", 21), "x.bin' has 21 bytes, no whole number of 2-byte tokens"),
        ("llm.c", cut(".bin", 1040), "is truncated: its header speaks of 11 tokens, it holds 8"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, name: str, damage: Callable[[Path], None], expected: str) -> None:
    prefix = WRITERS[name](tmp_path / "x")
    damage(prefix)
    assert expected in refusal(prefix)


def test_an_index_of_another_version_or_kind_is_refused(tmp_path: Path) -> None:
    assert "has version 2; version 1 is read" in refusal(write_megatron(tmp_path / "x", version=2))
    assert "dtype code 6; tokens are whole numbers" in refusal(write_megatron(tmp_path / "x", code=6))
    assert "dtype code 9" in refusal(write_megatron(tmp_path / "x", code=9))
    assert "(TNTIDX)" in refusal(write_megatron(tmp_path / "x", magic=b"TNTIDX\x00\x00\x00"))
    Path(tmp_path / "x.idx").unlink()
    assert "header version 3; version 1" in refusal(write_llmc(tmp_path / "x", version=3))


def test_an_index_of_another_corpus_is_refused(tmp_path: Path) -> None:
    write_megatron(tmp_path / "x")
    with (tmp_path / "x.bin").open("ab") as stream:
        stream.write(b"\0\0")
    assert "speaks of 11 tokens, but" in refusal(tmp_path / "x") and "not of one corpus" in refusal(tmp_path / "x")


def test_lengths_that_wrapped_at_16_bits_are_told(tmp_path: Path) -> None:
    np.savez(tmp_path / "x_ids.npz", ids=np.zeros(65536 + 40 + 7, np.uint16), lens=np.array([40, 7], np.uint16))
    sentence = refusal(tmp_path / "x")
    assert "65,536 of the 65,583 tokens are in no document" in sentence
    assert "1 times a document of 65,536 tokens or more has wrapped" in sentence


def test_an_archive_without_its_arrays_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "x_ids.npz", ids=np.zeros(3, np.uint16))
    assert "holds ids, but not lens" in refusal(tmp_path / "x")
