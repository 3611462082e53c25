"""Raw corpora as chunks of documents: .txt, .jsonl and .parquet, plain or as .gz or .zst, files or folders of them.

A chunk is about a mebibyte and a function of the input alone: reading can begin at the end of any chunk and goes on
with the same ones. Nothing is decoded here; what a chunk's documents are, a worker finds out with `texts_of`.
"""

import gzip
import io
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import zstandard

from fourfold.errors import DataError

CHUNK_BYTES = 1 << 20
LONGEST_LINE = 1 << 28
PARQUET_ROWS = 1024
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
KINDS = {
    ".txt": "text", ".md": "text", ".text": "text", ".jsonl": "lines", ".ndjson": "lines", ".json": "lines",
    ".parquet": "rows",
}  # fmt: skip
# In a folder there lie other things too, such as tokenizers and what `prepare` itself leaves: .json has to be named.
FOLDER_SUFFIXES = (".txt", ".jsonl", ".parquet")


class Input(NamedTuple):
    path: Path
    kind: str
    packing: str
    """"", ".gz" or ".zst"."""
    num_bytes: int
    mtime_ns: int


class Position(NamedTuple):
    """Between two chunks: the file, the byte of its unpacked text (or the row), the line."""

    file: int
    offset: int
    line: int


BEGINNING = Position(0, 0, 1)


class Block(NamedTuple):
    """Bytes or rows of one file. Lines hold a document each; a text holds one, or a piece of one."""

    file: int
    line: int
    data: Any
    is_end: bool
    """Whether the document ends here; of lines and rows every one does."""


class Chunk(NamedTuple):
    blocks: list[Block]
    end: Position
    read_bytes: int
    """Of all inputs up to here, as they lie on disk: for the progress bar."""


class Document(NamedTuple):
    file: int
    line: int
    text: str
    is_end: bool
    problem: str | None


def find_inputs(paths: Sequence[str]) -> list[Input]:
    """In the order given; of a folder, all files at any depth that end in what ENDS says, in sorted order."""
    found: list[Input] = []
    for name in paths:
        path = Path(name)
        if path.is_dir():
            inside = [
                file
                for file in path.rglob("*")
                if file.is_file() and _kind_of(file) and _suffix_of(file) in FOLDER_SUFFIXES
                if not _is_hidden(file, path)
            ]
            if not inside:
                raise DataError(f"'{name}' is a folder without a corpus file; files that are read end in {ENDS}")
            found += [_input(file) for file in sorted(inside, key=lambda file: file.parts)]
        elif not path.exists():
            raise DataError(f"'{name}' does not exist; give files or folders of {ENDS}")
        elif _kind_of(path) is None:
            raise DataError(f"'{name}' is not of a kind that is read; names end in {ENDS}")
        else:
            found.append(_input(path))
    return found


ENDS = ".txt, .jsonl or .parquet, the first two also as .gz or .zst"


def _is_hidden(file: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(folder).parts)


def _packing_of(path: Path) -> str:
    return path.suffix.lower() if path.suffix.lower() in (".gz", ".zst") else ""


def _suffix_of(path: Path) -> str:
    """The one below that of the packing."""
    return Path(path.stem).suffix.lower() if _packing_of(path) else path.suffix.lower()


def _kind_of(path: Path) -> tuple[str, str] | None:
    packing, kind = _packing_of(path), KINDS.get(_suffix_of(path))
    return None if kind is None or (packing and kind == "rows") else (kind, packing)


def _input(path: Path) -> Input:
    kind = _kind_of(path)
    assert kind is not None
    try:
        stat = path.stat()
    except OSError as error:
        raise DataError(f"'{path}' cannot be read ({error.strerror}); make it readable") from error
    return Input(path, *kind, stat.st_size, stat.st_mtime_ns)


def read_chunks(
    inputs: Sequence[Input], json_key: str, separator: str | None = None, start: Position = BEGINNING
) -> Iterator[Chunk]:
    """`separator`: a line of this text ends a document in text files; without it a file is one document."""
    blocks: list[Block] = []
    size = 0
    for number in range(start.file, len(inputs)):
        begin = start if number == start.file else Position(number, 0, 1)
        before = sum(each.num_bytes for each in inputs[:number])
        for block, end, read_bytes in _read_blocks(inputs[number], begin, json_key, separator):
            blocks.append(block)
            size += len(block.data) if isinstance(block.data, bytes) else sum(map(_row_size, block.data))
            if size >= CHUNK_BYTES:
                yield Chunk(blocks, end, before + read_bytes)
                blocks, size = [], 0
    if blocks:
        yield Chunk(blocks, Position(len(inputs), 0, 1), sum(each.num_bytes for each in inputs))


def _row_size(row: object) -> int:
    """Rows that are no text are refused later; until then they take memory too."""
    return len(row) if isinstance(row, str | bytes) else 8


