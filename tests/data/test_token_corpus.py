"""Corpora of token files: splitting, tokenizers beside the data, blends, and all that can be wrong with them."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fourfold.config.load import load_config
from fourfold.config.schema import Data
from fourfold.data.bpe import train_bpe
from fourfold.data.corpus import Corpus, load_corpus
from fourfold.data.loader import TrainLoader
from fourfold.data.source import Blend, Documents
from fourfold.data.tokenizer import NumberTokenizer
from fourfold.errors import ConfigError, DataError
from tests.tiny import run_training, tiny_config


def write_paddle(prefix: Path, lengths: list[int], first: int = 0, vocab: int = 100) -> Path:
    ids = (np.arange(sum(lengths)) + first) % vocab
    np.save(f"{prefix}_ids.npy", ids.astype(np.uint16))
    docs = np.arange(len(lengths) + 1, dtype=np.int64)
    np.savez(f"{prefix}_idx.npz", lens=np.array(lengths, np.int32), docs=docs)
    return prefix


def corpus(path: Any, needs_valid: bool = True, vocab_size: Any = 100, **keys: Any) -> Corpus:
    found = dict(path) if isinstance(path, dict) else str(path)
    data = Data(**{"input_dir": found, "max_seq_len": 4, "split": "80,10,10", **keys})
    return load_corpus(data, seed=1, needs_valid=needs_valid, vocab_size=vocab_size)


def refusal(path: Any, **keys: Any) -> str:
    with pytest.raises(DataError) as caught:
        corpus(path, **keys)
    return str(caught.value)


def lengths_of(found: Corpus) -> list[list[int]]:
    return [part.part.lengths.tolist() for part in found.splits if isinstance(part, Documents)]


def test_documents_are_split_by_their_number(tmp_path: Path) -> None:
    found = corpus(write_paddle(tmp_path / "x", [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]))
    assert lengths_of(found) == [[5, 6, 7, 8, 9, 10, 11, 12], [13], [14]]
    assert found.description.endswith("95 tokens in 10 documents, 1 paddle file")


def test_the_documents_of_all_files_of_a_folder_are_split_together(tmp_path: Path) -> None:
    write_paddle(tmp_path / "a", [5] * 5)
    write_paddle(tmp_path / "b", [6] * 5)
    assert lengths_of(corpus(tmp_path)) == [[5] * 5 + [6] * 3, [6], [6]]


def test_a_flat_file_is_split_by_position_unless_a_token_ends_its_documents(tmp_path: Path) -> None:
    (np.arange(100) % 10).astype(np.uint16).tofile(tmp_path / "x.bin")
    assert lengths_of(corpus(tmp_path / "x.bin")) == [[80], [10], [10]]
    assert lengths_of(corpus(tmp_path / "x.bin", eos_token_id=9)) == [[10] * 8, [10], [10]]


def test_files_are_dealt_by_their_names_if_asked(tmp_path: Path) -> None:
    for name, size in (("train_01", 50), ("train_02", 20), ("val", 30)):
        np.zeros(size, np.uint16).tofile(tmp_path / f"{name}.bin")
    found = corpus(tmp_path, split_by="file")
    assert lengths_of(found) == [[50, 20], [30], []]
    np.zeros(9, np.uint16).tofile(tmp_path / "other.bin")
    assert "cannot tell which part" in refusal(tmp_path, split_by="file")


def test_token_files_without_a_tokenizer_need_a_vocabulary(tmp_path: Path) -> None:
    path = write_paddle(tmp_path / "x", [20] * 10)
    assert "model.vocab_size = auto cannot be known" in refusal(path, vocab_size="auto")
    assert corpus(path).tokenizer == NumberTokenizer(100)


def test_a_tokenizer_beside_the_data_is_found(tmp_path: Path) -> None:
    path = write_paddle(tmp_path / "x", [20] * 10)
    (tmp_path / "tokenizer.json").write_text(train_bpe(["hello world"], 300))
    found = corpus(path, vocab_size="auto")
    assert found.tokenizer.vocab_size >= 257 and found.tokenizer.eos_id is not None


def test_a_token_beyond_the_vocabulary_is_refused_before_the_first_step(tmp_path: Path) -> None:
    path = write_paddle(tmp_path / "x", [20] * 10)
    assert "x_ids.npy': token 50 is 50, which is not in the vocabulary of 50 tokens" in refusal(path, vocab_size=50)


def test_a_token_that_the_first_look_missed_is_refused_when_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fourfold.data.corpus.LOOK", 1)
    ids = np.zeros(5000, np.uint16)
    ids[1234] = 777
    ids.tofile(tmp_path / "x.bin")
    found = corpus(tmp_path / "x.bin")
    with (
        TrainLoader(found.splits.train, 1, 8, range(8)) as loader,
        pytest.raises(DataError, match="token 1,234 is 777"),
    ):
        for _ in range(200):
            loader.next_batch()


def test_ids_that_wrapped_at_16_bits_are_told(tmp_path: Path) -> None:
    write_paddle(tmp_path / "x", [20] * 10)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"type": "numbers", "vocab_size": 70000}))
    assert "holds uint16 tokens, but its tokenizer has 70000" in refusal(tmp_path / "x", vocab_size="auto")


def test_a_corpus_too_small_for_one_validation_sample_is_refused(tmp_path: Path) -> None:
    path = write_paddle(tmp_path / "x", [20] * 9 + [3])
    sentence = refusal(path, split="9,1,0")
    assert "validation gets 3 of its 183 tokens by data.split = 9,1,0" in sentence and "needs 5" in sentence
    assert "engine.eval_iters = 0" in sentence
    assert len(corpus(path, split="9,1,0", needs_valid=False).splits.train) == 44
    assert "training gets 0 of its 183" in refusal(path, split="0.01,9,1")


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"split_by": "window"}, "data.split_by = window is for text"),
        ({"truncate": 0.5}, "data.truncate = 0.5 is for text"),
        ({"sample_stride": 3}, "data.sample_stride = 3 is for text"),
        ({"tokenizer": "characters"}, "data.tokenizer = characters is for text"),
        ({"tokenizer": "nowhere.json"}, "the tokenizer 'nowhere.json' does not exist"),
        ({"input_dir": "nowhere"}, "'nowhere' does not exist"),
    ],
)
def test_keys_that_do_not_suit_token_files_are_refused(tmp_path: Path, keys: dict[str, Any], expected: str) -> None:
    assert expected in refusal(write_paddle(tmp_path / "x", [20] * 10), **keys)


def test_boundaries_need_to_know_where_documents_end(tmp_path: Path) -> None:
    (np.arange(100) % 10).astype(np.uint16).tofile(tmp_path / "x.bin")
    assert "data.reset_attention_mask = true needs to know" in refusal(tmp_path / "x.bin", reset_attention_mask=True)
    corpus(tmp_path / "x.bin", reset_attention_mask=True, eos_token_id=7)
    corpus(write_paddle(tmp_path / "y", [20] * 10), eod_mask_loss=True)


def test_a_blend_takes_its_shares(tmp_path: Path) -> None:
    a, b = write_paddle(tmp_path / "a", [20] * 10, vocab=10), write_paddle(tmp_path / "b", [20] * 30)
    found = corpus({str(a): 0.7, str(b): 0.3})
    assert isinstance(found.splits.train, Blend)
    assert found.splits.train.passes.samples(1) == 39 + 119
    members, _ = found.splits.train.members_of(np.arange(100))
    assert np.bincount(members).tolist() == [70, 30]
    assert "70.0% " in found.description


def test_mixed_tokenizers_are_refused(tmp_path: Path) -> None:
    for name, text in (("a", "hello world"), ("b", "other words")):
        (tmp_path / name).mkdir()
        write_paddle(tmp_path / name / "x", [20] * 10)
        (tmp_path / name / "tokenizer.json").write_text(train_bpe([text] * 9, 300))
    path = {str(tmp_path / "a"): 1.0, str(tmp_path / "b"): 1.0}
    assert "mixes tokenizers" in refusal(path, vocab_size="auto")
    (tmp_path / "t.txt").write_text("text")
    assert "which is not token files; prepare it first" in refusal({str(tmp_path / "t.txt"): 1.0})


def test_a_blend_is_written_in_yaml_and_as_a_flag(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("data:\n  input_dir: {a: 0.7, b: 3}\n")
    assert load_config(tmp_path / "c.yaml").data.input_dir == {"a": 0.7, "b": 3.0}
    assert load_config(None, [("input_dir", "{x/a: 0.5, x/b: 1}")]).data.input_dir == {"x/a": 0.5, "x/b": 1.0}
    for wrong in ("{a: -1}", "{a: b}", "{a: 1, a: 2}", "{a: [1}"):
        with pytest.raises(ConfigError):
            load_config(None, [("input_dir", wrong)])


def test_the_fingerprint_changes_with_tokens_documents_and_weights(tmp_path: Path) -> None:
    paths = [
        write_paddle(tmp_path / "a", [20] * 10),
        write_paddle(tmp_path / "b", [20] * 10, first=1),
        write_paddle(tmp_path / "c", [10] * 20),
    ]
    found = [corpus(path).fingerprint for path in paths]
    found += [corpus({str(paths[0]): share, str(paths[1]): 1.0}).fingerprint for share in (1.0, 2.0)]
    assert all(one != other for one, other in itertools.combinations(found, 2))
    assert corpus(paths[0], split="1,1,1", max_seq_len=3).fingerprint == found[0]


@pytest.mark.parametrize("workers", [0, 3])
@pytest.mark.parametrize("ranks", [1, 4])
def test_batches_are_the_same_for_any_workers_ranks_and_restarts(tmp_path: Path, workers: int, ranks: int) -> None:
    a, b = write_paddle(tmp_path / "a", [7, 20, 3] * 9), write_paddle(tmp_path / "b", [20] * 30)
    source = corpus({str(a): 0.7, str(b): 0.3}).splits.train
    with TrainLoader(source, 1, 8, range(8), num_workers=1) as loader:
        whole = [loader.next_batch().tokens_bt for _ in range(60)]
    fresh = corpus({str(a): 0.7, str(b): 0.3}).splits.train
    for rank in range(ranks):
        rows = range(rank * 8 // ranks, (rank + 1) * 8 // ranks)
        with TrainLoader(fresh, 1, 8, rows, first_step=25, num_workers=workers) as loader:
            for step in range(25, 60):
                assert loader.next_batch().tokens_bt.tolist() == whole[step][rows.start : rows.stop].tolist()


def test_a_run_on_token_files_learns_saves_and_goes_on_with_the_same_losses(tmp_path: Path) -> None:
    write_paddle(tmp_path / "a", [7, 20, 30] * 20, vocab=23)
    keys = {"input_dir": tmp_path / "a", "vocab_size": 23, "eval_iters": 2, "eod_mask_loss": True}
    whole = run_training(tiny_config(tmp_path, **keys, max_steps=6, decay_steps=6, output_dir=tmp_path / "whole"))
    run_training(tiny_config(tmp_path, **keys, max_steps=3, decay_steps=6, output_dir=tmp_path / "half"))
    rest = run_training(tiny_config(tmp_path, **keys, max_steps=6, decay_steps=6, output_dir=tmp_path / "half"))
    assert rest.run.first_step == 3
    assert rest.eval_loss == whole.eval_loss
