"""Text to token ids and back. One tokenizer so far: a character is a token.

A tokenizer travels with a checkpoint as `tokenizer.json`, whose word `type` selects the class from TOKENIZERS. Token
ids are positions in the vocabulary; padding the vocabulary is the model's business, not known here.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from fourfold.errors import DataError

# Characters encoded at a time: bounds the UTF-32 copy to 16 MiB however long the text is.
CHUNK_CHARACTERS = 1 << 22


@dataclass(frozen=True)
class CharacterTokenizer:
    """minGPT's vocabulary: the text's characters in the order of their code points. Equal if the vocabularies are."""

    characters: str

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
        return cls(characters)

    def to_json(self) -> dict[str, Any]:
        return {"type": "characters", "characters": self.characters}

    @property
    def vocab_size(self) -> int:
        return len(self.characters)

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

        ids = np.empty(len(text), dtype=np.uint16 if self.vocab_size <= 1 << 16 else np.int32)
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
        return _code_points(self.characters)[wanted].tobytes().decode("utf-32-le", "surrogatepass")


Tokenizer = CharacterTokenizer  # becomes a union when a second one joins
TOKENIZERS = {"characters": CharacterTokenizer}


def save_tokenizer(tokenizer: Tokenizer, path: str | Path) -> None:
    Path(path).write_text(json.dumps(tokenizer.to_json()) + "\n", encoding="utf-8")


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
    if not isinstance(kind, str) or kind not in TOKENIZERS:
        raise DataError(f"the tokenizer '{path}' has type {_short(kind)}; known types are: {', '.join(TOKENIZERS)}")
    try:
        return TOKENIZERS[kind].from_json(saved)
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
