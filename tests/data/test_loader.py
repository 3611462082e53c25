import itertools
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.data import loader as module
from fourfold.data.loader import IGNORED_TARGET, Batch, TrainLoader, eval_batches
from fourfold.data.order import sample_keys, samples_at
from fourfold.data.source import Windows

SEQ = 5
TOKENS = np.arange(100, 300, dtype=np.uint16)
STARTS = np.arange(0, len(TOKENS) - SEQ, 3, dtype=np.int64)  # 65 samples


def train_loader(rows: range = range(8), first_step: int = 0, num_workers: int = 0, **others: object) -> TrainLoader:
    return TrainLoader(Windows(TOKENS, STARTS, SEQ, 7), 7, 8, rows, first_step, num_workers, **others)  # type: ignore[arg-type]


def batches(count: int, rows: range = range(8), first_step: int = 0, num_workers: int = 0) -> list[Batch]:
    with train_loader(rows, first_step, num_workers) as loader:
        return [loader.next_batch() for _ in range(count)]


def evaluate(rows: range = range(8), iters: int = -1, starts: np.ndarray = STARTS) -> list[Batch]:
    return list(eval_batches(Windows(TOKENS, starts, SEQ, 7), 8, rows, iters))


def tensors(found: list[Batch]) -> list[torch.Tensor]:
    return [tensor for batch in found for tensor in batch if tensor is not None]


def same(left: list[Batch], right: list[Batch]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, tensors(left), tensors(right)))


def first_tokens(found: list[Batch]) -> list[int]:
    """The first token of every row that is not padding."""
    return [int(t[0]) for batch in found for t, target in zip(batch[0], batch[1], strict=True) if target[0] >= 0]


def test_a_row_is_its_sample_and_the_target_is_the_next_token() -> None:
    [_, batch] = batches(2)
    samples = samples_at(np.arange(8, 16), len(STARTS), 7)
    for row, start in enumerate(STARTS[samples]):
        assert batch.tokens_bt[row].tolist() == TOKENS[start : start + SEQ].tolist()
        assert batch.targets_bt[row].tolist() == TOKENS[start + 1 : start + 1 + SEQ].tolist()
    assert batch.sample_keys_b.tolist() == sample_keys(7, 1, range(8)).tolist()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="pinned memory belongs to a GPU")
def test_batches_are_pinned_if_asked() -> None:
    with train_loader(num_workers=1, pin_memory=True) as loader:
        found = [loader.next_batch(), *eval_batches(Windows(TOKENS, STARTS, SEQ, 7), 8, range(8), 1, pin_memory=True)]
    assert all(tensor.is_pinned() for tensor in tensors(found))


def test_batches_are_contiguous_int64() -> None:
    for batch in batches(1) + evaluate(iters=1):
        assert [tensor.dtype for tensor in tensors([batch])] == [torch.int64] * 3
        assert all(tensor.is_contiguous() for tensor in tensors([batch]))


@settings(max_examples=20)
@given(st.integers(0, 1000), st.integers(0, 20), st.integers(0, 3))
def test_a_restart_at_any_step_goes_on_with_the_same_batches(first_step: int, done: int, num_workers: int) -> None:
    whole = batches(done + 3, first_step=first_step)
    assert same(whole[done:], batches(3, first_step=first_step + done, num_workers=num_workers))


@pytest.mark.parametrize("num_workers", [1, 2, 5])
def test_the_number_of_workers_does_not_matter(num_workers: int) -> None:
    assert same(batches(30), batches(30, num_workers=num_workers))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_data_ranks_together_see_the_global_batch(ranks: int) -> None:
    share = 8 // ranks
    per_rank = [batches(10, rows=range(r * share, (r + 1) * share), num_workers=1) for r in range(ranks)]
    together = [
        Batch(*(torch.cat(each) for each in list(zip(*parts, strict=True))[:3]))
        for parts in zip(*per_rank, strict=True)
    ]
    assert same(together, batches(10))


def test_an_epoch_of_batches_holds_every_sample_once() -> None:
    seen = first_tokens(batches(9))[: len(STARTS)]
    assert sorted(seen) == TOKENS[STARTS].tolist()


def test_a_batch_larger_than_the_corpus_goes_round_it() -> None:
    with TrainLoader(Windows(TOKENS, STARTS[:3], SEQ, 7), 7, 8, range(8)) as loader:
        counts = np.bincount(first_tokens([loader.next_batch() for _ in range(3)]))
    assert sorted(counts[counts > 0].tolist()) == [8, 8, 8]


