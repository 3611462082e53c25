"""Text to token ids and back: a character is a token, a byte-pair encoding (bpe.py), or numbers as they are.

A tokenizer travels with a checkpoint as `tokenizer.json`, whose word `type` selects the class from TOKENIZERS. Token
ids are positions in the vocabulary; padding the vocabulary is the model's business, not known here.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from fourfold.data.bpe import FILES, BpeTokenizer, load_gpt2, load_hugging_face, load_ranks
from fourfold.errors import DataError

# Characters encoded at a time: bounds the UTF-32 copy to 16 MiB however long the text is.
CHUNK_CHARACTERS = 1 << 22


@dataclass(frozen=True)
class CharacterTokenizer:
    """minGPT's vocabulary: the text's characters in the order of their code points. Equal if the vocabularies are."""

    characters: str
    has_eos: bool = False
    """One id more than there are characters, for the end of a document; it decodes to nothing."""

    @classmethod
    def from_text(cls, text: str) -> Self:
        return cls("".join(sorted(set(text))))

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> Self:
        characters = saved.get("characters")
        if not isinstance(characters, str) or not characters or len(set(characters)) != len(characters):
            raise DataError(
                "a tokenizer of type 'characters' needs a key 'characters' that holds a string of distinct characters; "
                f"it holds {_short(characters)}; take the tokenizer.json of an intact checkpoint"
            )
        return cls(characters, saved.get("has_eos") is True)

    def to_json(self) -> dict[str, Any]:
        return {"type": "characters", "characters": self.characters, **({"has_eos": True} if self.has_eos else {})}

    @property
    def vocab_size(self) -> int:
        return len(self.characters) + self.has_eos

    @property
    def eos_id(self) -> int | None:
        return len(self.characters) if self.has_eos else None

    @property
    def dtype(self) -> type[Any]:
        return np.uint16 if self.vocab_size <= 1 << 16 else np.int32

    @property
    def fingerprint(self) -> str:
        """The same 16 hex digits for the same vocabulary, on every machine and in every version."""
        return hashlib.blake2b(json.dumps(self.to_json(), sort_keys=True).encode(), digest_size=8).hexdigest()

    def encode(self, text: str) -> npt.NDArray[Any]:
        """Token ids, as uint16 where the vocabulary fits it, else int32."""
        vocabulary = _code_points(self.characters)
        # One slot more than the largest code point: the slot where every code point beyond it lands, as unknown.
        id_of = np.full(int(vocabulary.max(initial=0)) + 2, -1, dtype=np.int32)
        id_of[vocabulary] = np.arange(len(vocabulary), dtype=np.int32)

        ids = np.empty(len(text), dtype=self.dtype)
        for first in range(0, len(text), CHUNK_CHARACTERS):
            codes = _code_points(text[first : first + CHUNK_CHARACTERS])
            chunk = id_of[np.minimum(codes, len(id_of) - 1)]
            if chunk.min() < 0:
                raise DataError(_unknown_character(text, first + int(np.argmin(chunk)), self.vocab_size))
            ids[first : first + len(chunk)] = chunk
        return ids

    def decode(self, ids: npt.ArrayLike) -> str:
        wanted = np.asarray(ids, dtype=np.int64)
        outside = wanted[(wanted < 0) | (wanted >= self.vocab_size)]
        if len(outside):
            raise DataError(
                f"token {outside[0]} is not in this tokenizer's vocabulary of {self.vocab_size} characters; "
                "decode with the tokenizer.json of the checkpoint that made the tokens"
            )
        wanted = wanted[wanted < len(self.characters)]
        return _code_points(self.characters)[wanted].tobytes().decode("utf-32-le", "surrogatepass")


@dataclass(frozen=True)
class NumberTokenizer:
    """For token files that came without a tokenizer: a token's text is its number."""

    vocab_size: int

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> Self:
        size = saved.get("vocab_size")
        if not isinstance(size, int) or size < 1:
            raise DataError(f"a tokenizer of type 'numbers' needs a vocab_size of 1 or more; it holds {_short(size)}")
        return cls(size)

    def to_json(self) -> dict[str, Any]:
        return {"type": "numbers", "vocab_size": self.vocab_size}

    @property
    def fingerprint(self) -> str:
        return hashlib.blake2b(json.dumps(self.to_json(), sort_keys=True).encode(), digest_size=8).hexdigest()

    @property
    def eos_id(self) -> int | None:
        return None

    @property
    def dtype(self) -> type[Any]:
        return np.uint16 if self.vocab_size <= 1 << 16 else np.int32

    def encode(self, text: str) -> npt.NDArray[Any]:
        words = text.split()
        wrong = next((word for word in words if not word.isdecimal() or int(word) >= self.vocab_size), None)
        if wrong is not None:
            raise DataError(
                f"{_short(wrong)} is no token number below {self.vocab_size}; this model was trained on token files "
                "without a tokenizer, so write numbers with spaces between them"
            )
        return np.array([int(word) for word in words], dtype=self.dtype)

    def decode(self, ids: npt.ArrayLike) -> str:
        return "".join(f"{token} " for token in np.asarray(ids, dtype=np.int64).tolist())


