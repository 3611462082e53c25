"""`fourfold prepare` from raw text to a corpus that trains: every input, any number of workers, any interruption."""

import errno
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from fourfold.cli import app, main
from fourfold.commands.options import screen
from fourfold.config.schema import Data
from fourfold.data import documents as documents_module
from fourfold.data import prepare as prepare_module
from fourfold.data.bpe import train_bpe
from fourfold.data.corpus import load_corpus
from fourfold.data.documents import find_inputs, read_chunks, read_texts
from fourfold.data.formats.find import open_token_files
from fourfold.data.prepare import Options, Tally, prepare, remove_prepared
from fourfold.data.tokenizer import BpeTokenizer, CharacterTokenizer, open_tokenizer
from fourfold.errors import DataError

TEXTS = [topics[name] for name in sorted(topics)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> BpeTokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(train_bpe(TEXTS[:20], 600))
    found = open_tokenizer(str(path))
    assert isinstance(found, BpeTokenizer)
    return found


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents_module, "CHUNK_BYTES", 1 << 14)
    monkeypatch.setattr(documents_module, "PARQUET_ROWS", 7)


def lines(texts: list[str], key: str = "text") -> str:
    return "".join(json.dumps({"id": 1, key: text}) + "\n" for text in texts)


def write(path: Path, texts: list[str]) -> Path:
    """In the form that the name asks for."""
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.table({"id": range(len(texts)), "text": texts}), path, row_group_size=10)
        return path
    data = (lines(texts) if ".jsonl" in path.name else "\n<|end|>\n".join(texts)).encode()
    packed = {".gz": gzip.compress, ".zst": zstandard.compress}.get(path.suffix, bytes)(data)
    path.write_bytes(packed)
    return path


def run(path: Path | list[Path], prefix: Path, tokenizer: Any, **options: Any) -> Tally:
    paths = [str(each) for each in (path if isinstance(path, list) else [path])]
    return prepare(find_inputs(paths), prefix, tokenizer, Options(**options))


def written(prefix: Path) -> list[list[int]]:
    """All documents, as a reader finds them."""
    return [
        part.tolist()
        for file in open_token_files(prefix)
        for part in np.split(file.tokens, np.cumsum(file.lengths)[:-1])  # type: ignore[arg-type]
    ]


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


NAMES = ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.txt", "a.txt.gz", "a.txt.zst", "a.parquet"]


@pytest.mark.parametrize("name", NAMES)
def test_every_kind_of_input_gives_the_same_documents(tmp_path: Path, tokenizer: BpeTokenizer, name: str) -> None:
    texts = [text.strip() for text in TEXTS[:30]]
    run(write(tmp_path / name, texts), tmp_path / "x", tokenizer, separator="<|end|>")
    expected = [tokenizer.encode(text).tolist() for text in texts]
    # in .txt the line end before a separator belongs to the document
    newline = tokenizer.encode("\n").tolist()
    found = [document[:-1] for document in written(tmp_path / "x")]
    if ".txt" in name:
        found = [document[: -len(newline)] if document[-1:] == newline else document for document in found]
        assert [tokenizer.decode(document).strip() for document in found] == texts
    else:
        assert found == expected
    assert all(document[-1] == tokenizer.eos_id for document in written(tmp_path / "x"))


def test_a_text_file_is_one_document_however_long(tmp_path: Path, tokenizer: BpeTokenizer) -> None:
    text = "\n".join(TEXTS[:40])
    (tmp_path / "a.txt").write_text(text)
    tally = run(tmp_path / "a.txt", tmp_path / "x", tokenizer)
    assert tally.documents == 1 and tally.text_bytes == len(text.encode())
    [document] = written(tmp_path / "x")
    assert document == [*tokenizer.encode(text).tolist(), tokenizer.eos_id]


def test_the_manifest_tells_what_there_is(tmp_path: Path, tokenizer: BpeTokenizer) -> None:
    tally = run(write(tmp_path / "a.jsonl", TEXTS), tmp_path / "x", tokenizer, shard_tokens=20_000)
    manifest = json.loads((tmp_path / "x.manifest.json").read_text())
    assert manifest["documents"] == tally.documents == len(TEXTS)
    assert manifest["tokens"] == sum(map(len, written(tmp_path / "x")))
    assert len(manifest["shards"]) == len(tally.shards) > 3
    assert manifest["dtype"] == "uint16"
    assert manifest["tokenizer"]["fingerprint"] == tokenizer.fingerprint
    assert open_tokenizer(str(tmp_path / "x.tokenizer.json")) == tokenizer
    assert not list(tmp_path.glob("*.partial")) and not list(tmp_path.glob("*.progress.json"))


