"""Raw text to token files: read in one process, encoded in many, written in one, in the order of the input.

The result is a function of the input and the options; the number of workers does not matter. A shard is finished, then
renamed, then noted in the progress file; a restart goes on after the last one noted. The manifest comes last.
"""

import errno
import hashlib
import json
import os
import re
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fourfold.data.documents import BEGINNING, Chunk, Input, Position, read_chunks, texts_of
from fourfold.data.formats.prepared import LENGTHS, MANIFEST, PROGRESS, TOKENIZER, TOKENS, VERSION, shard_paths
from fourfold.data.tokenizer import Tokenizer, save_tokenizer
from fourfold.errors import DataError


@dataclass(frozen=True)
class Options:
    json_key: str = "text"
    separator: str | None = None
    append_eos: bool = True
    shard_tokens: int = 100_000_000
    skip_bad: int = 0
    """Bad documents that are passed over before the next one is refused; -1 for any number."""
    workers: int = 1


class Shard(NamedTuple):
    documents: int
    tokens: int
    checksum: str


@dataclass
class Tally:
    """What has been done up to the last finished shard; what a restart begins with."""

    shards: list[Shard] = field(default_factory=list)
    position: Position = BEGINNING
    skipped: Counter[str] = field(default_factory=Counter)
    text_bytes: int = 0
    read_bytes: int = 0

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards)

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)


class Told(NamedTuple):
    """For the progress bar, after each chunk."""

    documents: int
    tokens: int
    read_bytes: int


class Encoded(NamedTuple):
    """A chunk after its worker."""

    ids: npt.NDArray[Any]
    pieces: list[tuple[int, bool, int, int, str | None]]
    """Of each: tokens, whether its document ends here, file, line, and what is wrong with it."""
    text_bytes: int


def prepare(
    inputs: Sequence[Input],
    prefix: Path,
    tokenizer: Tokenizer,
    options: Options,
    tell: Callable[[Told], None] = lambda told: None,
) -> Tally:
    """Everything from raw text to the manifest; what an earlier call has finished is not done again."""
    if options.append_eos and tokenizer.eos_id is None:
        raise DataError(
            "the tokenizer has no end-of-document token that is known here; name it with --eos_token, or write "
            "--no_append_eos"
        )
    settings = settings_of(inputs, tokenizer, options)
    tally = begin(prefix, settings)
    tell(Told(tally.documents, tally.tokens, tally.read_bytes))
    if tally.position.file < len(inputs):
        with _explained(prefix):
            prefix.parent.mkdir(parents=True, exist_ok=True)
            save_tokenizer(tokenizer, prefix.with_name(prefix.name + TOKENIZER))
        chunks = read_chunks(inputs, options.json_key, options.separator, tally.position)
        with _encoding(inputs, tokenizer, options) as encode:
            _write_all(encode(chunks), inputs, prefix, tokenizer, options, settings, tally, tell)
    if not tally.documents:
        raise DataError("the input holds no document that could be used; see --json_key and --skip_bad")
    finish(prefix, settings, tokenizer, tally)
    return tally


def settings_of(inputs: Sequence[Input], tokenizer: Tokenizer, options: Options) -> dict[str, Any]:
    """Everything that the result depends on."""
    return {
        "inputs": [[str(each.path), each.num_bytes, each.mtime_ns] for each in inputs],
        "tokenizer": tokenizer.fingerprint,
        "json_key": options.json_key,
        "separator": options.separator,
        "append_eos": options.append_eos,
        "shard_tokens": options.shard_tokens,
    }