def _read_blocks(
    source: Input, begin: Position, json_key: str, separator: str | None
) -> Iterator[tuple[Block, Position, int]]:
    try:
        if source.kind == "rows":
            yield from _read_rows(source, begin, json_key)
            return
        with source.path.open("rb") as raw:
            stream = _unpacked(source, raw)
            _skip(stream, begin.offset, is_packed=bool(source.packing))
            read = _read_lines if source.kind == "lines" else _read_text
            for block, end in read(stream, source, begin, separator):
                yield block, end, raw.tell()
    except OSError as error:
        raise DataError(f"'{source.path}' cannot be read ({error.strerror or error}); copy it again") from error
    except (EOFError, zlib.error, zstandard.ZstdError) as error:
        raise DataError(f"'{source.path}' is truncated or damaged ({error}); copy it again") from error


def _unpacked(source: Input, raw: BinaryIO) -> BinaryIO:
    if source.packing == ".gz":
        return io.BufferedReader(gzip.GzipFile(fileobj=raw))
    return io.BufferedReader(_Unzstd(raw), CHUNK_BYTES) if source.packing == ".zst" else raw


class _Unzstd(io.RawIOBase):
    """Frames one after the other. The library's own reader takes a truncated file for its end."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw, self._left = raw, b""
        self._engine: Any = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._left:
            packed = self._raw.read(1 << 16)
            if not packed:
                if self._engine is not None:
                    raise EOFError("the last frame ends early")
                return 0
            while packed:
                self._engine = self._engine or zstandard.ZstdDecompressor().decompressobj()
                self._left += self._engine.decompress(packed)
                packed = self._engine.unused_data if self._engine.eof else b""
                if self._engine.eof:
                    self._engine = None
        count = min(len(buffer), len(self._left))
        buffer[:count], self._left = self._left[:count], self._left[count:]
        return count


def _skip(stream: BinaryIO, offset: int, is_packed: bool) -> None:
    if not is_packed:
        stream.seek(offset)
        return
    while offset:  # unpacked again, but not encoded again
        offset -= len(stream.read(min(offset, CHUNK_BYTES)))


def _read_lines(
    stream: BinaryIO, source: Input, begin: Position, separator: str | None
) -> Iterator[tuple[Block, Position]]:
    offset, line = begin.offset, begin.line
    while data := stream.read(CHUNK_BYTES):
        if not data.endswith(b"\n"):
            data += stream.readline(LONGEST_LINE)
        if len(data) >= LONGEST_LINE:
            number = line + data.count(b"\n")
            raise DataError(
                f"'{source.path}', line {number}: the line is longer than {LONGEST_LINE >> 20} MiB; "
                "is it JSON lines, one object per line?"
            )
        block = Block(begin.file, line, data, True)
        offset, line = offset + len(data), line + data.count(b"\n")
        yield block, Position(begin.file, offset, line)


def _read_text(
    stream: BinaryIO, source: Input, begin: Position, separator: str | None
) -> Iterator[tuple[Block, Position]]:
    offset, line, data, is_new = begin.offset, begin.line, b"", True
    mark = None if separator is None else b"\n" + separator.encode() + b"\n"
    is_done = False
    while not is_done:
        data += stream.read(max(0, CHUNK_BYTES - len(data)))
        is_last = len(data) < CHUNK_BYTES
        end, skipped, is_end = _cut(data, mark, is_last)
        text, first_line = data[:end], line
        offset, line = offset + end + skipped, line + data.count(b"\n", 0, end + skipped)
        data = data[end + skipped :]
        is_done = is_last and not data
        # between two separators there may be nothing
        is_nothing = mark is not None and is_new and is_end and (not text or text.isspace())
        is_new = is_end
        if not is_nothing:
            after = Position(begin.file + 1, 0, 1) if is_done else Position(begin.file, offset, line)
            yield Block(begin.file, first_line, text, is_end), after


def _cut(data: bytes, mark: bytes | None, is_last: bool) -> tuple[int, int, bool]:
    """Where a piece of text ends, what is passed over after it, and whether its document ends there."""
    if mark is not None and (place := data.find(mark)) >= 0:
        return place + 1, len(mark) - 1, True
    if is_last:
        if mark is not None and data.endswith(mark[:-1]):
            return len(data) - len(mark) + 2, len(mark) - 2, True
        return len(data), 0, True
    # Within a document: after a line end that stands alone, where no token reaches across; else between characters, if
    # there are any that are not white. Far enough from the end that no separator is cut in two.
    last, low = len(data) - max(len(mark or b""), 4), len(data) // 2
    place = last
    while (place := data.rfind(b"\n", low, place)) > low:
        if not _character_before(data, place).isspace() and not _is_joined(_character_after(data, place + 1)):
            return place + 1, 0, False
    for place in range(last, low, -1):
        if data[place] & 0xC0 != 0x80 and not (
            _character_before(data, place).isspace() or _is_joined(_character_after(data, place))
        ):
            return place, 0, False
    while data[last] & 0xC0 == 0x80:
        last -= 1
    return last, 0, False


def _is_joined(character: str) -> bool:
    """Whether a token may hold it with what comes before: white space in runs, and o200k's '/' after line ends."""
    return character.isspace() or character == "/"