Tokenizer = CharacterTokenizer | BpeTokenizer | NumberTokenizer
TOKENIZERS: dict[str, type[CharacterTokenizer] | type[BpeTokenizer] | type[NumberTokenizer]] = {
    "characters": CharacterTokenizer,
    "bpe": BpeTokenizer,
    "numbers": NumberTokenizer,
}


def decode_stream(tokenizer: Tokenizer, tokens: Iterable[int]) -> Iterator[str]:
    """Text as soon as it is certain: a character's bytes may lie in several tokens."""
    waiting: list[int] = []
    for token in tokens:
        waiting.append(token)
        text = tokenizer.decode(waiting)
        # four tokens hold the longest character; whatever is still broken then stays so
        if not text.endswith("\N{REPLACEMENT CHARACTER}") or len(waiting) > 4:
            yield text
            waiting.clear()
    if waiting:
        yield tokenizer.decode(waiting)


def save_tokenizer(tokenizer: Tokenizer, path: str | Path) -> None:
    Path(path).write_text(json.dumps(tokenizer.to_json()) + "\n", encoding="utf-8")


def open_tokenizer(name: str) -> Tokenizer:
    """From a path: a tokenizer.json (ours or Hugging Face's), a tiktoken ranks file, or a folder with one of them or
    with GPT-2's two files."""
    path = Path(name)
    if not path.exists():
        raise DataError(
            f"the tokenizer '{name}' does not exist; give `characters`, a tokenizer.json, a tiktoken ranks file, or a "
            "folder with vocab.json and merges.txt"
        )
    if path.name in ("vocab.json", "encoder.json", "merges.txt", "vocab.bpe"):
        path = path.parent
    try:
        if path.is_dir():
            return _open_folder(path)
        return load_tokenizer(path) if path.suffix == ".json" else load_ranks(path)
    except OSError as error:
        raise DataError(f"the tokenizer '{name}' cannot be read ({error.strerror}); check its permissions") from error


def _open_folder(folder: Path) -> Tokenizer:
    if (folder / "tokenizer.json").exists():
        return load_tokenizer(folder / "tokenizer.json")
    for vocab, merges in FILES:
        if (folder / vocab).exists() and (folder / merges).exists():
            return load_gpt2(folder / vocab, folder / merges)
    ranks = sorted(folder.glob("*.tiktoken"))
    if len(ranks) == 1:
        return load_ranks(ranks[0])
    raise DataError(
        f"the tokenizer '{folder}' is a folder without tokenizer.json, without vocab.json and merges.txt, without "
        "encoder.json and vocab.bpe, and without one .tiktoken file; give a folder that has one of these"
    )


def load_tokenizer(path: str | Path) -> Tokenizer:
    try:
        saved = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(
            f"the tokenizer '{path}' cannot be read ({error.strerror}); every checkpoint holds one as tokenizer.json"
        ) from error
    except ValueError as error:
        raise DataError(
            f"the tokenizer '{path}' is not JSON ({error}); take the tokenizer.json of an intact checkpoint"
        ) from error
    kind = saved.get("type") if isinstance(saved, dict) else None
    is_hugging_face = isinstance(saved, dict) and kind is None and isinstance(saved.get("model"), dict)
    if not is_hugging_face and (not isinstance(kind, str) or kind not in TOKENIZERS):
        raise DataError(f"the tokenizer '{path}' has type {_short(kind)}; known types are: {', '.join(TOKENIZERS)}")
    try:
        return (
            load_hugging_face(saved, Path(path).parent) if is_hugging_face else TOKENIZERS[str(kind)].from_json(saved)
        )
    except DataError as error:
        raise DataError(f"the tokenizer '{path}' is damaged: {error}") from error


def _code_points(text: str) -> npt.NDArray[np.uint32]:
    # surrogatepass: a terminal can hand in half a surrogate pair; it is then an unknown character, not a crash.
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")


def _unknown_character(text: str, position: int, vocab_size: int) -> str:
    character = text[position]
    return (
        f"character {ascii(character) if not character.isprintable() else repr(character)} (U+{ord(character):04X}) at "
        f"position {position} of the text is not in the tokenizer's vocabulary of {vocab_size} characters; "
        "remove it from the text, or train on a text that contains it"
    )


def _short(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 40 else text[:40] + "..."