def begin(prefix: Path, settings: dict[str, Any]) -> Tally:
    """Where an earlier call with the same settings has stopped."""
    for end in (MANIFEST, PROGRESS):
        path = prefix.with_name(prefix.name + end)
        if not path.exists():
            continue
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))
            other = [key for key in settings if saved["settings"].get(key) != settings[key]]
            tally = _tally_from(saved)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"'{path}' is damaged ({error!r}); remove it, and the corpus is prepared anew") from error
        if other:
            raise DataError(
                f"'{path}' is of other settings ({', '.join(other)}); write another --output_prefix, or --overwrite"
            )
        for number in range(len(tally.shards)):
            for file in shard_paths(prefix, number):
                if not file.exists():
                    raise DataError(f"'{file}' is missing, though '{path}' lists it; write --overwrite to begin anew")
        return tally
    return Tally()


def remove_prepared(prefix: Path) -> None:
    """For `--overwrite`: the manifest first, so that nothing half-removed looks complete."""
    for end in (MANIFEST, PROGRESS, TOKENIZER):
        prefix.with_name(prefix.name + end).unlink(missing_ok=True)
    # by the whole name: beside them may lie the input, which can begin with the prefix too
    ours = re.compile(rf"{re.escape(prefix.name)}-\d{{5,}}({re.escape(TOKENS)}|{re.escape(LENGTHS)})(\.partial)?")
    for path in prefix.parent.glob("*"):
        if ours.fullmatch(path.name):
            path.unlink()


def finish(prefix: Path, settings: dict[str, Any], tokenizer: Tokenizer, tally: Tally) -> None:
    manifest = {
        "version": VERSION,
        "documents": tally.documents,
        "tokens": tally.tokens,
        "dtype": np.dtype(tokenizer.dtype).name,
        "tokenizer": {
            "fingerprint": tokenizer.fingerprint,
            "vocab_size": tokenizer.vocab_size,
            "eos_id": tokenizer.eos_id,
        },
        **_tally_json(tally),
        "settings": settings,
    }
    with _explained(prefix):
        _write_whole(prefix.with_name(prefix.name + MANIFEST), manifest)
        prefix.with_name(prefix.name + PROGRESS).unlink(missing_ok=True)


# Encoding, in this process or in others

Encode = Callable[[Iterator[Chunk]], Iterator[tuple[Chunk, Encoded]]]


