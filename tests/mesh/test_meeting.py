"""Ranks that meet, or do not. They are threads here, each with a store connection of its own; nothing is pretended."""

import socket
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import pytest

from fourfold.errors import ConfigError, LaunchError
from fourfold.mesh import meeting
from fourfold.mesh.fingerprint import fingerprint_of
from fourfold.mesh.meeting import Place, meet, open_store, place_in, refuse
from tests.ports import free_port


@pytest.fixture
def places() -> list[Place]:
    port = free_port()
    return [Place(rank, 3, f"host{rank}", "127.0.0.1", port, rank == 0, True) for rank in range(3)]


def at_once(*actions: Callable[[], object]) -> list[Future[object]]:
    with ThreadPoolExecutor(len(actions)) as pool:
        return [pool.submit(action) for action in actions]


def said(future: Future[object]) -> str:
    error = future.exception()
    assert isinstance(error, LaunchError), repr(error)
    return str(error)


def test_ranks_that_agree_get_a_store_that_they_share(places: list[Place]) -> None:
    def take_part(place: Place) -> tuple[bytes, object]:
        store = meet(place, fingerprint_of(), 30.0)
        store.set(f"mine/{place.rank}", str(place.rank))
        store.wait([f"mine/{rank}" for rank in range(3)])
        return bytes(store.get(f"mine/{(place.rank + 1) % 3}")), store  # the first rank's has to live to the end

    results = at_once(*(lambda place=place: take_part(place) for place in places))  # type: ignore[misc]
    assert [future.result()[0] for future in results] == [b"1", b"2", b"0"]  # type: ignore[index]


def test_a_rank_that_was_started_differently_is_refused_by_all_in_the_same_words(places: list[Place]) -> None:
    mine = [fingerprint_of() | {"host": place.host} for place in places]
    mine[2]["PyTorch"] = "1.0"
    results = at_once(*(lambda rank=rank: meet(places[rank], mine[rank], 30.0) for rank in range(3)))  # type: ignore[misc]
    sentences = {said(future) for future in results}
    assert len(sentences) == 1
    assert "for rank 0 on host0, 1.0 for rank 2 on host2" in sentences.pop()


def test_ranks_that_do_not_come_are_named_on_all_that_did(places: list[Place], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "TELL_S", 1.0)
    results = at_once(*(lambda place=place: meet(place, fingerprint_of(), 1.0) for place in places[:2]))  # type: ignore[misc]
    sentences = {said(future) for future in results}
    assert len(sentences) == 1
    assert "1 of 3 ranks did not come" in (told := sentences.pop()) and "within 1 s: 2;" in told


@pytest.mark.parametrize("refusing", [0, 1])
def test_what_keeps_one_rank_away_is_told_to_those_that_wait(places: list[Place], refusing: int) -> None:
    others = [place for place in places if place.rank != refusing]
    results = at_once(
        *(lambda place=place: meet(place, fingerprint_of(), 30.0) for place in others),  # type: ignore[misc]
        lambda: refuse(places[refusing], ConfigError("engine.max_steps = -1 is not at least 1")),
    )
    for future in results[:2]:
        assert said(future) == (
            f"rank {refusing} on host{refusing} cannot take part: engine.max_steps = -1 is not at least 1"
        )


def test_a_name_that_does_not_resolve_is_a_sentence_on_every_rank(
    places: list[Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "RESOLVE_S", 0.0)
    for place in places[:2]:
        with pytest.raises(LaunchError, match=rf"MASTER_ADDR = no-such\.invalid does not resolve on {place.host}"):
            meet(replace(place, address="no-such.invalid"), fingerprint_of(), 30.0)


def test_a_port_that_another_program_has_is_a_sentence_on_every_rank(
    places: list[Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "ANSWER_S", 1.0)
    monkeypatch.setattr(meeting, "FREE_S", 0.5)
    with socket.socket() as taken:
        taken.bind(("", places[0].port))
        taken.listen()
        with pytest.raises(LaunchError, match=rf"port {places[0].port} of host0 is in use by another program"):
            meet(places[0], fingerprint_of(), 30.0)
        with pytest.raises(LaunchError, match="is answered, but not by the first rank of this run"):
            meet(places[1], fingerprint_of(), 30.0)


def test_a_port_that_somebody_has_in_passing_is_waited_for(places: list[Place]) -> None:
    taken = socket.socket()
    taken.bind(("127.0.0.1", places[0].port))
    with ThreadPoolExecutor() as pool:
        opened = pool.submit(open_store, places[0], 30.0)
        time.sleep(0.5)
        assert not opened.done()
        taken.close()
        opened.result(timeout=30.0).set("key", "value")


def test_a_first_rank_that_never_comes_is_a_sentence(places: list[Place]) -> None:
    with pytest.raises(LaunchError, match=r"rank 1 on host1 found nobody at 127\.0\.0\.1:\d+ within 1 s") as raised:
        meet(places[1], fingerprint_of(), 1.0)
    assert raised.value.exit_code == 1  # another try may find it


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is not"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT = http is not a port"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT = 70000 is not a port"),
        ({"RANK": "2"}, "RANK = 2 is not among the 2 ranks"),
    ],
)
def test_variables_that_make_no_sense_are_sentences(changed: dict[str, str], sentence: str) -> None:
    sound = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    with pytest.raises(LaunchError, match=sentence):
        place_in(sound | changed)


def test_the_agent_of_torchrun_keeps_the_store_if_it_says_so() -> None:
    sound = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    assert place_in(sound).keeps_store
    assert not place_in(sound | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).keeps_store
    assert not place_in(sound | {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "3"}).is_told
