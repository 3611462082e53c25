"""From the section `data` to samples: text that is encoded here, token files as they are, or a weighted blend of them.

What ties text, tokenizer and split together lives here, and every way in which they do not fit. Reading text is
`text.py`'s, reading token files `formats/`'s, the order of samples `source.py`'s.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from fourfold.config.schema import Data
from fourfold.data.formats.find import is_token_path, open_token_files, passed_over
from fourfold.data.formats.tokenfile import TokenFile
from fourfold.data.index import cache_folders, cached_index, digest_of
from fourfold.data.order import Ints, shares_text, split_counts, split_samples
from fourfold.data.source import Blend, Documents, Range, Source, Windows, bad_token
from fourfold.data.text import BUILTIN, CHOICES, find_text_files, read_text
from fourfold.data.tokenizer import CharacterTokenizer, NumberTokenizer, Tokenizer, open_tokenizer
from fourfold.errors import DataError

VocabSize = int | Literal["auto"]


class Splits(NamedTuple):
    train: Source
    valid: Source
    test: Source


class Corpus(NamedTuple):
    """A corpus as samples of three parts."""

    splits: Splits
    tokenizer: Tokenizer
    description: str
    """What was found, for the log."""
    first_token: int
    passed_over: list[Path]  # files of a folder that are not read, for the trainer to mention
    fingerprint: str  # changes with the tokens and with the tokenizer: a resumed run can tell that its text changed


def load_corpus(
    data: Data, seed: int, needs_valid: bool, tokenizer: Tokenizer | None = None, vocab_size: VocabSize = "auto"
) -> Corpus:
    """Reads and splits what `data` names. A tokenizer given (a checkpoint's) must be the one that `data` leads to.
    `vocab_size` is the model's, for token files that came without a tokenizer."""
    if not data.input_dir:
        raise DataError(f"data.input_dir is not set; {CHOICES}")
    if isinstance(data.input_dir, Mapping):
        corpus = _load_blend(data, data.input_dir, seed, needs_valid, tokenizer, vocab_size)
    elif is_text(data.input_dir, data.tokenizer):
        corpus = _load_text(data, data.input_dir, seed, needs_valid, tokenizer)
    else:
        corpus = _load_tokens(data, data.input_dir, seed, needs_valid, tokenizer, vocab_size)
    _check_boundaries(data, corpus)
    return corpus


def is_text(input_dir: str, tokenizer: str) -> bool:
    """Whether an input is text to be encoded, and not token files."""
    if input_dir.startswith(BUILTIN):
        return True
    # A folder may hold both, as nanoGPT's do; whoever asks for characters means the text.
    path = Path(input_dir)
    is_ambiguous = path.is_dir() and tokenizer == "characters" and find_text_files(path)[0]
    return bool(is_ambiguous) or not is_token_path(path)


# Text, encoded at every start: right for what fits in memory; anything larger is prepared once.


def _load_text(data: Data, input_dir: str, seed: int, needs_valid: bool, given: Tokenizer | None) -> Corpus:
    _refuse_raw(input_dir)
    text = read_text(input_dir, data.truncate)
    own = (
        CharacterTokenizer.from_text(text)
        if data.tokenizer in ("characters", "auto")
        else open_tokenizer(data.tokenizer)
    )
    if given is not None and given != own:
        raise DataError(_other_tokenizer(input_dir, own, given))
    tokens = own.encode(text)
    stride = data.max_seq_len if data.sample_stride == "auto" else data.sample_stride
    if data.split_by == "file":
        raise DataError(f"data.split_by = file is for token files, and data.input_dir = '{input_dir}' is text; {BY}")
    starts = split_samples(len(tokens), data.max_seq_len, stride, data.split, data.split_by, seed, needs_valid)
    eos = own.eos_id if data.eos_token_id == "auto" else data.eos_token_id
    splits = Splits(*(Windows(tokens, part, data.max_seq_len, seed, eos) for part in starts))
    unread = find_text_files(input_dir)[1] if Path(input_dir).is_dir() else []
    digest = hashlib.blake2b(own.fingerprint.encode() + b"\0", digest_size=8)
    digest.update(tokens.data)
    unit = "unique" if isinstance(own, CharacterTokenizer) else "tokens in the vocabulary"
    description = f"{input_dir}: {len(text):,} characters, {own.vocab_size} {unit}"
    return Corpus(splits, own, description, int(tokens[0]), unread, digest.hexdigest())


def _refuse_raw(input_dir: str) -> None:
    """JSON lines would be learnt with their braces, and packed files not at all."""
    path = Path(input_dir)
    is_raw = path.is_file() and path.suffix.lower() in RAW_SUFFIXES
    if path.is_dir():
        taken, others = find_text_files(path)
        is_raw = not taken and any(other.suffix.lower() in RAW_SUFFIXES for other in others)
    if is_raw:
        raise DataError(
            f"data.input_dir = '{input_dir}' is a raw corpus, which has to be prepared: fourfold prepare {input_dir} "
            "--output_prefix OUT --tokenizer T; then write input_dir = OUT"
        )


RAW_SUFFIXES = frozenset((".jsonl", ".ndjson", ".parquet", ".gz", ".zst"))
BY = "write split_by = position or window"


# Token files


def _load_tokens(
    data: Data, input_dir: str, seed: int, needs_valid: bool, given: Tokenizer | None, vocab_size: VocabSize
) -> Corpus:
    path = Path(input_dir)
    _check_token_keys(data, input_dir)
    files = open_token_files(path)
    if not any(len(file.tokens) for file in files):
        raise DataError(f"data.input_dir = '{input_dir}' holds no token; {CHOICES}")
    tokenizer = _tokenizer_of(data, input_dir, files, vocab_size)
    if given is not None and given != tokenizer:
        raise DataError(_other_tokenizer(input_dir, tokenizer, given))
    size = tokenizer.vocab_size if vocab_size == "auto" else max(vocab_size, tokenizer.vocab_size)
    _check_some_tokens(files, tokenizer, size)
    eos = tokenizer.eos_id if data.eos_token_id == "auto" else data.eos_token_id
    cache = cache_folders(data.cache_dir, path if path.is_dir() else path.parent)
    files = [_with_documents(file, eos, cache) for file in files]
    parts = _split_by_file(files) if data.split_by == "file" else _split_by_document(files, data)
    tokens, paths = [file.tokens for file in files], [file.path for file in files]
    has_documents = all(file.lengths is not None for file in files)
    splits = Splits(
        *(Documents(tokens, paths, part, data.max_seq_len, seed, size, eos, has_documents, cache) for part in parts)
    )
    _check_parts(splits, data, input_dir, needs_valid, sum(len(file.tokens) for file in files))
    unread = passed_over(path) if path.is_dir() else []
    first = next(int(file.tokens[0]) for file in files if len(file.tokens))
    return Corpus(splits, tokenizer, _describe(input_dir, files), first, unread, _fingerprint(files, tokenizer))


def _check_token_keys(data: Data, input_dir: str) -> None:
    """Keys that only mean something for text."""
    where = f"data.input_dir = '{input_dir}' holds tokens"
    if data.split_by == "window":
        raise DataError(f"data.split_by = window is for text, and {where}; write split_by = position or file")
    if data.truncate != 1.0:
        raise DataError(f"data.truncate = {data.truncate:g} is for text, and {where}; write truncate = 1")
    if data.sample_stride not in ("auto", data.max_seq_len):
        raise DataError(
            f"data.sample_stride = {data.sample_stride} is for text, and {where}; write sample_stride = auto"
        )


def _tokenizer_of(data: Data, input_dir: str, files: Sequence[TokenFile], vocab_size: VocabSize) -> Tokenizer:
    made_with = {file.tokenizer_fingerprint: file.path for file in files if file.tokenizer_fingerprint}
    if len(made_with) > 1:
        raise DataError(
            f"data.input_dir = '{input_dir}' mixes tokenizers: {_and(made_with.values())} were made with "
            "different ones; "
            "prepare both with one"
        )
    if data.tokenizer == "characters":
        raise DataError(
            f"data.tokenizer = characters is for text, and data.input_dir = '{input_dir}' holds tokens; "
            "write auto, or the path of the tokenizer that made them"
        )
    if data.tokenizer != "auto":
        tokenizer = open_tokenizer(data.tokenizer)
    else:
        path = Path(input_dir)
        folder = path if path.is_dir() else path.parent
        places = [*(file.tokenizer_path for file in files if file.tokenizer_path), folder / "tokenizer.json"]
        found = next((place for place in places if place.exists()), None)
        if found is None:
            return _numbers(input_dir, vocab_size)
        tokenizer = open_tokenizer(str(found))
    if made_with and tokenizer.fingerprint not in made_with:
        raise DataError(
            f"data.tokenizer = '{data.tokenizer}' is not the tokenizer that made '{next(iter(made_with.values()))}'; "
            "write auto, and the one beside the data is used"
        )
    return tokenizer


def _numbers(input_dir: str, vocab_size: VocabSize) -> Tokenizer:
    if vocab_size == "auto":
        raise DataError(
            f"data.input_dir = '{input_dir}' has no tokenizer beside it, so model.vocab_size = auto cannot be known; "
            "write model.vocab_size (50257 for GPT-2's tokens), or data.tokenizer"
        )
    return NumberTokenizer(vocab_size)


def _check_some_tokens(files: Sequence[TokenFile], tokenizer: Tokenizer, vocab_size: int) -> None:
    """A look at a few places of every file: wrong vocabularies show before the first step, not in the middle of a run.
    The rest is looked at as it is used."""
    ends = np.cumsum([len(file.tokens) for file in files], dtype=np.int64)
    for number, file in enumerate(files):
        if file.tokens.dtype.itemsize < 4 and tokenizer.vocab_size > 1 << (8 * file.tokens.dtype.itemsize):
            raise DataError(
                f"'{file.path}' holds {file.tokens.dtype} tokens, but its tokenizer has {tokenizer.vocab_size}: ids "
                f"above {np.iinfo(file.tokens.dtype).max} have wrapped; make the file again with 4 bytes a token"
            )
        for place in np.linspace(0, max(0, len(file.tokens) - LOOK), PLACES, dtype=np.int64).tolist():
            seen = file.tokens[place : place + LOOK]
            wrong = np.flatnonzero((seen >= vocab_size) | (seen < 0))
            if len(wrong):
                position = int(ends[number]) - len(file.tokens) + place + int(wrong[0])
                tokens, paths = [each.tokens for each in files], [each.path for each in files]
                raise DataError(bad_token(tokens, paths, ends, position, int(seen[wrong[0]]), vocab_size))


PLACES, LOOK = 32, 2048


def _with_documents(file: TokenFile, eos: int | None, cache: Sequence[Path]) -> TokenFile:
    """Documents of a flat file, found by the token that ends each."""
    if file.lengths is not None or eos is None:
        return file

    def build() -> dict[str, Ints]:
        # in pieces: the comparison alone would otherwise take half of the file's size in memory
        ends = [
            np.flatnonzero(file.tokens[first : first + SCAN] == eos) + first + 1
            for first in range(0, len(file.tokens), SCAN)
        ]
        bounds = np.unique(np.concatenate(([0], *ends, [len(file.tokens)])))
        return {"lengths": np.diff(bounds).astype(np.int64)}

    stat = file.path.stat()
    key = {
        "what": "ends",
        "path": str(file.path.resolve()),
        "bytes": stat.st_size,
        "mtime": stat.st_mtime_ns,
        "eos": eos,
    }
    return file._replace(lengths=cached_index(cache, key, len(file.tokens), build)["lengths"])


SCAN = 1 << 24


def _split_by_document(files: Sequence[TokenFile], data: Data) -> list[Range]:
    """Contiguous parts of the documents of all files, or, where nobody knows of documents, of the tokens."""
    ends = np.cumsum([0, *(len(file.tokens) for file in files)], dtype=np.int64)
    if any(file.lengths is None for file in files):
        parts = []
        for low, high in pairwise(split_counts(int(ends[-1]), data.split)):
            starts, stops = np.clip(ends[:-1], low, high), np.clip(ends[1:], low, high)
            parts.append(Range(starts, stops - starts))
        return parts
    lengths = np.concatenate([file.lengths for file in files])
    starts = np.cumsum(lengths) - lengths
    return [
        Range(starts[low:high], lengths[low:high]) for low, high in pairwise(split_counts(len(lengths), data.split))
    ]


PART_NAMES = ({"train"}, {"val", "valid", "validation", "dev"}, {"test"})


def _split_by_file(files: Sequence[TokenFile]) -> list[Range]:
    """Files go where a word in their names says: train.bin, fineweb_val_000001.bin."""
    parts: list[list[Range]] = [[], [], []]
    begin = 0
    for file in files:
        words = set(re.split(r"[^a-z]+", file.path.name.lower()))
        found = [part for part, names in enumerate(PART_NAMES) if words & names]
        if len(found) != 1:
            raise DataError(
                f"data.split_by = file cannot tell which part '{file.path}' is of; its name must hold one of the words "
                "train, val, valid, dev and test, or write split_by = position"
            )
        lengths = np.array([len(file.tokens)]) if file.lengths is None else file.lengths
        parts[found[0]].append(Range(begin + np.cumsum(lengths) - lengths, lengths))
        begin += len(file.tokens)
    empty = [Range(np.empty(0, np.int64), np.empty(0, np.int64))]
    return [Range(*map(np.concatenate, zip(*(part or empty), strict=True))) for part in parts]


def _check_parts(splits: Splits, data: Data, input_dir: str, needs_valid: bool, num_tokens: int) -> None:
    for name, part in (("training", splits.train), ("validation", splits.valid)):
        if name == "validation" and not needs_valid:
            continue
        assert isinstance(part, Documents)
        if part.num_tokens <= data.max_seq_len:
            how = "" if data.split_by == "file" else f" by data.split = {shares_text(data.split)}"
            off = "; engine.eval_iters = 0 trains without evaluation" if name == "validation" else ""
            raise DataError(
                f"data.input_dir = '{input_dir}' is too small: {name} gets {part.num_tokens:,} of its {num_tokens:,} "
                f"tokens{how}, and one sample of data.max_seq_len = {data.max_seq_len} needs {data.max_seq_len + 1}; "
                f"use more data, a larger share for {name}, or a smaller data.max_seq_len{off}"
            )


# Blends


def _load_blend(
    data: Data,
    weights: Mapping[str, float],
    seed: int,
    needs_valid: bool,
    given: Tokenizer | None,
    vocab_size: VocabSize,
) -> Corpus:
    members = []
    for path in weights:
        if is_text(path, data.tokenizer):
            raise DataError(
                f"data.input_dir blends '{path}', which is not token files; prepare it first: "
                f"fourfold prepare {path} --output_prefix ... --tokenizer ..."
            )
        members.append(_load_tokens(data, path, seed, needs_valid, None, vocab_size))
    tokenizers = {member.tokenizer.fingerprint: path for member, path in zip(members, weights, strict=True)}
    if len(tokenizers) > 1:
        raise DataError(
            f"data.input_dir mixes tokenizers: {_and(tokenizers.values())} were made with different ones; "
            "prepare both with one"
        )
    if given is not None and given != members[0].tokenizer:
        raise DataError(_other_tokenizer(_and(weights), members[0].tokenizer, given))
    shares = [Fraction(repr(float(weight))) for weight in weights.values()]
    cache = cache_folders(data.cache_dir, Path(next(iter(weights))).parent)
    splits = Splits(
        *(Blend([member.splits[part] for member in members], shares, cache) for part in range(3))  # type: ignore[misc]
    )
    told = ", ".join(
        f"{float(share / sum(shares)):.1%} {member.description}" for share, member in zip(shares, members, strict=True)
    )
    text = "\0".join(f"{share} {member.fingerprint}" for share, member in zip(shares, members, strict=True))
    fingerprint = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    unread = [path for member in members for path in member.passed_over]
    return Corpus(splits, members[0].tokenizer, told, members[0].first_token, unread, fingerprint)


# What both kinds share


def _check_boundaries(data: Data, corpus: Corpus) -> None:
    asked = [key for key in BOUNDARY_KEYS if getattr(data, key)]
    sources = corpus.splits.train.sources if isinstance(corpus.splits.train, Blend) else [corpus.splits.train]
    for source in sources if asked else []:
        knows = source.eos is not None or (isinstance(source, Documents) and source.has_documents)
        if not knows:
            raise DataError(
                f"data.{asked[0]} = true needs to know where documents end, and nothing in data.input_dir says so; set "
                "data.eos_token_id to the token that ends a document, or leave the key out"
            )


BOUNDARY_KEYS = ("eod_mask_loss", "reset_position_ids", "reset_attention_mask")


def _fingerprint(files: Sequence[TokenFile], tokenizer: Tokenizer) -> str:
    """Of sizes, documents and some of the tokens (or checksums, where a manifest has them): all of them would take
    minutes to read."""
    digest = hashlib.blake2b(tokenizer.fingerprint.encode(), digest_size=8)
    for file in files:
        digest.update(f"\0{len(file.tokens)} {file.tokens.dtype.itemsize} {file.checksum}".encode())
        digest.update(b"" if file.lengths is None else digest_of(file.lengths).encode())
        if file.checksum is None:
            for place in np.linspace(0, max(0, len(file.tokens) - LOOK), PLACES, dtype=np.int64).tolist():
                digest.update(np.ascontiguousarray(file.tokens[place : place + LOOK]).data)
    return digest.hexdigest()


def _describe(input_dir: str, files: Sequence[TokenFile]) -> str:
    tokens = sum(len(file.tokens) for file in files)
    known = [file.lengths for file in files if file.lengths is not None]
    documents = f" in {sum(map(len, known)):,} documents" if len(known) == len(files) else ""
    kinds = ", ".join(dict.fromkeys(file.format for file in files))
    return f"{input_dir}: {tokens:,} tokens{documents}, {len(files)} {kinds} file{'s' * (len(files) > 1)}"


def _other_tokenizer(input_dir: str, own: Tokenizer, given: Tokenizer) -> str:
    remedy = (
        "go on with the checkpoint's own text (same data.input_dir and data.truncate), or start anew with "
        "engine.resume = never"
    )
    if not (isinstance(own, CharacterTokenizer) and isinstance(given, CharacterTokenizer)):
        return f"data.input_dir = '{input_dir}' has another tokenizer than the checkpoint; {remedy}"
    new = sorted(set(own.characters) - set(given.characters))
    absent = sorted(set(given.characters) - set(own.characters))
    differences = [
        f"{title} {', '.join(map(ascii, characters[:8]))}{' and more' if len(characters) > 8 else ''}"
        for title, characters in (("new are", new), ("missing are", absent))
        if characters
    ]
    return (
        f"data.input_dir = '{input_dir}' has {own.vocab_size} different characters, not the {given.vocab_size} of the "
        f"checkpoint's tokenizer: {'; '.join(differences) or 'their order differs'}; {remedy}"
    )


def _and(names: object) -> str:
    return " and ".join(f"'{name}'" for name in names)  # type: ignore[attr-defined]
