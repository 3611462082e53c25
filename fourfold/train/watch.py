"""Noticing that a run hangs, saying where every rank stands, and ending the job.

The loop beats whenever it begins something. A thread in every rank looks whether it still does; ranks wait for each
other all the time, so when one stops they all do, and the first rank that lives asks the others where they stand. A
rank that is suspended, or that holds the interpreter, cannot answer: one on the same host reads its place from shared
memory, and has it write its stack by a signal. Nothing is left running afterwards.

Not watched: what comes before the first step (reading the text, loading a checkpoint), which waits for disks.
"""

import faulthandler
import json
import logging
import math
import mmap
import os
import signal
import socket
import struct
import sys
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from fourfold.checkpoint.paths import is_local, locate
from fourfold.config.schema import Engine
from fourfold.errors import LaunchError
from fourfold.mesh.process import Process
from fourfold.train.stacks import WORK, Standing, headline, is_debugged, read_dump, render_report, take_stacks

log = logging.getLogger("fourfold")

HUNG = 70
"""The exit code of every rank of a run that hung."""

TICK_S = 0.25
LONGEST_TICK_S = 2.0
"""A tick that took longer was no tick: this process was suspended, and its main thread could not beat."""
SETTLE_S = 0.6
"""All ranks note where they stand before anybody wakes one that is suspended, and with it the others."""
CLAIM_S = 1.0
"""How long the first rank has to begin the report before another one does."""
ANSWER_S = 1.2
DUMP_S = 1.0
STAGE_S = 4.0
"""How long a part of the conversation may take before a rank gives up on the others and speaks for itself."""
SAVED_BYTES = 65536
"""What has to be written for a save to count as going on: more than the log's own lines."""

TOGETHER_S = 1.3
"""All ranks end in the next second of the clock, soon after it has begun: in the one before, they have heard why and
left it for the launcher, which counts in seconds and shows who ended first."""

SUSPENDED = "is suspended"
HELD = "is held by a debugger"
END = "end: "

PAGE = "fourfold-watch"
PLACE = struct.Struct("qqq")  # beats, step, index in WORK


class Peer(NamedTuple):
    host: str
    machine: str
    """Where its process id means what it means here: containers of one name do not see each other's."""
    pid: int
    page: int
    dump: int
    """Descriptors of its shared memory: others of the same user open it through /proc."""
    log: str

    def state(self) -> str:
        """A letter as in `ps`: T is suspended, t is held by a debugger. Empty if it is gone."""
        try:
            if PAGE not in str(Path(f"/proc/{self.pid}/fd/{self.page}").readlink()):
                return ""
            return Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0]
        except OSError:
            return ""

    def place(self) -> tuple[int, int, int]:
        try:
            return PLACE.unpack(Path(f"/proc/{self.pid}/fd/{self.page}").read_bytes()[: PLACE.size])
        except OSError:
            return 0, 0, 0


