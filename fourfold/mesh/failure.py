"""The first failure of a run, told on every machine. A rank that fails by itself leaves its story in the store that the
ranks met at; one that fails because a peer is gone tells that story instead of its own.

A thread listens for it as well: on a GPU, ranks that wait for one that is gone would not notice, and the store itself
goes when the first rank does.
"""

import json
import logging
import os
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple, Self

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from fourfold.errors import FourfoldError, LaunchError
from fourfold.mesh.meeting import ANSWER_S, Place, open_store, within

log = logging.getLogger("fourfold")

POLL_S = 1.0
LOOK_S = 1.0
"""How long the story of a lost peer may take to arrive: it was left before its connections ended."""
LINGER_S = 3.0
"""How long the first rank, once it has failed, keeps the store for the others to read."""
GRACE_S = 30.0
"""How long a rank may go on once another has failed: long enough to commit a checkpoint that all have written."""


class Failure(NamedTuple):
    rank: int
    host: str
    what: str
    log_file: str
    exit_code: int

    @property
    def story(self) -> str:
        where = f"\nits log, with the traceback, is {self.host}:{self.log_file}" if self.log_file else ""
        return f"rank {self.rank} on {self.host} failed first: {self.what}{where}"


class Failures:
    """Open for the length of a run, on all ranks. An exception that leaves the block is told to the others, or
    replaced by what they have told."""

    def __init__(self, place: Place, token: str) -> None:
        """`token` is this attempt's own: a store may outlive one and hold its stories."""
        self.place = place
        # a connection of its own, since the group's may be waiting
        own = open_store(replace(place, keeps_store=False), ANSWER_S)
        self.store = dist.PrefixStore(f"failure/{token}", own)
        self.first: Failure | None = None
        self.is_over = threading.Event()
        self.thread = threading.Thread(target=self._listen, name="failures", daemon=True)

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def stop(self) -> None:
        """Listen no longer."""
        self.is_over.set()
        self.thread.join(LOOK_S)

    def __exit__(self, kind: Any, error: BaseException | None, _: object) -> None:
        self.stop()
        if not isinstance(error, Exception):
            return
        if not is_loss(error):
            self._tell(Failure(self.place.rank, self.place.host, describe(error), log_file(), exit_code_of(error)))
            return
        what = f"it lost a peer ({describe(error)}): a rank was killed or hangs, or its host is gone"
        # nobody waits for this story: the others have lost the same peer
        mine = Failure(self.place.rank, self.place.host, what, log_file(), 1)
        first = self._look() or self._tell(mine, lingers=False)
        if first is not mine and self.place.keeps_store:
            with suppress(RuntimeError, TimeoutError):
                within(LINGER_S, self._wait_until_heard)
        lost = LaunchError(first.story)
        lost.exit_code = first.exit_code
        raise lost from error

    def _listen(self) -> None:
        while self.first is None and not self.is_over.wait(POLL_S):
            try:
                if self.store.check(["first"]):
                    self._read()
            except RuntimeError:  # gone with the rank that kept it
                return
        if self.first and not self.is_over.wait(GRACE_S):
            log.error(self.first.story)
            print(f"error: {self.first.story}", file=sys.stderr, flush=True)
            get_error_handler().record_exception(LaunchError(self.first.story))
            os._exit(self.first.exit_code)

    def _read(self) -> None:
        self.first = Failure(*json.loads(self.store.get("first")))
        self.store.add("heard", 1)

    def _look(self) -> Failure | None:
        """The first failure, if one is told within a moment."""

        def look() -> None:
            while self.first is None:
                if self.store.check(["first"]):
                    self._read()
                time.sleep(0.05)

        with suppress(RuntimeError, TimeoutError):
            within(LOOK_S, look)
        return self.first

    def _tell(self, mine: Failure, lingers: bool = True) -> Failure:
        """Leave our story, unless there is one already; the one that counts."""

        def tell() -> None:
            self.first = Failure(*json.loads(self.store.compare_set("first", "", json.dumps(mine))))
            self.store.add("heard", 1)
            if lingers and self.place.keeps_store:
                self._wait_until_heard()

        with suppress(RuntimeError, TimeoutError):
            within(LINGER_S, tell)
        return self.first or mine

    def _wait_until_heard(self) -> None:
        """The store goes with the rank that keeps it."""
        while self.store.add("heard", 0) < self.place.world_size:
            time.sleep(0.05)


def is_loss(error: BaseException) -> bool:
    """Whether this is a backend's or the store's way to say that somebody else is gone or late, however wrapped."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError | FourfoldError) and "/gloo/" in str(error)


def describe(error: BaseException) -> str:
    return str(error) if isinstance(error, FourfoldError) else f"{type(error).__name__}: {error}"


def exit_code_of(error: BaseException) -> int:
    return error.exit_code if isinstance(error, FourfoldError) else 1


def log_file() -> str:
    """Where this rank's log goes; empty before it is opened."""
    files = [handler for handler in log.handlers if isinstance(handler, logging.FileHandler)]
    return files[0].baseFilename if files else ""