def test_the_state_of_a_loader_is_its_step() -> None:
    with train_loader(first_step=40, num_workers=2) as loader:
        assert loader.step == 40
        loader.next_batch()
        assert loader.step == 41


def test_workers_prepare_batches_before_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    built, gather = threading.Semaphore(0), module.build_batch

    def counted(*args: object) -> object:
        result = gather(*args)  # type: ignore[arg-type]
        built.release()
        return result

    monkeypatch.setattr(module, "build_batch", counted)
    with train_loader(num_workers=2) as loader:
        assert all(built.acquire(timeout=10) for _ in range(2))
        loader.next_batch()
        assert built.acquire(timeout=10)
        assert not built.acquire(timeout=0.1)  # two ahead, not more


def test_waiting_is_measured_and_can_be_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count(0, 5)
    with train_loader(clock=lambda: float(next(ticks))) as loader:
        loader.next_batch()
        loader.next_batch()
        assert loader.wait_s == 10.0
        loader.wait_s = 0.0
        loader.next_batch()
        assert loader.wait_s == 5.0


def test_a_step_that_computes_does_not_wait_for_data() -> None:
    tokens = np.arange(200_000, dtype=np.int32)
    starts = np.arange(len(tokens) - 1024, dtype=np.int64)
    with TrainLoader(Windows(tokens, starts, 1024, 7), 7, 64, range(64), num_workers=1) as loader:
        loader.next_batch()  # the first one has to make the epoch's permutation
        loader.wait_s = 0.0
        for _ in range(10):
            time.sleep(0.02)
            loader.next_batch()
        assert loader.wait_s < 0.1


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_in_a_worker_surfaces_in_next_batch(num_workers: int) -> None:
    beyond = np.full(10, len(TOKENS), dtype=np.int64)
    with TrainLoader(Windows(TOKENS, beyond, SEQ, 7), 7, 8, range(8), num_workers=num_workers) as loader:
        for _ in range(2):
            with pytest.raises(IndexError):
                loader.next_batch()
        assert loader.step == 0


def test_closing_ends_the_threads_and_closing_again_is_harmless() -> None:
    before = threading.active_count()
    loader = train_loader(num_workers=3)
    loader.next_batch()
    loader.close()
    loader.close()
    assert threading.active_count() == before
    with pytest.raises(AssertionError, match="after close"):
        loader.next_batch()


def test_a_whole_evaluation_sees_every_sample_once_in_order() -> None:
    found = evaluate()
    assert first_tokens(found) == TOKENS[STARTS].tolist()
    assert {batch.tokens_bt.shape for batch in found} == {(8, SEQ)}
    assert (found[-1].targets_bt[1:] == IGNORED_TARGET).all()  # 65 samples: 8 full batches and one row


@pytest.mark.parametrize("iters", [-1, 1, 4, 9])
def test_every_data_rank_evaluates_equally_many_batches(iters: int) -> None:
    per_rank = [evaluate(range(r * 2, r * 2 + 2), iters) for r in range(4)]
    together = [
        Batch(*(torch.cat(each) for each in list(zip(*parts, strict=True))[:3]))
        for parts in zip(*per_rank, strict=True)
    ]
    assert same(together, evaluate(iters=iters))


def test_a_short_evaluation_is_spread_over_the_whole_part() -> None:
    seen = first_tokens(evaluate(iters=2))
    assert len(set(seen)) == 16
    gaps = np.diff([*seen, int(TOKENS[STARTS[-1]]) + 3])
    assert seen[0] == TOKENS[0]
    assert set(gaps.tolist()) <= {12, 15}  # 65 samples in 16 places: every fourth or fifth, 3 tokens apart


def test_an_evaluation_longer_than_the_part_stops_at_its_end() -> None:
    assert same(evaluate(iters=1000), evaluate(iters=-1))


def test_evaluations_are_the_same_each_time() -> None:
    assert same(evaluate(iters=3), evaluate(iters=3))


def test_no_iterations_and_no_samples_give_no_batches() -> None:
    assert evaluate(iters=0) == []
    assert evaluate(starts=STARTS[:0]) == []
    assert evaluate(starts=STARTS[:0], iters=5) == []