def test_documents_may_end_without_a_token(tmp_path: Path, tokenizer: BpeTokenizer) -> None:
    run(write(tmp_path / "a.jsonl", TEXTS[:3]), tmp_path / "x", tokenizer, append_eos=False)
    assert written(tmp_path / "x") == [tokenizer.encode(text).tolist() for text in TEXTS[:3]]


def test_characters_have_an_end_of_document_of_their_own(tmp_path: Path) -> None:
    tokenizer = CharacterTokenizer("".join(sorted(set("".join(TEXTS[:3])))), has_eos=True)
    run(write(tmp_path / "a.jsonl", TEXTS[:3]), tmp_path / "x", tokenizer)
    assert [tokenizer.decode(document) for document in written(tmp_path / "x")] == TEXTS[:3]
    data = Data(input_dir=str(tmp_path / "x"), max_seq_len=8, reset_position_ids=True)
    corpus = load_corpus(data, 1, needs_valid=False)
    assert corpus.tokenizer == tokenizer and corpus.tokenizer.vocab_size == len(tokenizer.characters) + 1


def test_the_number_of_workers_does_not_matter(tmp_path: Path, tokenizer: BpeTokenizer) -> None:
    source = [write(tmp_path / name, TEXTS) for name in ("a.jsonl.gz", "b.parquet", "c.txt")]
    found = []
    for workers in (1, 2, 3):
        (tmp_path / str(workers)).mkdir()
        run(source, tmp_path / str(workers) / "x", tokenizer, workers=workers, shard_tokens=50_000)
        found.append(content(tmp_path / str(workers)))
    assert found[0] == found[1] == found[2] and len(found[0]) > 8


