"""How the processes of a run find each other, before any of them talks to another: at a key-value store that the first
rank keeps at MASTER_ADDR:MASTER_PORT, or torchrun's agent for it.

Every rank leaves its fingerprint there, and the first compares them. Whatever is wrong, a rank that never came
included, every rank that did come raises the same sentence.
"""

import errno
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from fourfold.errors import FourfoldError, LaunchError
from fourfold.mesh.fingerprint import Fingerprint, differences

PATIENCE_S = 300.0
"""How long to wait for ranks that are not there yet: machines import at different speeds."""
RESOLVE_S = 20.0
"""How long a name may take to be known: a cluster's names appear with its machines."""
ANSWER_S = 20.0
"""How long the store may take to answer once its port is open."""
FREE_S = 10.0
"""How long the first rank waits for its port. A launcher chose it while it was free, and a passing connection of
another program may have been given it since."""
COME_S = 60.0
"""How long a rank that cannot take part looks for the first one, to tell it why."""
TELL_S = 10.0
"""How long it then waits for the others to read it."""
MOST_NAMED = 8

Result = TypeVar("Result")


@dataclass(frozen=True)
class Place:
    """Which process this is, and where all of them meet."""

    rank: int
    world_size: int
    host: str
    address: str
    port: int
    keeps_store: bool
    is_told: bool
    """Whether a refusal may be left in the store: torchrun's own outlives a restart, and would refuse that too."""
    attempt: str = "0"
    """What of such a store is this start's own."""


def place_in(environment: Mapping[str, str]) -> Place:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]
    if missing:
        raise LaunchError(
            f"RANK and WORLD_SIZE are set, but {' and '.join(missing)} is not: set the address and a free port of the "
            "first rank's machine, or start with torchrun"
        )
    port = environment["MASTER_PORT"]
    if not port.isdecimal() or not 0 < int(port) < 2**16:
        raise LaunchError(f"MASTER_PORT = {port} is not a port; it can be 1 to 65535")
    rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    if rank >= world_size:
        raise LaunchError(
            f"RANK = {rank} is not among the {world_size} ranks of WORLD_SIZE; it can be 0 to {world_size - 1}"
        )
    has_agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    restarts = int(environment.get("TORCHELASTIC_MAX_RESTARTS", 0))
    return Place(
        rank,
        world_size,
        socket.gethostname(),
        environment["MASTER_ADDR"],
        int(port),
        keeps_store=rank == 0 and not has_agent,
        is_told=not (has_agent and restarts),
        attempt=environment.get("TORCHELASTIC_RESTART_COUNT", "0") if has_agent else "0",
    )


def meet(place: Place, mine: Fingerprint, patience_s: float) -> dist.Store:
    """Wait until every rank is here and all have the same fingerprint; the store they met at."""
    store = open_store(place, patience_s)
    store.set(f"here/{place.rank}", json.dumps(mine))
    if store.add("arrived", 1) >= place.world_size:
        store.set("all_here", "")
    try:
        if place.rank == 0 and is_complete(store, place, patience_s):
            found = [json.loads(store.get(f"here/{rank}")) for rank in range(place.world_size)]
            store.compare_set("verdict", "", json.dumps(differences(found)))
        # the first rank speaks for all: its patience ends before theirs
        store.wait(["verdict"], timedelta(seconds=patience_s + ANSWER_S))
        verdict = json.loads(store.get("verdict"))
        if verdict:
            wait_until_read(store, place, TELL_S if place.keeps_store else 0.0)
    except dist.DistError as error:
        raise lost(f"rank {place.rank} on {place.host} lost the first rank at {where(place)}", error) from error
    if verdict:
        raise LaunchError(verdict)
    return store


def wait_until_read(store: dist.Store, place: Place, patience_s: float) -> None:
    """The store goes with the rank that keeps it, and the others have to read what it holds."""
    read, end_s = store.add("read", 1), time.monotonic() + patience_s
    while read < place.world_size and time.monotonic() < end_s:
        time.sleep(0.05)
        read = store.add("read", 0)


def is_complete(store: dist.Store, place: Place, patience_s: float) -> bool:
    """Wait until all ranks are here. If not, there is a verdict: who is missing, or why one cannot come."""
    end_s = time.monotonic() + patience_s
    while not store.check(["all_here"]):
        if store.check(["verdict"]):
            return False
        if time.monotonic() > end_s:
            missing = [rank for rank in range(place.world_size) if not store.check([f"here/{rank}"])]
            named = ", ".join(map(str, missing[:MOST_NAMED])) + (" and others" if len(missing) > MOST_NAMED else "")
            store.compare_set(
                "verdict",
                "",
                json.dumps(
                    f"{len(missing)} of {place.world_size} ranks did not come to {where(place)} within "
                    f"{patience_s:.0f} s: {named}; start them, or look on their machines for why they ended"
                ),
            )
            return False
        time.sleep(0.05)
    return True


