"""Byte-pair encodings: any Hugging Face tokenizer.json, GPT-2's two files, a tiktoken ranks file, or one trained here.

All of them become one JSON object in Hugging Face's format, which the tokenizers library runs. Each encodes as its own
reference does: GPT-2's and tiktoken's take `<|endoftext|>` in a text for plain characters, a tokenizer.json takes the
special tokens it lists for special.
"""

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from fourfold.errors import DataError

END_OF_TEXT = "<|endoftext|>"
EOS_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[EOS]", "[SEP]")
FILES = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))

# A longer text is encoded in pieces: the library is half as fast again on short ones. Byte-level encodings merge within
# words only, so theirs may be cut after a line end between two letters, and the result is the same; those of others are
# cut only where memory asks for it.
PIECE_CHARACTERS = {True: 1 << 13, False: 1 << 22}
CUT = re.compile(r"(?<=[^\W_]\n)(?=[^\W_])")


class BpeTokenizer:
    """Equal if their JSON is."""

    def __init__(self, saved: dict[str, Any], eos_token: str | None) -> None:
        self._saved, self._eos_token = saved, eos_token
        try:
            self._tokenizer = Tokenizer.from_str(json.dumps(saved))
        except Exception as error:  # the library raises Exception itself
            raise DataError(
                f"it is no tokenizer.json of Hugging Face's ({error}); save it again with save()"
            ) from error
        self._is_byte_level = _is_byte_level(saved, self._tokenizer.pre_tokenizer)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self._vocab_size = max(vocabulary.values(), default=-1) + 1
        self._eos_id = vocabulary.get(eos_token) if eos_token is not None else None
        text = json.dumps(self.to_json(), sort_keys=True)
        self._fingerprint = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> Self:
        if not isinstance(saved.get("tokenizer"), dict):
            raise DataError("a tokenizer of type 'bpe' needs a key 'tokenizer' with Hugging Face's JSON in it")
        return cls(saved["tokenizer"], saved.get("eos_token"))

    def to_json(self) -> dict[str, Any]:
        return {"type": "bpe", "eos_token": self._eos_token, "tokenizer": self._saved}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BpeTokenizer) and self._fingerprint == other._fingerprint

    def __hash__(self) -> int:
        return hash(self._fingerprint)

    def __reduce__(self) -> tuple[Any, ...]:
        return BpeTokenizer, (self._saved, self._eos_token)

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    @property
    def eos_id(self) -> int | None:
        return self._eos_id

    @property
    def dtype(self) -> type[Any]:
        return np.uint16 if self._vocab_size <= 1 << 16 else np.int32

    def encode(self, text: str) -> npt.NDArray[Any]:
        """Token ids, as uint16 where the vocabulary fits it, else int32."""
        pieces = cut_text(text, self._is_byte_level)
        try:
            # of a batch of one, because only batches can leave out what is not asked for here: offsets
            ids = [self._tokenizer.encode_batch_fast([piece], add_special_tokens=False)[0].ids for piece in pieces]
        except TypeError as error:  # so the library says that it is not UTF-8
            place = next(place for place, character in enumerate(text) if "\ud800" <= character <= "\udfff")
            raise DataError(
                f"character {place} of the text is half of a surrogate pair, which is no character; remove it"
            ) from error
        return np.array(ids[0], self.dtype) if len(ids) == 1 else np.concatenate([np.array(i, self.dtype) for i in ids])

    def decode(self, ids: npt.ArrayLike) -> str:
        wanted = np.asarray(ids, dtype=np.int64)
        outside = wanted[(wanted < 0) | (wanted >= self._vocab_size)]
        if len(outside):
            raise DataError(
                f"token {outside[0]} is not in this tokenizer's vocabulary of {self._vocab_size} tokens; "
                "decode with the tokenizer of the checkpoint that made the tokens"
            )
        return self._tokenizer.decode(wanted.tolist(), skip_special_tokens=False)