class Stop(Exception):
    pass


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.zst", "a.txt.gz", "a.parquet"])
def test_a_restart_goes_on_after_the_last_finished_shard(
    tmp_path: Path, tokenizer: BpeTokenizer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = [write(tmp_path / name, TEXTS), write(tmp_path / "z.jsonl", TEXTS[:9])]
    options = {"shard_tokens": 15_000, "separator": "<|end|>"}
    (tmp_path / "whole").mkdir()
    tally = run(source, tmp_path / "whole" / "x", tokenizer, **options)
    assert len(tally.shards) >= 5
    encoded: list[int] = []
    encode = prepare_module.encode_chunk

    def interrupted(*args: Any) -> Any:
        encoded.append(1)
        if len(encoded) % 7 == 0:
            raise Stop
        return encode(*args)

    monkeypatch.setattr(prepare_module, "encode_chunk", interrupted)
    (tmp_path / "parts").mkdir()
    stops = 0
    while True:
        try:
            run(source, tmp_path / "parts" / "x", tokenizer, **options)
            break
        except Stop:
            stops += 1
            with pytest.raises(DataError, match=r"is not complete.*run the same `fourfold prepare` again"):
                open_token_files(tmp_path / "parts")
    assert stops
    monkeypatch.setattr(prepare_module, "encode_chunk", None)  # nothing is left to do
    run(source, tmp_path / "parts" / "x", tokenizer, **options)
    assert content(tmp_path / "parts") == content(tmp_path / "whole")


def test_other_settings_under_the_same_prefix_are_refused(tmp_path: Path, tokenizer: BpeTokenizer) -> None:
    source = write(tmp_path / "a.jsonl", TEXTS)
    run(source, tmp_path / "x", tokenizer)
    with pytest.raises(DataError, match=r"is of other settings \(append_eos\); write another --output_prefix"):
        run(source, tmp_path / "x", tokenizer, append_eos=False)
    write(source, TEXTS[:5])
    with pytest.raises(DataError, match=r"other settings \(inputs\)"):
        run(source, tmp_path / "x", tokenizer)


BAD: dict[str, tuple[bytes, str]] = {
    "not JSON": (b"{broken\n", "line 3: it is not JSON"),
    "no object": (b"[1]\n", "line 3: it is not a JSON object"),
    "no key": (b'{"txt": "a"}\n', "line 3: the key 'text' is missing; there is txt"),
    "no text": (b'{"text": 5}\n', "line 3: 'text' is int, not text"),
    "empty": (b'{"text": ""}\n', "line 3: the document is empty"),
    "blank": (b'{"text": " \\n"}\n', "line 3: the document is empty"),
    "not UTF-8": (b'{"text": "caf\xe9"}\n', "line 3: byte 13 of the line is 0xe9, which is not UTF-8"),
    "half a pair": (b'{"text": "a\\ud800"}\n', "line 3: the text holds half of a surrogate pair (its character 1)"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_line_is_named_and_can_be_passed_over(tmp_path: Path, tokenizer: BpeTokenizer, kind: str) -> None:
    line, expected = BAD[kind]
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(TEXTS[:2]).encode() + line + b"\n" + lines(TEXTS[2:4]).encode() + line)
    with pytest.raises(DataError) as caught:
        run(path, tmp_path / "x", tokenizer)
    assert f"'{path}', {expected}" in str(caught.value) and "--skip_bad N" in str(caught.value)
    with pytest.raises(DataError, match=r"line 7: .*\(1 were passed over before it\)"):
        run(path, tmp_path / "x", tokenizer, skip_bad=1)
    assert not (tmp_path / "x.manifest.json").exists()
    tally = run(path, tmp_path / "x", tokenizer, skip_bad=2)
    assert (tally.documents, tally.skipped.total(), len(tally.skipped)) == (4, 2, 1)
    assert [document[:-1] for document in written(tmp_path / "x")] == [tokenizer.encode(t).tolist() for t in TEXTS[:4]]


def test_half_a_surrogate_pair_is_refused_whatever_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(lines(["ab"]) + '{"text": "b\\ud83d"}\n{"text": "\\ud83d\\ude00 a"}\n{"text": "\\ude00"}\n')
    characters = CharacterTokenizer(" ab😀", has_eos=True)
    with pytest.raises(DataError, match=r"a.jsonl', line 2: the text holds half of a surrogate pair"):
        run(path, tmp_path / "x", characters)
    tally = run(path, tmp_path / "x", characters, skip_bad=2)
    assert tally.documents == 2 and tally.skipped == {"the text holds half of a surrogate pair": 2}
    with pytest.raises(DataError, match=r"a.jsonl', line 2: the text holds half of a surrogate pair"):
        train_bpe(read_texts(find_inputs([str(path)]), "text", None), 300)


def test_rows_that_are_no_text_are_named(tmp_path: Path, tokenizer: BpeTokenizer) -> None:
    for value, kind in ((5, "int"), (b"a", "bytes"), (None, "NoneType")):
        path = tmp_path / f"{kind}.parquet"
        parquet.write_table(pyarrow.table({"text": [value] * 9}), path)
        with pytest.raises(DataError, match=f"{kind}.parquet', row 1: 'text' is {kind}, not text"):
            run(path, tmp_path / kind, tokenizer)
        good = write(tmp_path / "a.jsonl", TEXTS[:1])
        assert run([path, good], tmp_path / kind, tokenizer, skip_bad=9).skipped.total() == 9


def test_overwriting_spares_the_files_of_others(tmp_path: Path, tokenizer: BpeTokenizer) -> None:
    source = write(tmp_path / "data-train.jsonl", TEXTS[:5])
    others = ["data-00000.txt", "data-extra.tokens.npy", "xdata-00000.tokens.npy", "data-00000.tokens.npy.old"]
    for name in others:
        (tmp_path / name).write_text("mine")
    run(source, tmp_path / "data", tokenizer)
    (tmp_path / "data-00001.tokens.npy.partial").write_text("")
    remove_prepared(tmp_path / "data")
    assert {path.name for path in tmp_path.iterdir()} == {*others, source.name}


def test_a_folder_may_hold_the_output_too(tmp_path: Path, tokenizer: BpeTokenizer) -> None:
    write(tmp_path / "a.jsonl.gz", TEXTS[:5])
    write(tmp_path / "b.parquet", TEXTS[:5])
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "README.md").write_text("about")
    for _ in range(2):
        assert run(tmp_path, tmp_path / "x", tokenizer).documents == 10
    assert [each.path.name for each in find_inputs([str(tmp_path)])] == ["a.jsonl.gz", "b.parquet"]
    assert find_inputs([str(tmp_path / "README.md")])[0].kind == "text"


@pytest.mark.parametrize("middle", ["\n\u3000", "\u2003\n", "\n/", "\u2003\u2003", "\n\n\n"])
def test_a_piece_of_text_never_ends_where_a_token_may_go_on(middle: str) -> None:
    data = ("é" * 400 + middle * 30).encode()
    for end in range(len(data) - 90, len(data)):
        cut, _, is_end = documents_module._cut(data[:end], None, is_last=False)
        before, after = data[:cut].decode(), data[cut:].decode()  # neither is half a character
        assert not is_end and not after[0].isspace() and after[0] != "/" and before[-1] in "é\n"


def test_a_bad_text_file_is_passed_over_whole(tmp_path: Path, tokenizer: BpeTokenizer) -> None:
    """Though pieces of it were written before the bad byte came."""
    long = "\n".join(TEXTS[:20]).encode()
    (tmp_path / "a.txt").write_bytes(b"first\n")
    (tmp_path / "b.txt").write_bytes(long + b"\xff" + long)
    (tmp_path / "c.txt").write_bytes(b"")
    (tmp_path / "d.txt").write_bytes(b"ab\0c")
    (tmp_path / "e.txt").write_bytes(b"last\n")
    with pytest.raises(DataError, match=f"b.txt', line {long.count(bytes([10])) + 1}: byte .* is 0xff"):
        run(tmp_path, tmp_path / "out" / "x", tokenizer)
    tally = run([tmp_path / f"{name}.txt" for name in "abcde"], tmp_path / "y", tokenizer, skip_bad=3)
    assert [tokenizer.decode(document[:-1]) for document in written(tmp_path / "y")] == ["first\n", "last\n"]
    assert tally.skipped.total() == 3


def test_damaged_and_foreign_inputs_are_refused(tmp_path: Path, tokenizer: BpeTokenizer) -> None:
    cases = {
        "a.jsonl.gz": (gzip.compress(lines(TEXTS).encode())[:-900], "is truncated or damaged"),
        "b.jsonl.zst": (zstandard.compress(lines(TEXTS).encode())[:-900], "is truncated or damaged"),
        "c.jsonl.gz": (b"plain", "cannot be read (Not a gzipped file"),
        "d.jsonl.zst": (b"plain", "is truncated or damaged"),
        "e.parquet": (b"plain", "is truncated or no parquet file"),
        "f.pdf": (b"x", "is not of a kind that is read"),
    }
    for name, (data, expected) in cases.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(DataError) as caught:
            run(tmp_path / name, tmp_path / f"x{name}", tokenizer)
        assert expected in str(caught.value) and name in str(caught.value)
    parquet.write_table(pyarrow.table({"body": ["a"]}), tmp_path / "g.parquet")
    with pytest.raises(DataError, match="has no column 'text'; it has body"):
        run(tmp_path / "g.parquet", tmp_path / "xg", tokenizer)
    with pytest.raises(DataError, match="does not exist"):
        find_inputs([str(tmp_path / "nowhere")])
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="is a folder without a corpus file"):
        find_inputs([str(tmp_path / "empty")])


