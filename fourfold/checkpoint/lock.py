"""One writer per output folder. The first rank holds the lock for the length of a run.

On a disk it is a lock of the kernel's on `.lock`, which ends with the process however that ends, also across machines
on NFS; the file only tells whose it is. A remote store has no such thing: there `.lock` counts on while its owner
lives, and one that has stopped counting is taken over. No clock is compared with another.
"""

import errno
import fcntl
import json
import logging
import os
import socket
import threading
from pathlib import Path
from typing import Any, Self

from fourfold.checkpoint.paths import AnyPath
from fourfold.checkpoint.together import on_first
from fourfold.errors import CheckpointError

log = logging.getLogger("fourfold")

LOCK = ".lock"
BEAT_S = 10.0
SETTLE_S = 1.0
WATCHED_BEATS = 4
"""How many beats a lock of another machine may miss before its owner counts as dead."""


class Lock:
    """Held inside the block; entering it is refused on all ranks while another run holds it."""

    def __init__(self, output: AnyPath) -> None:
        self.output = output
        self.file = output / LOCK
        self.descriptor: int | None = None
        self.heart: threading.Thread | None = None
        self.is_over = threading.Event()
        self.is_lost = False

    def __enter__(self) -> Self:
        on_first(self._take)
        return self

    def __exit__(self, *_: object) -> None:
        if self.descriptor is not None:
            os.ftruncate(self.descriptor, 0)
            os.close(self.descriptor)  # and so unlocks
        elif self.heart:
            self.is_over.set()
            self.heart.join()
            if not self.is_lost:
                self.file.unlink(missing_ok=True)

    def _take(self) -> None:
        self.output.mkdir(parents=True, exist_ok=True)
        if not (isinstance(self.file, Path) and self._lock_file(self.file)):
            self._claim()

    def _lock_file(self, file: Path) -> bool:
        """Whether this file system has locks; if it has, this one is ours now."""
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = read_owner(file)
            os.close(descriptor)
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise CheckpointError(self._refusal(owner)) from None
            return False
        self.descriptor = descriptor
        tell_takeover(read_owner_from(os.read(descriptor, 4096)))
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(owner_here()).encode(), 0)
        return True

    def _claim(self) -> None:
        """Where there are no locks: refuse if the owner lives, else write our name and keep counting."""
        owner = read_owner(self.file)
        if owner and is_alive(owner, self.file, self.is_over):
            raise CheckpointError(self._refusal(owner))
        tell_takeover(owner)
        mine = owner_here()
        self.file.write_text(json.dumps(mine))
        self.is_over.wait(
            SETTLE_S
        )  # whoever else did the same at the same moment has overwritten it by now, or we theirs
        if (now := read_owner(self.file)) != mine:
            raise CheckpointError(self._refusal(now))
        self.heart = threading.Thread(target=self._beat, args=(mine,), name="lock", daemon=True)
        self.heart.start()

    def _beat(self, mine: dict[str, Any]) -> None:
        while not self.is_over.wait(BEAT_S):
            mine["beat"] += 1
            try:
                now = read_owner(self.file)
                if now and now | {"beat": 0} != mine | {"beat": 0}:
                    self.is_lost = True
                    log.warning(
                        f"{self.file} was taken over by process {now['pid']} on {now['host']}: stop one of the two"
                    )
                    return
                self.file.write_text(json.dumps(mine))
            except Exception as error:  # every store has its own kinds
                log.warning(f"{self.file} could not be written: {error}")

    def _refusal(self, owner: dict[str, Any] | None) -> str:
        who = f"process {owner['pid']} on {owner['host']}" if owner else "a process that has not given its name yet"
        return (
            f"engine.output_dir = {self.output} is in use by another run, {who}; "
            "wait for it, stop it, or write another engine.output_dir"
        )


def owner_here() -> dict[str, Any]:
    pid = os.getpid()
    return {"pid": pid, "host": socket.gethostname(), "started": start_ticks(pid), "beat": 0}


def start_ticks(pid: int) -> str | None:
    """When a process of this machine began, in ticks since boot, which tells it from a later one of the same number;
    None if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[19]
    except OSError:
        return None


def is_alive(owner: dict[str, Any], file: AnyPath, is_over: threading.Event) -> bool:
    if owner["host"] == socket.gethostname():
        return start_ticks(owner["pid"]) == owner["started"]
    log.warning(f"{file} is of process {owner['pid']} on {owner['host']}; waiting to see whether it lives")
    for _ in range(WATCHED_BEATS):
        is_over.wait(BEAT_S)
        now = read_owner(file)
        if now is None:  # released; only on a disk can it be seen half written
            return isinstance(file, Path) and file.exists()
        if now != owner:
            return True
    return False


def tell_takeover(owner: dict[str, Any] | None) -> None:
    if owner:
        log.warning(f"process {owner['pid']} on {owner['host']} ended without releasing its lock; it is taken over")


def read_owner(file: AnyPath, tries: int = 10) -> dict[str, Any] | None:
    try:
        return read_owner_from(file.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno != errno.EBUSY or tries == 1:
            raise
        return read_owner(file, tries - 1)  # S3's word for a file that was written between its look-up and its reading


def read_owner_from(content: bytes) -> dict[str, Any] | None:
    """None also for a name that was never finished."""
    try:
        owner = json.loads(content)
        return {key: owner[key] for key in ("pid", "host", "started", "beat")}
    except (ValueError, TypeError, KeyError):
        return None