class Watch:
    """On for the length of a `with` block, which all ranks enter together."""

    def __init__(self, process: Process, engine: Engine, log_file: Path | None) -> None:
        self.process, self.hang_timeout_s, self.compiles = process, engine.hang_timeout, engine.compile is True
        self.saves_here = is_local(locate(engine.output_dir))
        self.log_file = log_file
        self.beats, self.work, self.is_first_time, self.known = 0, WORK[0], True, set[str]()
        self.idle_s = 0.0
        self.noted: Standing | None = None  # where this rank stood when its clock ran out
        self.verdict: str | None = None
        self.stage_until_s = 0.0
        self.woken: list[int] = []
        self.over, self.at_ease = threading.Event(), threading.Event()

    def __enter__(self) -> Self:
        self.page_file = os.memfd_create(PAGE)
        os.truncate(self.page_file, PLACE.size)
        self.page = mmap.mmap(self.page_file, PLACE.size)
        # in memory, since whoever writes stacks holds the interpreter, and the disk of the log may be what hangs
        self.dump = os.fdopen(os.memfd_create(PAGE), "r+", encoding="utf-8")
        faulthandler.register(signal.SIGUSR2, file=self.dump, all_threads=True)
        written_to = str(self.log_file or "its standard error")
        mine = Peer(socket.gethostname(), this_machine(), os.getpid(), self.page_file, self.dump.fileno(), written_to)
        told: list[Any] = [None] * self.process.world_size
        # a process may hold several runs after each other: the key is this one's
        dist.all_gather_object(told, (mine, uuid.uuid4().hex))
        self.peers, self.key = [peer for peer, _ in told], told[0][1]
        self.clock = threading.Thread(target=self._look, name="watch", daemon=True)
        if self.process.world_size > 1:
            # connections of their own: one that waits for an answer blocks all who share it
            self.store = dist.PrefixStore(self.key, _get_default_store().clone())  # type: ignore[attr-defined]
            self.listener = threading.Thread(target=self._listen, name="watch-listener", daemon=True)
            self.listener.start()
        self.clock.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        if self.process.world_size > 1:
            with suppress(RuntimeError):
                self.store.set(f"left/{self.process.rank}", "")
        self.clock.join(10.0)  # if it is ending the job, this is as far as the main thread comes
        faulthandler.unregister(signal.SIGUSR2)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # one may be on its way
        self.dump.close()
        os.close(self.page_file)

    @property
    def hosts(self) -> list[str]:
        return [peer.host for peer in self.peers]

    def beat(self, step: int, work: str) -> None:
        """Something begins. It has `hang_timeout` until the next beat."""
        if self.noted is not None:  # one that was suspended has been woken: nothing goes on before it is told
            self.at_ease.wait()
        self.beats += 1
        self.work = work
        self.is_first_time = work not in self.known
        self.known.add(work)
        PLACE.pack_into(self.page, 0, self.beats, step, WORK.index(work))

    # --- the clock: a thread in every rank ------------------------------------------------------------------------

    @property
    def limit_s(self) -> float:
        if self.work == "saving" and not self.saves_here:
            return math.inf  # bytes sent are not seen, and who sends them has timeouts of its own
        if self.compiles and self.is_first_time:
            return math.inf  # pipe stages may compile one after another; distributed.timeout holds
        return self.hang_timeout_s

    def _look(self) -> None:
        beats, saved, then_s = 0, 0, time.monotonic()
        while not self.over.wait(min(TICK_S, self.hang_timeout_s / 4)):
            passed_s, then_s = time.monotonic() - then_s, time.monotonic()
            written = bytes_written() if self.work == "saving" else 0
            if self.beats != beats or written > saved + SAVED_BYTES:
                beats, saved, self.idle_s = self.beats, written, 0.0
            elif beats:
                self.idle_s += min(passed_s, LONGEST_TICK_S)
                if self.idle_s >= self.limit_s:
                    self._stand_still()
        if self.process.world_size > 1:
            with suppress(RuntimeError):  # whoever held the store is gone, and with it what the listener waits for
                self._ask(self.process.rank)

    def _stand_still(self) -> None:
        """Find out with the others what it is; comes back if it was no hang."""
        faulthandler.dump_traceback(self.dump, all_threads=True)
        self.at_ease.clear()
        self.noted, self.verdict = self._standing(), None
        self._next_stage()
        threading.Thread(target=self._keep_dump, name="watch-dump", daemon=True).start()
        threading.Thread(target=self._confer, name="watch-talk", daemon=True).start()
        while self.verdict is None and not self.over.is_set():
            time.sleep(0.05)
            if time.monotonic() > self.stage_until_s:
                self._speak_alone()
        if self.verdict is None:  # the run has come to its end meanwhile
            return
        if self.verdict.startswith(END):
            time.sleep(TOGETHER_S - time.time() % 1.0)
            self._end()
        self.idle_s, self.noted = float(self.verdict), None
        self.at_ease.set()

    def _standing(self) -> Standing:
        beats, step, work = PLACE.unpack_from(self.page)
        stacks = take_stacks(WORK[work])
        mine = self.peers[self.process.rank]
        idle_s = 0.0 if is_debugged(stacks) else self.idle_s
        return Standing(self.process.rank, mine.host, mine.pid, beats, step, WORK[work], idle_s, "", stacks)

    def _next_stage(self) -> None:
        self.stage_until_s = time.monotonic() + STAGE_S

    def _speak_alone(self) -> None:
        assert self.noted
        what = "the other ranks could not be asked within time; this one stands as above"
        self._tell([self.noted], f"workerlog.* of every rank ({what})")
        self._end()

    def _keep_dump(self) -> None:
        keep(Path(f"/proc/self/fd/{self.dump.fileno()}").read_text(encoding="utf-8"), self.log_file)

    def _end(self) -> None:
        for rank in self.woken:
            with suppress(OSError):
                os.kill(self.peers[rank].pid, signal.SIGKILL)
        os._exit(HUNG)

    # --- the conversation of ranks that stand still ---------------------------------------------------------------

    def _confer(self) -> None:
        assert self.noted
        time.sleep(SETTLE_S)
        if self.over.is_set():
            return
        rank, local = self.process.rank, self._local()
        suspended = [each for each in local if self.peers[each].state() == "T"]
        found = {}
        if rank == min(set(local) - set(suspended), default=rank):
            found = {each: self._look_at(each) for each in suspended}
        if self.process.world_size == 1:
            verdict = self._judge([self.noted])
            if verdict.startswith(END):
                self._tell([self.noted], self._logs())
            self.verdict = verdict
            return
        self._next_stage()
        for each, standing in found.items():
            self.store.set(f"seen/{each}", json.dumps(standing))
        number = self.store.add("round", 0)
        if any(lower not in suspended for lower in range(rank)):
            wait_until(lambda: self.store.check([f"begun/{number}"]), CLAIM_S)
        if self.store.add(f"claims/{number}", 1) == 1:
            self.store.set(f"begun/{number}", "")
            standings = self._gather(number)
            verdict = self._judge(standings)
            self.store.add("round", 1)
            self.store.set(f"verdict/{number}", verdict)
            if verdict.startswith(END):
                self._tell(standings, self._logs())
        else:
            verdict = self._follow(number)
            if verdict.startswith(END):
                leave_for_launcher(verdict.removeprefix(END))
        self.verdict = verdict

    def _follow(self, number: int) -> str:
        """Be there for what the rank that reports asks for, until it has come to an end."""
        has_looked = False
        try:
            while not self.store.check([f"verdict/{number}"]):
                if not has_looked and self.store.check([f"silent/{number}"]):
                    self._next_stage()
                    self._look_at_silent(json.loads(self.store.get(f"silent/{number}")))
                    has_looked = True
                time.sleep(max(0.05, self.process.world_size / 20000))  # all of them ask the same store
            return self.store.get(f"verdict/{number}").decode()
        except RuntimeError:  # the store has ended with the rank that held it
            return END

    def _gather(self, number: int) -> list[Standing]:
        """Where every rank stands: by its own word, or by what a rank on its host sees of it."""
        assert self.noted
        others = [rank for rank in range(self.process.world_size) if rank != self.process.rank]
        asked = {rank: self._ask(rank) for rank in others}
        wait_until(lambda: self.store.check([f"told/{rank}/{n}" for rank, n in asked.items()]), ANSWER_S)
        self._next_stage()
        silent = [rank for rank, n in asked.items() if not self.store.check([f"told/{rank}/{n}"])]
        seen = {rank for rank in others if self.store.check([f"seen/{rank}"])}
        unseen = [rank for rank in silent if rank not in seen]
        self.store.set(f"silent/{number}", json.dumps(unseen))
        if unseen:
            self._look_at_silent(unseen)
            wait_until(lambda: self.store.check([f"seen/{rank}" for rank in unseen]), DUMP_S + ANSWER_S)
        self._next_stage()
        found = {self.process.rank: self.noted}
        for rank, n in asked.items():
            if self.store.check([f"seen/{rank}"]):
                found[rank] = Standing(*json.loads(self.store.get(f"seen/{rank}")))
            elif rank not in silent:
                found[rank] = Standing(*json.loads(self.store.get(f"told/{rank}/{n}")))
            else:
                peer = self.peers[rank]
                found[rank] = Standing(
                    rank, peer.host, peer.pid, trouble="does not answer, nor does another rank of its host,"
                )
        return [found[rank] for rank in sorted(found)]

    def _judge(self, standings: list[Standing]) -> str:
        """END and why, once all has been told; or how long nothing has moved, which is not long enough."""
        alive = [each.idle_s for each in standings if not each.trouble]
        is_held = any(each.trouble == HELD for each in standings)
        others = range(self.process.world_size if self.process.world_size > 1 else 0)
        has_left = self.over.is_set() or any(self.store.check([f"left/{rank}"]) for rank in others)
        shortest_s = 0.0 if is_held or has_left else min(alive, default=self.limit_s)
        return str(shortest_s) if shortest_s < 0.8 * self.limit_s else END + self._shown(standings, self._logs())

    def _logs(self) -> str:
        folders = sorted({str(Path(peer.log).parent) for peer in self.peers})
        return f"workerlog.* in {', '.join(folders)}" if self.log_file else self.peers[0].log

    def _shown(self, standings: list[Standing], logs: str) -> str:
        """What the launcher is to show: the first rank speaks on the console itself."""
        if self.process.is_first:
            return headline(standings, self.hang_timeout_s)
        return render_report(standings, self.hang_timeout_s, logs)

    def _tell(self, standings: list[Standing], logs: str) -> None:
        leave_for_launcher(self._shown(standings, logs))
        report = render_report(standings, self.hang_timeout_s, logs)

        def speak() -> None:
            if not self.process.is_first:
                print(report, file=sys.stderr, flush=True)
            log.error(report)

        speaking = threading.Thread(target=speak, name="watch-report", daemon=True)
        speaking.start()
        speaking.join(2.0)  # whatever holds up the log or the console does not hold up the end

    def _ask(self, rank: int) -> int:
        number = self.store.add(f"asked/{rank}", 1)
        self.store.set(f"ask/{rank}/{number}", "")
        return number

    def _listen(self) -> None:
        """Tell whoever asks where this rank stands."""
        store = _get_default_store().clone()  # type: ignore[attr-defined]
        store.set_timeout(timedelta(days=1000))
        store, number = dist.PrefixStore(self.key, store), 0
        with suppress(RuntimeError):  # the rank that held the store is gone: the job ends without a conversation
            while True:
                number += 1
                store.wait([f"ask/{self.process.rank}/{number}"])
                if self.over.is_set():
                    return
                store.set(f"told/{self.process.rank}/{number}", json.dumps(self.noted or self._standing()))

    # --- neighbours -----------------------------------------------------------------------------------------------

    def _local(self) -> list[int]:
        mine = self.peers[self.process.rank].machine
        return [rank for rank, peer in enumerate(self.peers) if peer.machine == mine]

    def _look_at_silent(self, silent: list[int]) -> None:
        local = self._local()
        if self.process.rank == min(set(local) - set(silent), default=None):
            for rank in set(local) & set(silent):
                self.store.set(f"seen/{rank}", json.dumps(self._look_at(rank)))

    def _look_at(self, rank: int) -> Standing:
        """Have a rank on this host, which cannot speak for itself, write its stack, and read it."""
        peer = self.peers[rank]
        state, (beats, step, work) = peer.state(), peer.place()
        trouble = {"": "is gone", "T": SUSPENDED, "t": HELD, "D": "waits for a disk"}.get(state, "does not answer")
        frames = []
        if state and state != "t":
            frames = self._have_dumped(peer, state == "T", stops_again=rank != 0)
            self.woken.append(rank)
        return Standing(rank, peer.host, peer.pid, beats, step, WORK[work], 0.0, trouble, {"main": frames})

    def _have_dumped(self, peer: Peer, is_suspended: bool, stops_again: bool) -> list[Any]:
        """A suspended one is woken for it; then it sleeps on until the end, unless the others need its store."""
        text, dump = "", Path(f"/proc/{peer.pid}/fd/{peer.dump}")

        def is_written() -> bool:
            nonlocal text
            before, text = text, dump.read_bytes()[size:].decode(errors="replace")
            return bool(read_dump(text)) and text == before

        try:
            size = len(dump.read_bytes())
            os.kill(peer.pid, signal.SIGUSR2)
            if is_suspended:
                os.kill(peer.pid, signal.SIGCONT)
            wait_until(is_written, DUMP_S)
            if is_suspended and stops_again:
                os.kill(peer.pid, signal.SIGSTOP)
        except OSError:  # it has ended
            pass
        where = Path(peer.log) if self.log_file else None
        threading.Thread(target=keep, args=(text, where), name="watch-dump", daemon=True).start()
        return read_dump(text)


def keep(dump: str, log_file: Path | None) -> None:
    """Stacks of all threads, for whoever wants to know more than the report tells."""
    if log_file is None:
        print(dump, file=sys.stderr, flush=True)
        return
    with suppress(OSError), log_file.open("a", encoding="utf-8") as stream:
        stream.write(dump)


def leave_for_launcher(why: str) -> None:
    """Where it looks for what its workers ended of. Every rank leaves the same, so whichever it shows is the one."""
    if not why:  # the store ended before it was told
        return
    try:
        raise LaunchError(why)
    except LaunchError as error:
        get_error_handler().record_exception(error)


def this_machine() -> str:
    """The kernel that runs this, and the processes that it shows us."""
    booted = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    return f"{booted} {Path('/proc/self/ns/pid').readlink()}"


def wait_until(is_true: Callable[[], bool], longest_s: float) -> None:
    until_s = time.monotonic() + longest_s
    while not is_true() and time.monotonic() < until_s:
        time.sleep(0.05)


def bytes_written() -> int:
    """By this process, to files; 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/io").read_text(encoding="utf-8").split("wchar: ")[1].split()[0])
    except (OSError, IndexError):
        return 0