def refuse(place: Place, error: FourfoldError) -> None:
    """Tell ranks that wait for this one why it does not come."""
    if not place.is_told:
        return
    with suppress(FourfoldError, dist.DistError):
        store = open_store(place, COME_S)
        sentence = f"rank {place.rank} on {place.host} cannot take part: {error}"
        store.compare_set("verdict", "", json.dumps(sentence))
        wait_until_read(store, place, TELL_S)  # torchrun ends the others of its machine with the first that ends


def open_store(place: Place, patience_s: float) -> dist.Store:
    check_resolves(place, min(patience_s, RESOLVE_S))
    if not place.keeps_store:
        wait_for_port(place, patience_s)
    store = partial(
        dist.TCPStore,
        place.address,
        place.port,
        is_master=place.keeps_store,
        timeout=timedelta(seconds=ANSWER_S),
        wait_for_workers=False,  # we wait ourselves, and know who is missing
        multi_tenant=True,
    )
    end_s = time.monotonic() + FREE_S
    while True:
        try:
            with quiet():
                # its own timeout does not end its wait for a greeting
                return dist.PrefixStore(f"attempt/{place.attempt}", within(ANSWER_S, store))
        except (dist.DistError, TimeoutError) as error:
            is_taken = place.keeps_store and os.strerror(errno.EADDRINUSE).lower() in str(error).lower()
            if not is_taken or time.monotonic() > end_s:
                raise not_open(place, error, is_taken) from error
        time.sleep(0.1)


def not_open(place: Place, error: Exception, is_taken: bool) -> LaunchError:
    if not place.keeps_store:
        return LaunchError(
            f"{where(place)} is answered, but not by the first rank of this run: another program has the port; "
            "choose another MASTER_PORT on every machine"
        )
    if is_taken:
        return LaunchError(
            f"port {place.port} of {place.host} is in use by another program; choose another MASTER_PORT on every "
            "machine"
        )
    return LaunchError(
        f"rank 0 on {place.host} cannot listen at {where(place)} ({first_line(error)}); check that MASTER_ADDR is an "
        "address of this machine, and MASTER_PORT a free port above 1023"
    )


def within(limit_s: float, action: Callable[[], Result]) -> Result:
    """What the action gives or raises, or TimeoutError: some waits of the store know no limit."""
    results: list[Result] = []
    errors: list[Exception] = []

    def act() -> None:
        try:
            results.append(action())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=act, name="within", daemon=True)
    thread.start()
    thread.join(limit_s)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no answer within {limit_s:.0f} s")
    return results[0]


@contextmanager
def quiet() -> Iterator[None]:
    """Without what the store's own code prints, stack frames and all: what goes wrong is raised too."""
    sys.stderr.flush()
    kept = os.dup(2)
    with Path(os.devnull).open("wb") as nothing:
        os.dup2(nothing.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def check_resolves(place: Place, patience_s: float) -> None:
    end_s = time.monotonic() + patience_s
    while True:
        try:
            socket.getaddrinfo(place.address, place.port, type=socket.SOCK_STREAM)
            return
        except socket.gaierror as error:
            if time.monotonic() > end_s:
                raise LaunchError(
                    f"MASTER_ADDR = {place.address} does not resolve on {place.host} ({error.strerror}); write the "
                    "address of the first rank's machine, or a name of it that every machine knows"
                ) from error
        time.sleep(0.5)


def wait_for_port(place: Place, patience_s: float) -> None:
    end_s = time.monotonic() + patience_s
    while True:
        try:
            socket.create_connection((place.address, place.port), timeout=5.0).close()
            return
        except OSError as error:
            if time.monotonic() > end_s:
                raise lost(
                    f"rank {place.rank} on {place.host} found nobody at {where(place)} within {patience_s:.0f} s", error
                ) from error
        time.sleep(0.2)


def lost(what: str, error: Exception) -> LaunchError:
    """For what another start may mend, so that whoever starts runs again does so: exit code 1 instead of 2."""
    failed = LaunchError(
        f"{what} ({first_line(error)}); look on that machine for why, and check MASTER_ADDR, MASTER_PORT and firewalls"
    )
    failed.exit_code = 1
    return failed


def where(place: Place) -> str:
    return f"[{place.address}]:{place.port}" if ":" in place.address else f"{place.address}:{place.port}"


def first_line(error: Exception) -> str:
    text = getattr(error, "strerror", None) or str(error)
    return (text.splitlines() or [type(error).__name__])[0]