def cut_text(text: str, is_byte_level: bool) -> list[str]:
    """Pieces of a long text; one without a good place to cut stays whole up to the size that memory allows."""
    size, most = PIECE_CHARACTERS[is_byte_level], PIECE_CHARACTERS[False]
    pieces, first = [], 0
    while len(text) - first > size:
        found = CUT.search(text, first + size // 2, first + most)
        if found is None and len(text) - first <= most:
            break
        end = found.start() if found else first + most
        pieces.append(text[first:end])
        first = end
    return [*pieces, text[first:]]


def _is_byte_level(saved: dict[str, Any], pre_tokenizer: Any) -> bool:
    """GPT-2's way: text is cut into words by a pattern, which ends them with a line, and nothing is changed before or
    added around."""
    outer = saved.get("pre_tokenizer") or {}
    steps = outer.get("pretokenizers", []) if outer.get("type") == "Sequence" else [outer]
    is_plain = all(step.get("type") in ("Split", "ByteLevel") and not step.get("add_prefix_space") for step in steps)
    if saved.get("normalizer") is not None or not is_plain or not steps or steps[-1].get("type") != "ByteLevel":
        return False
    return all(_words(pre_tokenizer, a + b) == _words(pre_tokenizer, a) + _words(pre_tokenizer, b) for a, b in PROBES)


# Both sides of a place where CUT cuts.
PROBES = [(a + "\n", b) for a in ("a", "1", "no 7a", "日", "Ж") for b in ("a", "1", "B c", "日", "ж's")]


def _words(pre_tokenizer: Any, text: str) -> list[str]:
    return [word for word, _ in pre_tokenizer.pre_tokenize_str(text)]


def load_hugging_face(saved: dict[str, Any], beside: Path) -> BpeTokenizer:
    """A tokenizer.json. Its end-of-document token is what a tokenizer_config.json beside it says, or a usual name."""
    special = [each["content"] for each in saved.get("added_tokens") or [] if each.get("special")]
    vocabulary = saved.get("model", {}).get("vocab")
    known = {*special, *(vocabulary if isinstance(vocabulary, dict) else ())}
    eos = _configured_eos(beside)
    if eos not in known:
        eos = next((name for name in EOS_NAMES if name in known), None)
    return BpeTokenizer(saved, eos)


def _configured_eos(beside: Path) -> str | None:
    try:
        eos = json.loads((beside / "tokenizer_config.json").read_text(encoding="utf-8")).get("eos_token")
    except (OSError, ValueError, AttributeError):
        return None
    eos = eos.get("content") if isinstance(eos, dict) else eos
    return eos if isinstance(eos, str) else None


def load_gpt2(vocab: Path, merges: Path) -> BpeTokenizer:
    """vocab.json and merges.txt, or encoder.json and vocab.bpe: the same two files by two names."""
    try:
        ids = json.loads(vocab.read_text(encoding="utf-8"))
        lines = merges.read_text(encoding="utf-8").split("\n")
    except ValueError as error:
        raise DataError(f"the tokenizer '{vocab}' or '{merges}' is not UTF-8 text or not JSON ({error})") from error
    pairs = []
    for number, line in enumerate(lines, start=1):
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        pair = line.rstrip("\r").split(" ")
        if len(pair) != 2 or pair[0] + pair[1] not in ids:
            raise DataError(f"'{merges}', line {number}: {line[:40]!r} is no pair whose union is in '{vocab.name}'")
        pairs.append(pair)
    saved = _bpe_json(ids, pairs, {"type": "ByteLevel", **BYTE_LEVEL, "use_regex": True}, ignore_merges=False)
    return BpeTokenizer(saved, END_OF_TEXT if END_OF_TEXT in ids else None)


class Encoding(NamedTuple):
    """What a ranks file does not say. Known encodings are told by their number of ranks."""

    pattern: str
    eos_token: str
    eos_id: int


GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CL100K_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K_PATTERN = "|".join(
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
ENCODINGS = {
    50256: Encoding(GPT2_PATTERN, END_OF_TEXT, 50256),  # gpt2, r50k_base
    50280: Encoding(GPT2_PATTERN, END_OF_TEXT, 50256),  # p50k_base
    100256: Encoding(CL100K_PATTERN, END_OF_TEXT, 100257),  # cl100k_base
    128000: Encoding(CL100K_PATTERN, "<|end_of_text|>", 128001),  # Llama 3
    199998: Encoding(O200K_PATTERN, END_OF_TEXT, 199999),  # o200k_base
}


def load_ranks(path: Path) -> BpeTokenizer:
    """A tiktoken ranks file: a line per token, its bytes in base64 and its rank. How text is cut into words before
    merging is not in it; for an encoding that is not known here, a file `<name>.pattern` beside it says so."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise DataError(
                f"the tokenizer '{path}', line {number}: {line[:40]!r} is not a token in base64 and its rank; "
                "give a tokenizer.json, a tiktoken ranks file, or a folder with vocab.json and merges.txt"
            ) from None
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise DataError(f"the tokenizer '{path}' has no rank for the byte 0x{missing[0]:02x}; it is not whole")
    given = path.with_name(path.name + ".pattern")
    # p50k's ranks leave out the id of its end-of-text token
    encoding = ENCODINGS.get(len(ranks))
    if given.exists():
        encoding = Encoding(given.read_text(encoding="utf-8").rstrip("\n"), END_OF_TEXT, max(ranks.values()) + 1)
    if encoding is None:
        raise DataError(
            f"the tokenizer '{path}' has {len(ranks)} ranks, which is no encoding known here "
            f"({', '.join(map(str, ENCODINGS))}); write the pattern that cuts its words to '{given.name}' beside it"
        )
    ids = {_as_characters(token): rank for token, rank in ranks.items()}
    ids.setdefault(encoding.eos_token, encoding.eos_id)
    cut = {"type": "Split", "pattern": {"Regex": encoding.pattern}, "behavior": "Isolated", "invert": False}
    pre_tokenizer = {
        "type": "Sequence",
        "pretokenizers": [cut, {"type": "ByteLevel", **BYTE_LEVEL, "use_regex": False}],
    }
    saved = _bpe_json(ids, _merges_of(ranks), pre_tokenizer, ignore_merges=True)
    return BpeTokenizer(saved, encoding.eos_token)


def _merges_of(ranks: dict[bytes, int]) -> list[list[str]]:
    """Every pair of tokens whose union is a token, in the order of the union's rank: what tiktoken merges."""
    pairs = []
    for token, rank in ranks.items():
        for cut in range(1, len(token)):
            left, right = ranks.get(token[:cut]), ranks.get(token[cut:])
            if left is not None and right is not None:
                pairs.append((rank, left, right, token[:cut], token[cut:]))
    return [[_as_characters(left), _as_characters(right)] for _, _, _, left, right in sorted(pairs)]


BYTE_LEVEL = {"add_prefix_space": False, "trim_offsets": True}


def _bpe_json(
    ids: dict[str, int], merges: list[list[str]], pre_tokenizer: dict[str, Any], ignore_merges: bool
) -> dict[str, Any]:
    # every key is written out: the library fills in none, and the fingerprint never moves with its version
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": ignore_merges,
        "vocab": ids,
        "merges": merges,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": {"type": "ByteLevel", **BYTE_LEVEL, "use_regex": True},
        "model": model,
    }


def _byte_characters() -> list[str]:
    """GPT-2's printable character for every byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


_BYTE_CHARACTERS = _byte_characters()


def _as_characters(token: bytes) -> str:
    return "".join(_BYTE_CHARACTERS[byte] for byte in token)


def train_bpe(texts: Iterable[str], vocab_size: int, shows_progress: bool = False) -> str:
    """A byte-level BPE of GPT-2's kind as Hugging Face's JSON, with an end-of-document token as its last id."""
    if vocab_size < 257:
        raise DataError(f"--vocab_size = {vocab_size} is too small for 256 bytes and {END_OF_TEXT}; write 257 or more")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=shows_progress,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer.to_str(pretty=False)