@contextmanager
def _encoding(inputs: Sequence[Input], tokenizer: Tokenizer, options: Options) -> Iterator[Encode]:
    kinds = [each.kind for each in inputs]
    if options.workers <= 1:
        yield lambda chunks: ((chunk, encode_chunk(chunk, kinds, tokenizer, options)) for chunk in chunks)
        return
    # Forked, so that workers share the tokenizer's memory and start at once.
    pool = ProcessPoolExecutor(options.workers, get_context("fork"), _set_up, (kinds, tokenizer, options))
    try:
        yield lambda chunks: _in_order(chunks, pool, 2 * options.workers + 2)
    except BrokenProcessPool as error:
        raise DataError(
            "a worker was killed, probably for want of memory; use fewer --workers, and run the same command again: it "
            "goes on after the last finished shard"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _in_order(chunks: Iterator[Chunk], pool: ProcessPoolExecutor, most: int) -> Iterator[tuple[Chunk, Encoded]]:
    """At most so many chunks are on their way: that bounds the memory."""
    ahead: deque[tuple[Chunk, Future[Encoded]]] = deque()
    for chunk in chunks:
        ahead.append((chunk._replace(blocks=[]), pool.submit(_encode_in_worker, chunk)))
        if len(ahead) >= most:
            first, future = ahead.popleft()
            yield first, future.result()
    for first, future in ahead:
        yield first, future.result()


_worker: tuple[list[str], Tokenizer, Options]


def _set_up(kinds: list[str], tokenizer: Tokenizer, options: Options) -> None:
    global _worker
    _worker = kinds, tokenizer, options


def _encode_in_worker(chunk: Chunk) -> Encoded:
    return encode_chunk(chunk, *_worker)


def encode_chunk(chunk: Chunk, kinds: list[str], tokenizer: Tokenizer, options: Options) -> Encoded:
    eos = np.array([tokenizer.eos_id] if options.append_eos else [], dtype=tokenizer.dtype)
    arrays, pieces, text_bytes = [], [], 0
    for block in chunk.blocks:
        for document in texts_of(block, kinds[block.file], options.json_key):
            problem, count = document.problem, 0
            if problem is None:
                try:
                    ids = tokenizer.encode(document.text)
                except DataError as error:
                    problem = f"line {document.line}: {error}"
                else:
                    arrays += [ids, eos] if document.is_end else [ids]
                    count = len(ids) + len(eos) * document.is_end
                    text_bytes += len(document.text) if document.text.isascii() else len(document.text.encode())
            pieces.append((count, document.is_end, document.file, document.line, problem))
    ids = np.concatenate(arrays) if arrays else np.empty(0, tokenizer.dtype)
    return Encoded(ids, pieces, text_bytes)


# Writing


def _write_all(
    encoded: Iterator[tuple[Chunk, Encoded]],
    inputs: Sequence[Input],
    prefix: Path,
    tokenizer: Tokenizer,
    options: Options,
    settings: dict[str, Any],
    tally: Tally,
    tell: Callable[[Told], None],
) -> None:
    shard = None
    for chunk, result in encoded:
        with _explained(prefix):
            shard = shard or ShardWriter(prefix, len(tally.shards), tokenizer.dtype)
            for problem, file in _append(shard, result, 1 if options.append_eos else 0):
                _count_bad(tally, problem, inputs[file].path, options.skip_bad)
        tally.text_bytes += result.text_bytes
        tally.read_bytes, tally.position = chunk.read_bytes, chunk.end
        if shard.is_between_documents and shard.num_tokens >= options.shard_tokens:
            _finish_shard(shard, prefix, settings, tally)
            shard = None
        open_documents, open_tokens = (len(shard.lengths), shard.num_tokens) if shard else (0, 0)
        tell(Told(tally.documents + open_documents, tally.tokens + open_tokens, tally.read_bytes))
    if shard is not None:
        _finish_shard(shard, prefix, settings, tally)


def _append(shard: "ShardWriter", result: Encoded, eos_tokens: int) -> Iterator[tuple[str, int]]:
    """Adds the pieces of a chunk; gives what is wrong with documents, and the file of each."""
    if not shard.is_spoiled and all(
        problem is None and (count > eos_tokens or not is_end) for count, is_end, _, _, problem in result.pieces
    ):
        shard.write(result.ids)
        for count, is_end, *_ in result.pieces:
            shard.document_tokens += count
            if is_end:
                shard.end_document()
        return
    first = done = 0
    for count, is_end, file, line, problem in result.pieces:
        if problem is not None and not shard.is_spoiled:
            shard.is_spoiled = True
            yield problem, file
        shard.document_tokens += count
        first += count
        if is_end:
            if not shard.is_spoiled and shard.document_tokens <= eos_tokens:
                shard.is_spoiled = True
                yield f"line {line}: the document is empty", file
            shard.write(result.ids[done:first])
            done = first
            shard.end_document()
    shard.write(result.ids[done:first])


def _count_bad(tally: Tally, problem: str, path: Path, most: int) -> None:
    if 0 <= most <= tally.skipped.total():
        passed = f" ({tally.skipped.total()} were passed over before it)" if most else ""
        raise DataError(
            f"'{path}', {problem}{passed}; mend it, or pass over up to N such documents with --skip_bad N (-1: any)"
        )
    # without the place, so that equal ones are counted together
    tally.skipped[problem.partition(": ")[2].partition(" (")[0].partition(";")[0]] += 1


class ShardWriter:
    """Tokens and lengths of one shard, under names that nobody reads until they are whole."""

    def __init__(self, prefix: Path, number: int, dtype: type[Any]) -> None:
        self.paths = shard_paths(prefix, number)
        self.drafts = [path.with_name(path.name + ".partial") for path in self.paths]
        self.dtype = np.dtype(dtype)
        self.lengths = array("q")
        self.num_tokens = 0
        """Of finished documents."""
        self.document_tokens = 0
        """Of the document that is being written."""
        self.is_spoiled = False
        """Whether something is wrong with that document."""
        self.stream = self.drafts[0].open("wb")
        self.header_bytes = self._write_header()

    @property
    def is_between_documents(self) -> bool:
        return not self.document_tokens

    def write(self, ids: npt.NDArray[Any]) -> None:
        if len(ids) and not self.is_spoiled:
            self.stream.write(ids.data)

    def end_document(self) -> None:
        if self.is_spoiled:
            self.stream.flush()
            self.stream.seek(self.header_bytes + self.num_tokens * self.dtype.itemsize)
            self.stream.truncate()
        else:
            self.lengths.append(self.document_tokens)
            self.num_tokens += self.document_tokens
        self.document_tokens, self.is_spoiled = 0, False

    def close(self) -> Shard:
        self.stream.seek(0)
        assert self._write_header() == self.header_bytes
        _sync(self.stream)
        self.stream.close()
        lengths = np.array(self.lengths, dtype=np.int64)
        with self.drafts[1].open("wb") as stream:
            np.save(stream, lengths.astype(np.int32) if lengths.max() < 2**31 else lengths)
            _sync(stream)
        digest = hashlib.blake2b(digest_size=16)
        for draft in self.drafts:
            with draft.open("rb") as stream:
                while block := stream.read(1 << 20):
                    digest.update(block)
        for draft, path in zip(self.drafts, self.paths, strict=True):
            draft.replace(path)
        return Shard(len(self.lengths), self.num_tokens, digest.hexdigest())

    def _write_header(self) -> int:
        # numpy leaves room for the length to grow, so that the header keeps its size
        shape = {"descr": self.dtype.newbyteorder("<").str, "fortran_order": False, "shape": (self.num_tokens,)}
        np.lib.format.write_array_header_1_0(self.stream, shape)
        return self.stream.tell()


def _finish_shard(shard: ShardWriter, prefix: Path, settings: dict[str, Any], tally: Tally) -> None:
    with _explained(prefix):
        if shard.lengths:
            tally.shards.append(shard.close())
        else:
            shard.stream.close()
            shard.drafts[0].unlink()
        _write_whole(prefix.with_name(prefix.name + PROGRESS), {**_tally_json(tally), "settings": settings})


def _tally_json(tally: Tally) -> dict[str, Any]:
    return {
        "shards": [shard._asdict() for shard in tally.shards],
        "position": list(tally.position),
        "skipped": dict(tally.skipped),
        "text_bytes": tally.text_bytes,
        "read_bytes": tally.read_bytes,
    }


def _tally_from(saved: dict[str, Any]) -> Tally:
    return Tally(
        [Shard(**shard) for shard in saved["shards"]],
        Position(*saved["position"]),
        Counter(saved["skipped"]),
        saved["text_bytes"],
        saved["read_bytes"],
    )


def _write_whole(path: Path, content: dict[str, Any]) -> None:
    draft = path.with_name(path.name + ".partial")
    with draft.open("w", encoding="utf-8") as stream:
        json.dump(content, stream, indent=1)
        stream.write("\n")
        _sync(stream)
    draft.replace(path)


def _sync(stream: Any) -> None:
    stream.flush()
    os.fsync(stream.fileno())


@contextmanager
def _explained(prefix: Path) -> Iterator[None]:
    """What a disk refuses, in a sentence."""
    try:
        yield
    except OSError as error:
        remedy = "free some space" if error.errno == errno.ENOSPC else "write another --output_prefix"
        raise DataError(
            f"'{prefix}' cannot be written ({error.strerror}); {remedy}, and run the same command again: it goes on "
            "after the last finished shard"
        ) from error
