import os
import socket
from pathlib import Path

import numpy as np
import pytest

from fourfold.config.schema import Data
from fourfold.data.bpe import train_bpe
from fourfold.data.corpus import Corpus, load_corpus
from fourfold.data.text import find_text_files, read_text
from fourfold.data.tokenizer import CharacterTokenizer
from fourfold.errors import DataError


def refusal(input_dir: str | Path, truncate: float = 1.0) -> str:
    with pytest.raises(DataError) as caught:
        read_text(str(input_dir), truncate)
    return str(caught.value)


def corpus(path: Path, text: str = "hello, world\n" * 100, **keys: object) -> Corpus:
    path.write_text(text)
    tokenizer = keys.pop("tokenizer", None)
    if "tokenizer_path" in keys:
        keys["tokenizer"] = str(keys.pop("tokenizer_path"))
    data = Data(**{"input_dir": str(path), "max_seq_len": 8, "split": "80,10,10", **keys})
    return load_corpus(data, seed=1, needs_valid=True, tokenizer=tokenizer)  # type: ignore[arg-type]


def test_a_file_is_read_as_it_stands(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("naïve\r\nquestion\n".encode())
    assert read_text(str(tmp_path / "a.txt"), 1.0) == "naïve\r\nquestion\n"


def test_truncate_keeps_the_first_fraction_of_the_characters(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("é" * 5 + "b" * 14)
    assert read_text(str(tmp_path / "a.txt"), 0.5) == "é" * 5 + "b" * 4  # 9.5 characters, rounded down


def test_a_byte_order_mark_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfhello")
    assert read_text(str(tmp_path / "a.txt"), 1.0) == "hello"


def test_a_folder_is_its_text_files_in_sorted_order(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.md", "a.txt", "README", "a/.hidden.txt", ".git/x.txt", "image.png", "B.TXT"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "loop").symlink_to(tmp_path)
    assert read_text(str(tmp_path), 1.0) == "B.TXT\nREADME\na/z.md\na.txt\nb.txt"
    assert [path.name for path in find_text_files(tmp_path)[1]] == ["image.png", "loop"]


def test_the_built_in_corpus_is_a_long_english_text() -> None:
    text = read_text("builtin:pydoc", 1.0)
    assert len(text) > 300_000
    assert "statement" in text
    assert text == read_text("builtin:pydoc", 1.0)


def test_a_missing_file_is_named_with_its_nearest_sibling(tmp_path: Path) -> None:
    (tmp_path / "shakespeare.txt").write_text("x")
    wanted = tmp_path / "shakespear.txt"
    sentence = refusal(wanted)
    assert f"data.input_dir = '{wanted}' does not exist" in sentence
    assert f"did you mean '{tmp_path / 'shakespeare.txt'}'?" in sentence
    assert "give a text file, a folder of text files, token files, or builtin:pydoc" in sentence


def test_a_missing_folder_on_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "corpora").mkdir()
    sentence = refusal(tmp_path / "corpra" / "english" / "a.txt")
    assert f"there is no '{tmp_path / 'corpra'}'" in sentence
    assert f"did you mean '{tmp_path / 'corpora'}'?" in sentence


def test_a_missing_file_without_a_likeness_gets_no_hint(tmp_path: Path) -> None:
    assert "did you mean" not in refusal(tmp_path / "a.txt")
    (tmp_path / "a.txt").write_text("x")
    assert "does not exist" in refusal(tmp_path / "a.txt" / "b.txt")


def test_an_unreadable_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    path.write_text("x")

    def denied(self: Path) -> bytes:  # the file's mode would not do: root reads everything
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_bytes", denied)
    assert f"data.input_dir = '{path}' cannot be read (Permission denied); make it readable" in refusal(path)
    assert f"data.input_dir = '{tmp_path}' cannot be read at '{path}' (Permission denied)" in refusal(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every folder")
def test_an_unreadable_folder_within_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "closed").mkdir(mode=0)
    assert f"cannot be read at '{tmp_path / 'closed'}' (Permission denied)" in refusal(tmp_path)


def test_a_dangling_link_in_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "b.txt").symlink_to(tmp_path / "gone.txt")
    assert f"cannot be read at '{tmp_path / 'b.txt'}' (No such file" in refusal(tmp_path)


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_an_empty_file_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.txt").write_text(content)
    assert f"data.input_dir = '{tmp_path / 'a.txt'}' is empty" in refusal(tmp_path / "a.txt")
    assert f"data.input_dir = '{tmp_path}' is empty" in refusal(tmp_path)


def test_a_folder_without_text_files_is_refused(tmp_path: Path) -> None:
    assert f"data.input_dir = '{tmp_path}' is a folder without a text file; files that count" in refusal(tmp_path)
    (tmp_path / "a.pdf").write_text("x")
    assert "a folder without a text file, only a.pdf; files that count as text end in .md, .py," in refusal(tmp_path)


@pytest.mark.parametrize(
    ("content", "offset", "byte"), [(b"caf\xe9 au lait", 3, "e9"), (b"\xff\xfea\x00", 0, "ff"), (b"ab\x00c", 2, "00")]
)
def test_a_file_that_is_not_utf8_text_is_named_with_the_byte(
    tmp_path: Path, content: bytes, offset: int, byte: str
) -> None:
    path = tmp_path / "b.txt"
    path.write_bytes(content)
    (tmp_path / "a.txt").write_text("fine")
    assert f"data.input_dir = '{path}' is not UTF-8 text: byte {offset} is 0x{byte}; convert it" in refusal(path)
    assert f"data.input_dir = '{tmp_path}': the file '{path}' is not UTF-8 text: byte {offset}" in refusal(tmp_path)


def test_an_unknown_builtin_corpus_is_refused_with_the_known_ones() -> None:
    assert refusal("builtin:shakespeare") == (
        "data.input_dir = 'builtin:shakespeare' is not a built-in corpus; there is: builtin:pydoc"
    )


def test_what_is_neither_file_nor_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path must be short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        assert "data.input_dir = 'socket' is neither a file nor a folder" in refusal("socket")


def test_a_truncation_that_keeps_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc")
    assert "data.truncate = 0.1 keeps none of the 3 characters" in refusal(tmp_path / "a.txt", 0.1)


@pytest.mark.parametrize("unset", [None, ""])
def test_an_input_that_is_not_set_is_refused(unset: str | None) -> None:
    with pytest.raises(DataError, match=r"data\.input_dir is not set; give"):
        load_corpus(Data(input_dir=unset), seed=1, needs_valid=True)


def test_a_corpus_holds_the_text_as_tokens_and_its_samples(tmp_path: Path) -> None:
    found = corpus(tmp_path / "a.txt")
    assert found.tokenizer.decode(found.splits.train.tokens) == "hello, world\n" * 100
    assert "1,300 characters, 10 unique" in found.description
    assert [part.starts[:2].tolist() for part in found.splits] == [[0, 8], [1040, 1048], [1170, 1178]]


def test_the_sample_stride_is_the_sequence_unless_it_is_set(tmp_path: Path) -> None:
    assert np.diff(corpus(tmp_path / "a.txt").splits.train.starts).tolist()[0] == 8
    assert np.diff(corpus(tmp_path / "a.txt", sample_stride=3).splits.train.starts).tolist()[0] == 3


def test_the_fingerprint_changes_with_the_text_and_with_nothing_else(tmp_path: Path) -> None:
    first = corpus(tmp_path / "a.txt")
    assert corpus(tmp_path / "b.txt", split="1,1,1", sample_stride=1).fingerprint == first.fingerprint
    assert corpus(tmp_path / "c.txt", "hello, wolrd\n" * 100).fingerprint != first.fingerprint
    assert corpus(tmp_path / "d.txt", "hello, wOrld\n" * 100).fingerprint != first.fingerprint


def test_files_passed_over_in_a_folder_are_told(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text("{}")
    found = corpus(tmp_path / "a.txt", input_dir=str(tmp_path))
    assert found.passed_over == [tmp_path / "b.jsonl"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt.gz", "a.parquet"])
def test_a_raw_corpus_is_sent_to_be_prepared(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("{}")
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(DataError, match=rf"is a raw corpus, which has to be prepared: fourfold prepare {path} "):
            load_corpus(Data(input_dir=str(path)), seed=1, needs_valid=True)


def test_a_checkpoints_tokenizer_of_the_same_text_is_accepted(tmp_path: Path) -> None:
    tokenizer = CharacterTokenizer.from_text("hello, world\n")
    assert corpus(tmp_path / "a.txt", tokenizer=tokenizer).tokenizer == tokenizer


def test_a_text_with_other_characters_than_the_checkpoints_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        corpus(tmp_path / "a.txt", tokenizer=CharacterTokenizer.from_text("HeLlo, world\n"))
    sentence = str(caught.value)
    assert f"data.input_dir = '{tmp_path / 'a.txt'}' has 10 different characters, not the 11" in sentence
    assert "tokenizer: new are 'h'; missing are 'H', 'L'; go on" in sentence
    assert "engine.resume = never" in sentence


def test_a_vocabulary_in_another_order_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="their order differs"):
        corpus(tmp_path / "a.txt", "ab" * 100, tokenizer=CharacterTokenizer("ba"))


def test_text_may_have_a_tokenizer_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(train_bpe(["hello, world\n"] * 9, 270))
    found = corpus(tmp_path / "a.txt", split="8,1,1", tokenizer_path=tmp_path / "tokenizer.json")
    assert found.tokenizer.decode(found.splits.train.tokens) == "hello, world\n" * 100  # type: ignore[union-attr]
    assert len(found.splits.train.tokens) < 1300  # type: ignore[union-attr]