def test_a_line_without_end_is_refused_before_it_fills_the_memory(
    tmp_path: Path, tokenizer: BpeTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents_module, "LONGEST_LINE", 1 << 16)
    (tmp_path / "a.jsonl").write_text(lines(["a"]) + "x" * (1 << 18))
    with pytest.raises(DataError, match=r"a.jsonl', line 2: the line is longer than"):
        run(tmp_path / "a.jsonl", tmp_path / "x", tokenizer)


def test_a_full_disk_is_told_and_leaves_nothing_that_looks_complete(
    tmp_path: Path, tokenizer: BpeTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "a.jsonl", TEXTS)
    room = [2]

    def full(descriptor: int) -> None:
        room[0] -= 1
        if room[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match=r"cannot be written \(No space left on device\); free some space"):
        run(source, tmp_path / "out" / "x", tokenizer, shard_tokens=15_000)
    with pytest.raises(DataError, match="is not complete"):
        open_token_files(tmp_path / "out")
    monkeypatch.undo()
    run(source, tmp_path / "out" / "x", tokenizer, shard_tokens=15_000)
    assert len(written(tmp_path / "out" / "x")) == len(TEXTS)


def test_a_tampered_shard_is_refused(tmp_path: Path, tokenizer: BpeTokenizer) -> None:
    run(write(tmp_path / "a.jsonl", TEXTS), tmp_path / "x", tokenizer)
    path = tmp_path / "x-00000.tokens.npy"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"is truncated or no \.npy file"):
        open_token_files(tmp_path / "x")
    np.save(path, np.zeros(10, np.uint16))
    with pytest.raises(DataError, match="holds 10 tokens in"):
        open_token_files(tmp_path / "x")


