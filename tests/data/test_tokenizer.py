import json
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fourfold.data import tokenizer as module
from fourfold.data.tokenizer import CharacterTokenizer, load_tokenizer, save_tokenizer
from fourfold.errors import DataError


@given(st.text(min_size=1))
def test_decoding_undoes_encoding(text: str) -> None:
    tokenizer = CharacterTokenizer.from_text(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.text(min_size=1))
def test_an_id_is_the_place_of_the_character_in_the_sorted_set_of_them(text: str) -> None:
    vocabulary = sorted(set(text))
    assert CharacterTokenizer.from_text(text).encode(text).tolist() == [vocabulary.index(c) for c in text]


def test_a_text_longer_than_a_chunk_is_encoded_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = CharacterTokenizer.from_text("abc")
    whole = tokenizer.encode("abcabcab")
    monkeypatch.setattr(module, "CHUNK_CHARACTERS", 3)
    assert tokenizer.encode("abcabcab").tolist() == whole.tolist()
    with pytest.raises(DataError, match="position 7 "):
        tokenizer.encode("abcabcaXb")


def test_a_small_vocabulary_takes_two_bytes_a_token_and_a_huge_one_four() -> None:
    assert CharacterTokenizer.from_text("abc").encode("abc").dtype == np.uint16
    huge = CharacterTokenizer("".join(map(chr, range(0x10000, 0x10000 + 2**16 + 1))))
    assert huge.encode(huge.characters).tolist() == list(range(2**16 + 1))


def test_a_million_characters_are_encoded_in_a_moment() -> None:
    text = "to be, or not to be: that is the question\n" * 25_000
    tokenizer = CharacterTokenizer.from_text(text)
    began = time.perf_counter()
    tokenizer.encode(text)
    assert time.perf_counter() - began < 1.0  # about 0.01 s; a loop over characters would not make it on a busy machine


@pytest.mark.parametrize("unknown", ["Z", "é", "\U0001f600", "\x01", "\udc80"])
def test_an_unknown_character_is_named_with_its_position_and_a_remedy(unknown: str) -> None:
    with pytest.raises(DataError) as caught:
        CharacterTokenizer.from_text("abc").encode("ab" + unknown)
    sentence = str(caught.value)
    assert f"U+{ord(unknown):04X}" in sentence
    assert "position 2 " in sentence
    assert "remove it" in sentence
    sentence.encode()  # printable on any terminal


def test_decode_takes_lists_arrays_and_tensors() -> None:
    tokenizer = CharacterTokenizer.from_text("abc")
    assert (
        tokenizer.decode([2, 0]) == tokenizer.decode(np.array([2, 0])) == tokenizer.decode(torch.tensor([2, 0])) == "ca"
    )
    assert tokenizer.decode([]) == ""


@pytest.mark.parametrize("token", [-1, 3])
def test_a_token_outside_the_vocabulary_is_refused(token: int) -> None:
    with pytest.raises(DataError, match=f"token {token} is not in this tokenizer's vocabulary of 3 characters"):
        CharacterTokenizer.from_text("abc").decode([0, token])


def test_a_saved_tokenizer_loads_as_its_equal(tmp_path: Path) -> None:
    tokenizer = CharacterTokenizer.from_text('sn\n"é\U0001f600 ')
    save_tokenizer(tokenizer, tmp_path / "tokenizer.json")
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert loaded == tokenizer
    assert loaded.fingerprint == tokenizer.fingerprint
    assert json.loads((tmp_path / "tokenizer.json").read_text())["type"] == "characters"


def test_the_fingerprint_is_the_same_in_every_version() -> None:
    assert CharacterTokenizer.from_text("hello, world").fingerprint == "1919c6ed5fdc39b5"
    assert CharacterTokenizer("ab").fingerprint != CharacterTokenizer("ba").fingerprint


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "No such file"),
        ("{", "is not JSON"),
        ("[1]", "has type None; known types are: characters, bpe, numbers"),
        ('{"type": "bpe2"}', "has type 'bpe2'; known types are: characters, bpe, numbers"),
        ('{"type": ["characters"]}', "known types are: characters, bpe, numbers"),
        ('{"type": "characters"}', "is damaged"),
        ('{"type": "characters", "characters": "aa"}', "distinct characters; it holds 'aa'"),
    ],
)
def test_a_tokenizer_file_that_is_none_is_refused(tmp_path: Path, content: str | None, expected: str) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError) as caught:
        load_tokenizer(path)
    assert expected in str(caught.value)
    assert str(path) in str(caught.value)