def _character_before(data: bytes, place: int) -> str:
    return data[max(0, place - 4) : place].decode("utf-8", "ignore")[-1:]


def _character_after(data: bytes, place: int) -> str:
    return data[place : place + 4].decode("utf-8", "ignore")[:1]


def _read_rows(source: Input, begin: Position, key: str) -> Iterator[tuple[Block, Position, int]]:
    try:
        # Here and not on top: it is an extra, and large.
        import pyarrow  # type: ignore[import-untyped]
        from pyarrow import parquet
    except ImportError as error:
        raise DataError(f"'{source.path}' needs pyarrow to be read; pip install 'fourfold[parquet]'") from error
    try:
        with parquet.ParquetFile(source.path) as file:
            if key not in file.schema_arrow.names:
                names = ", ".join(file.schema_arrow.names)
                raise DataError(f"'{source.path}' has no column '{key}'; it has {names}: choose with --json_key")
            row = 0
            for group in range(file.num_row_groups):
                count = file.metadata.row_group(group).num_rows
                if row + count <= begin.offset:
                    row += count
                    continue
                for batch in file.iter_batches(PARQUET_ROWS, row_groups=[group], columns=[key]):
                    rows, first = batch.column(0).to_pylist(), row
                    row += len(rows)
                    if row > begin.offset:
                        read_bytes = source.num_bytes * row // max(1, file.metadata.num_rows)
                        yield Block(begin.file, first + 1, rows, True), Position(begin.file, row, row + 1), read_bytes
    except pyarrow.ArrowException as error:
        raise DataError(f"'{source.path}' is truncated or no parquet file ({error}); copy it again") from error


def texts_of(block: Block, kind: str, json_key: str) -> Iterator[Document]:
    """The documents of a block, or what is wrong with each."""
    if kind == "rows":
        for number, value in enumerate(block.data, start=block.line):
            yield _checked(block.file, number, value, json_key, "row")
    elif kind == "lines":
        data = block.data.removeprefix(BYTE_ORDER_MARK) if block.line == 1 else block.data
        for number, line in enumerate(data.split(b"\n"), start=block.line):
            if line and not line.isspace():
                yield _parsed(block.file, number, line, json_key)
    else:
        data = block.data.removeprefix(BYTE_ORDER_MARK) if block.line == 1 else block.data
        text, problem = _decoded(data, block.line)
        zero = text.find("\0")
        if zero >= 0:
            problem = f"line {block.line + text.count(chr(10), 0, zero)}: a byte is 0x00: this is no text"
        yield Document(block.file, block.line, text, block.is_end, problem)


def _decoded(data: bytes, line: int) -> tuple[str, str | None]:
    try:
        return data.decode("utf-8"), None
    except UnicodeDecodeError as error:
        where = line + data.count(b"\n", 0, error.start)
        column = error.start - (data.rfind(b"\n", 0, error.start) + 1)
        return "", f"line {where}: byte {column} of the line is 0x{data[error.start]:02x}, which is not UTF-8"


def _parsed(file: int, number: int, line: bytes, key: str) -> Document:
    text, problem = _decoded(line, number)
    if problem:
        return Document(file, number, "", True, problem)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        return Document(file, number, "", True, f"line {number}: it is not JSON ({error})")
    if not isinstance(found, dict):
        return Document(file, number, "", True, f"line {number}: it is not a JSON object")
    if key not in found:
        names = ", ".join(list(found)[:8]) or "no key at all"
        return Document(file, number, "", True, f"line {number}: the key '{key}' is missing; there is {names}")
    return _checked(file, number, found[key], key)


def _checked(file: int, number: int, value: object, key: str, unit: str = "line") -> Document:
    if not isinstance(value, str):
        return Document(file, number, "", True, f"{unit} {number}: '{key}' is {type(value).__name__}, not text")
    if not value or value.isspace():
        return Document(file, number, "", True, f"{unit} {number}: the document is empty")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        # JSON can write it, UTF-8 cannot
        problem = f"{unit} {number}: the text holds half of a surrogate pair (its character {error.start})"
        return Document(file, number, "", True, problem)
    return Document(file, number, value, True, None)


def read_texts(inputs: Sequence[Input], json_key: str, separator: str | None, skips_bad: bool = False) -> Iterator[str]:
    """All texts in this process, one after the other; a bad one is refused or passed over."""
    for chunk in read_chunks(inputs, json_key, separator):
        for block in chunk.blocks:
            for document in texts_of(block, inputs[block.file].kind, json_key):
                if document.problem is None:
                    yield document.text
                elif not skips_bad:
                    raise DataError(f"'{inputs[document.file].path}', {document.problem}; mend it or leave it out")
