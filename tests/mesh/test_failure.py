"""The first failure, told to all. Ranks are threads with store connections of their own."""

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from fourfold.errors import CheckpointError, LaunchError
from fourfold.mesh import failure
from fourfold.mesh.failure import Failures, is_loss
from fourfold.mesh.meeting import Place
from tests.ports import free_port

GONE = "[/src/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:4711"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.TCPStore:
    monkeypatch.setattr(failure, "LOOK_S", 0.5)
    monkeypatch.setattr(failure, "LINGER_S", 1.5)
    port = free_port()
    return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))


def place(rank: int, store: dist.TCPStore) -> Place:
    return Place(rank, 2, f"host{rank}", "127.0.0.1", store.port, rank == 0, True)


def fail(rank: int, store: dist.TCPStore, error: Exception, after_s: float = 0.0, token: str = "now") -> BaseException:
    try:
        with Failures(place(rank, store), token):
            time.sleep(after_s)
            raise error
    except Exception as left:
        return left


def test_a_rank_that_lost_a_peer_tells_the_peers_story(store: dist.TCPStore) -> None:
    with ThreadPoolExecutor(2) as pool:
        mine = pool.submit(fail, 1, store, ValueError("the third step went wrong"))
        other = pool.submit(fail, 0, store, RuntimeError(GONE), 0.2)
    assert isinstance(mine.result(), ValueError)
    assert isinstance(other.result(), LaunchError)
    assert str(other.result()).startswith("rank 1 on host1 failed first: ValueError: the third step went wrong")


def test_the_exit_code_of_the_first_failure_is_that_of_all(store: dist.TCPStore) -> None:
    fail(1, store, CheckpointError("the disk is full"))
    told = fail(0, store, RuntimeError(GONE))
    assert isinstance(told, LaunchError) and told.exit_code == CheckpointError.exit_code
    assert str(told) == "rank 1 on host1 failed first: the disk is full"


def test_a_peer_that_left_no_word_is_told_in_the_backends_own(store: dist.TCPStore) -> None:
    told = fail(0, store, RuntimeError(GONE))
    assert isinstance(told, LaunchError) and told.exit_code == 1
    assert "rank 0 on host0 failed first: it lost a peer" in str(told) and "Connection closed by peer" in str(told)


def test_the_story_of_an_earlier_attempt_is_not_told_again(store: dist.TCPStore) -> None:
    fail(1, store, ValueError("yesterday"), token="attempt 1")
    assert "yesterday" not in str(fail(0, store, RuntimeError(GONE), token="attempt 2"))


def test_the_first_rank_keeps_the_store_until_the_others_have_heard(store: dist.TCPStore) -> None:
    with ThreadPoolExecutor(2) as pool:
        waits = pool.submit(fail, 1, store, RuntimeError(GONE), 1.5)
        began_s = time.monotonic()
        fail(0, store, ValueError("first"))
        assert time.monotonic() - began_s > 0.2  # until the listener of rank 1 has asked
    assert "rank 0 on host0 failed first: ValueError: first" in str(waits.result())


def test_a_rank_that_does_not_notice_is_ended(store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(failure, "GRACE_S", 0.1)
    monkeypatch.setattr(failure.os, "_exit", ended.append)
    with Failures(place(1, store), "now"):
        fail(0, store, ValueError("out of reach"))
        time.sleep(1.0)
    assert ended == [1]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError(GONE), True),
        (CheckpointError(f"step 3 could not be saved: {GONE}"), True),
        (dist.DistNetworkError("the store is gone"), True),
        (dist.DistBackendError("NCCL error: remote process exited"), True),
        (RuntimeError("shapes differ"), False),
        (CheckpointError("the disk is full"), False),
        (OSError("Connection reset by peer"), False),
    ],
)
def test_only_a_backends_words_count_as_the_loss_of_a_peer(error: Exception, expected: bool) -> None:
    assert is_loss(error) == expected
