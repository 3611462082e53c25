import os
import time
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.data import index as index_module
from fourfold.data.index import cache_folders, cached_index
from fourfold.data.order import Passes, blend_order, document_order, shuffled
from fourfold.data.source import Blend, Documents, Range, Windows
from fourfold.errors import DataError

lengths_lists = st.lists(st.integers(0, 12), min_size=1, max_size=20).filter(lambda lengths: sum(lengths) > 6)


def documents(lengths: list[int], seq: int = 4, files: int = 1, seed: int = 1, **others: object) -> Documents:
    """Token i of the corpus is the number i, so that every token says where it is from."""
    array = np.array(lengths, dtype=np.int64)
    tokens = np.arange(array.sum(), dtype=np.int32)
    # documents do not reach across files
    bounds = [int(array[: len(array) * number // files].sum()) for number in range(1, files)]
    parts = np.split(tokens, bounds)
    paths = [Path(f"{number}.bin") for number in range(files)]
    part = Range(np.cumsum(array) - array, array)
    return Documents(parts, paths, part, seq, seed, 10**6, **others)  # type: ignore[arg-type]


def by_hand(lengths: list[int], seq: int, seed: int, epochs: int) -> tuple[list[list[int]], list[int]]:
    """The samples of so many epochs, in the order of the stream, and where each epoch's end."""
    kept = [length for length in lengths if length]
    starts = np.cumsum(lengths) - lengths
    starts = [start for start, length in zip(starts.tolist(), lengths, strict=True) if length]
    stream: list[int] = []
    ends = []
    for epoch in range(epochs):
        for document in document_order(len(kept), seed, epoch).tolist():
            stream += range(starts[document], starts[document] + kept[document])
        ends.append((len(stream) - 1) // seq)
    return [stream[i * seq : i * seq + seq + 1] for i in range(ends[-1])], ends


@settings(max_examples=60, deadline=None)
@given(lengths_lists, st.integers(1, 5), st.integers(0, 2**40), st.integers(1, 3))
def test_samples_are_spans_of_the_shuffled_documents_and_epochs_follow_each_other(
    lengths: list[int], seq: int, seed: int, files: int
) -> None:
    source = documents(lengths, seq, files, seed)
    expected, ends = by_hand(lengths, seq, seed, epochs=3)
    assert [source.passes.samples(epoch + 1) for epoch in range(3)] == ends
    seen = source.train(np.arange(len(expected))).tokens_bs.tolist()
    first = 0
    for end in ends:
        assert sorted(seen[first:end]) == sorted(expected[first:end])
        first = end


@given(lengths_lists, st.integers(1, 5))
def test_an_evaluation_reads_the_documents_as_they_lie(lengths: list[int], seq: int) -> None:
    source = documents(lengths, seq, files=2)
    spans = source.read(np.arange(len(source))).tokens_bs
    assert spans.tolist() == [list(range(i * seq, i * seq + seq + 1)) for i in range(len(source))]


@given(st.integers(1, 5000), st.integers(1, 300), st.integers(1, 10**6))
def test_the_number_of_epochs_is_the_least_that_has_enough_samples(tokens: int, seq: int, samples: int) -> None:
    passes = Passes(tokens, seq, 1)
    epochs = passes.epoch_of(samples - 1) + 1
    assert (epochs * tokens - 1) // seq >= samples
    assert epochs == 1 or ((epochs - 1) * tokens - 1) // seq < samples


@given(lengths_lists, st.integers(0, 50))
def test_any_row_is_found_without_those_before_it(lengths: list[int], place: int) -> None:
    source, again = documents(lengths), documents(lengths)
    whole = source.train(np.arange(51)).tokens_bs
    assert again.train(np.array([place])).tokens_bs[0].tolist() == whole[place].tolist()


def test_short_and_long_documents_are_gathered_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    source = documents([3, 50, 1, 7, 200, 2], seq=20, files=3)
    copied = source.train(np.arange(40))
    monkeypatch.setattr("fourfold.data.source.SHORT_PIECE", 0)
    assert np.array_equal(source.train(np.arange(40)).tokens_bs, copied.tokens_bs)
    monkeypatch.setattr("fourfold.data.source.SHORT_PIECE", 10**9)
    assert np.array_equal(source.train(np.arange(40)).tokens_bs, copied.tokens_bs)


@settings(deadline=None)
@given(st.integers(1, 9000), st.integers(0, 2**63 - 1), st.integers(0, 100))
def test_the_order_of_an_epoch_is_a_permutation(count: int, seed: int, epoch: int) -> None:
    assert sorted(shuffled(np.arange(count), count, seed, epoch).tolist()) == list(range(count))
    assert sorted(document_order(count, seed, epoch).tolist()) == list(range(count))


def test_every_sample_and_document_is_equally_likely_at_every_place() -> None:
    counts = np.zeros((2, 6, 6))
    for epoch in range(6000):
        counts[0, np.arange(6), shuffled(np.arange(6), 6, 1234, epoch)] += 1
        counts[1, np.arange(6), document_order(6, 1234, epoch)] += 1
    assert abs(counts - 1000).max() < 5 * np.sqrt(1000 * 5 / 6)


def test_the_order_of_documents_is_the_same_in_every_version() -> None:
    assert document_order(8, seed=1234, epoch=0).tolist() == GOLDEN_DOCUMENTS
    assert shuffled(np.arange(8), 8, seed=1234, epoch=0).tolist() == GOLDEN_SAMPLES
    assert shuffled(np.arange(4), 10**6, seed=1234, epoch=0).tolist() == GOLDEN_OF_A_MILLION


GOLDEN_DOCUMENTS = [7, 0, 3, 2, 1, 4, 5, 6]
GOLDEN_SAMPLES = [1, 0, 2, 6, 5, 3, 4, 7]
GOLDEN_OF_A_MILLION = [819482, 472475, 884746, 968037]


def test_a_token_beyond_the_vocabulary_is_named_with_its_file_and_place() -> None:
    source = documents([5, 5, 5, 5], seq=3, files=2)
    source.vocab_size = 13
    with pytest.raises(DataError, match=r"'1.bin': token 3 is 13, which is not in the vocabulary of 13 tokens"):
        source.read(np.arange(5))


weights_lists = st.lists(st.integers(1, 1000), min_size=1, max_size=7)


@settings(max_examples=50, deadline=None)
@given(weights_lists)
def test_a_blend_is_exact_to_within_one_sample_at_every_point(weights: list[int]) -> None:
    total = sum(weights)
    order = blend_order([Fraction(weight, total) for weight in weights], 3000)
    for member, weight in enumerate(weights):
        had = np.cumsum(order == member)
        due = np.arange(1, 3001) * weight / total
        assert abs(had - due).max() < 1


@pytest.mark.parametrize("weights", [(0.7, 0.3), (1, 1, 1), (0.123457, 0.654321, 0.1), (123456789, 987654321)])
def test_each_member_of_a_blend_is_read_in_its_own_order(weights: tuple[float, ...]) -> None:
    shares = [Fraction(repr(float(weight))) for weight in weights]
    members = [documents([7, 9, 30 + member], seed=member) for member in range(len(weights))]
    blend = Blend(members, shares)
    which, nth = blend.members_of(np.arange(5000))
    for member in range(len(weights)):
        assert nth[which == member].tolist() == list(range((which == member).sum()))
    spans = blend.train(np.arange(100)).tokens_bs
    for row in range(100):
        assert spans[row].tolist() == members[which[row]].train(nth[row : row + 1]).tokens_bs[0].tolist()
    # from anywhere, also far into the run
    far = np.arange(3_000_000, 3_000_010)
    assert np.array_equal(Blend(members, shares).members_of(far)[1], blend.members_of(far)[1])
    counts = blend.members_of(np.array([3_000_000]))
    assert abs(counts[1][0] - 3_000_000 * float(shares[counts[0][0]] / sum(shares))) <= 1


def test_large_indexes_are_kept_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "FEWEST", 1)
    first = documents([5, 9, 20], cache=[tmp_path]).train(np.arange(30)).tokens_bs
    assert list(tmp_path.glob("*/order.npy"))
    monkeypatch.setattr("fourfold.data.source.document_order", None)  # not asked again
    assert np.array_equal(documents([5, 9, 20], cache=[tmp_path]).train(np.arange(30)).tokens_bs, first)
    for other in ({"seed": 2}, {"lengths": [5, 9, 21]}):
        with pytest.raises(TypeError):
            documents(**{"lengths": [5, 9, 20], "cache": [tmp_path], **other}).train(np.arange(30))  # type: ignore[arg-type]


def test_a_folder_that_cannot_be_written_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "FEWEST", 1)
    (tmp_path / "file").write_text("")
    made = cached_index([tmp_path / "file" / "x", tmp_path / "b"], {"a": 1}, 10, lambda: {"x": np.arange(3)})
    assert made["x"].tolist() == [0, 1, 2] and len(list((tmp_path / "b").iterdir())) == 1
    made = cached_index([tmp_path / "file" / "x"], {"a": 1}, 10, lambda: {"x": np.arange(3)})
    assert made["x"].tolist() == [0, 1, 2]


def test_ranks_that_make_an_index_at_once_end_with_one_whole_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_module, "FEWEST", 1)

    def build() -> dict[str, np.ndarray]:
        # another rank is done first
        index_module.cached_index([tmp_path], {"a": 1}, 10, lambda: {"x": np.arange(3)})
        return {"x": np.arange(3)}

    assert cached_index([tmp_path], {"a": 1}, 10, build)["x"].tolist() == [0, 1, 2]
    assert len(list(tmp_path.iterdir())) == 1


def test_an_index_is_on_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "FEWEST", 1)
    for name, age_s in ((".draft-old", 90_000), (".draft-new", 60)):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (time.time() - age_s,) * 2)
    there: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: there.append(len(list(tmp_path.glob("[!.]*")))))
    cached_index([tmp_path], {"a": 1}, 10, lambda: {"x": np.arange(3), "y": np.arange(3)})
    assert there == [0, 0]
    assert [path.name for path in tmp_path.glob(".draft-*")] == [".draft-new"]


def test_a_user_without_a_home_has_a_cache_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert tmp_path in cache_folders(None, Path("data"))[1].parents


def test_an_index_that_was_damaged_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "FEWEST", 1)
    cached_index([tmp_path], {"a": 1}, 10, lambda: {"x": np.arange(3)})
    next(tmp_path.glob("*/x.npy")).write_bytes(b"\x93NUMPY")
    assert cached_index([tmp_path], {"a": 1}, 10, lambda: {"x": np.arange(3)})["x"].tolist() == [0, 1, 2]


def test_documents_of_a_span_are_numbered_from_its_first() -> None:
    spans = documents([3, 4, 9], seq=7).read(np.arange(2))
    assert spans.documents_bs is not None
    assert spans.documents_bs.tolist() == [[0, 0, 0, 1, 1, 1, 1, 2], [0] * 8]
    tokens = np.array([1, 2, 0, 3, 0, 0, 4, 5])
    windows = Windows(tokens, np.array([0]), 7, 1, eos=0).read(np.array([0]))
    assert windows.documents_bs is not None and windows.documents_bs.tolist() == [[0, 0, 0, 1, 1, 2, 3, 3]]