@pytest.mark.parametrize("name", NAMES)
def test_chunks_from_any_place_are_the_rest_of_all_chunks(tmp_path: Path, name: str) -> None:
    inputs = find_inputs([str(write(tmp_path / name, TEXTS)), str(write(tmp_path / "b.txt", TEXTS))])
    whole = list(read_chunks(inputs, "text", "<|end|>"))
    assert len(whole) > 10
    for place in (0, 4, len(whole) - 2):
        assert list(read_chunks(inputs, "text", "<|end|>", whole[place].end)) == whole[place + 1 :]


# The command


def fourfold(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fourfold", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, env=environment())


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A corpus that the commands have prepared with a tokenizer that they have trained."""
    path = tmp_path_factory.mktemp("command")
    write(path / "a.jsonl.gz", TEXTS * 3)
    trained = fourfold(
        "tokenizer", "train", "a.jsonl.gz", "--vocab_size", 500, "--output", "t/tokenizer.json", cwd=path
    )
    assert trained.returncode == 0, trained.stderr
    assert "500 tokens, the last of them ends a document" in trained.stdout
    arguments = ["a.jsonl.gz", "--output_prefix", "out/x", "--tokenizer", "t", "--workers", 2]
    done = fourfold("prepare", *arguments, cwd=path)
    assert done.returncode == 0, done.stderr
    assert f"{3 * len(TEXTS)} documents" in done.stdout and "0 skipped" in done.stdout
    yield path


def test_a_killed_command_goes_on_when_it_is_run_again(folder: Path, tmp_path: Path) -> None:
    arguments = [folder / "a.jsonl.gz", "--tokenizer", folder / "t", "--shard_tokens", 40_000, "--workers", 2]
    command = [
        sys.executable,
        "-m",
        "fourfold",
        "prepare",
        *map(str, arguments),
        "--output_prefix",
        str(tmp_path / "x"),
    ]
    process = subprocess.Popen(command, env=environment(), start_new_session=True)
    deadline = time.monotonic() + 60
    while not (tmp_path / "x-00001.tokens.npy").exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    done = fourfold(*command[3:], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert written(tmp_path / "x") == written(folder / "out" / "x")


def test_inspect_shows_counts_lengths_samples_and_the_rows_of_a_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    keys = ["--max_seq_len", "16", "--global_batch_size", "3", "--seed", "7"]
    with screen.capture() as shown:
        app(["data", "inspect", "out/x", "--max_seq_len", "64", "--samples", "2"], standalone_mode=False)
    for expected in ("tokens in", "documents of", "train", "sample 1", "####"):
        assert expected in shown.get()
    with screen.capture() as shown:
        app(["data", "inspect", "out/x", *keys, "--step", "9", "--width", "9999"], standalone_mode=False)
    data = Data(input_dir=str(folder / "out" / "x"), max_seq_len=16)
    source = load_corpus(data, 7, needs_valid=False).splits.train
    for row in source.train(np.arange(24, 27)).tokens_bs:
        assert " ".join(map(str, row.tolist())) in shown.get()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["prepare", "nowhere", "--output_prefix", "y", "--tokenizer", "t"], "'nowhere' does not exist"),
        (["prepare", "a.jsonl.gz", "--output_prefix", "out", "--tokenizer", "t"], "--output_prefix = out is a folder"),
        (["data", "inspect", "nowhere"], "'nowhere' does not exist"),
        (["tokenizer", "train", "a.jsonl.gz", "--vocab_size", "9"], "--vocab_size = 9 is too small"),
    ],
)
def test_mistakes_are_sentences_and_end_with_code_2(
    folder: Path,
    arguments: list[str],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["fourfold", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert expected in capsys.readouterr().err
