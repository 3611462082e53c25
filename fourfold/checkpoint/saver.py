"""Saving while training goes on: the step waits for one copy to host memory, a thread does the rest.

There is one copy per rank, made once and used again: a save that begins while the last one is still being written waits
for it. A synchronous save needs none. What fails in the thread fails on all ranks, and training hears of it at its next
step.
"""

import logging
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Self

import torch
import torch.distributed as dist

from fourfold.checkpoint.paths import AnyPath, locate, send_beside
from fourfold.checkpoint.state import Piece, Progress
from fourfold.checkpoint.store import (
    begin_checkpoint,
    checkpoint_path,
    commit_checkpoint,
    is_complete,
    remove_leftovers,
    remove_old,
    remove_unfinished,
    write_share,
    writing_path,
)
from fourfold.checkpoint.together import on_all, on_first
from fourfold.config.schema import Engine
from fourfold.errors import CheckpointError

log = logging.getLogger("fourfold")

FIRST_GUESS_BYTES_PER_S = 1e8
"""How fast a save is taken to be before one has been timed."""


class Saver:
    """Owns the copy and the thread; made by all ranks together. Leaving the block waits for the last save."""

    def __init__(self, engine: Engine, beside: Path, timeout_s: float = 21600.0) -> None:
        """`beside` is the local folder whose files follow each checkpoint to a remote output_dir; `timeout_s` is how
        long ranks wait for the slowest disk among them. One that has died is mostly noticed at once."""
        self.output: AnyPath = locate(engine.output_dir)
        self.engine = engine
        self.beside = beside
        # collectives of the thread must not meet those of the step
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self.rank = dist.get_rank()  # which the thread may want when the processes have left their group
        self.copies: dict[str, torch.Tensor] = {}
        self.thread: threading.Thread | None = None
        self.error: CheckpointError | None = None
        self.state_bytes = 0
        self.slowest_s = 0.0
        on_first(lambda: remove_leftovers(self.output), self.group)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, raised: BaseException | None, _: object) -> None:
        if kind is None:
            self.wait()
        elif issubclass(kind, Exception) and self.thread:  # not a second Ctrl-C, which stops at once
            self.thread.join()
            if self.error and raised is not self.error:
                log.error(str(self.error))

    @property
    def has_failed(self) -> bool:
        return self.error is not None

    @property
    def expected_s(self) -> float:
        """How long the next save will take, to judge by those before it; it waits for one that is still going on."""
        one_s = self.slowest_s or self.state_bytes / FIRST_GUESS_BYTES_PER_S
        return 2 * one_s if self.thread and self.thread.is_alive() else one_s

    def reserve(self, pieces: dict[str, Piece]) -> None:
        """Make room for the copy before the first save needs it, in the thread, so that the first is as fast as any.
        All ranks together: where one has no room, all hear of it."""
        self.state_bytes = sum(piece.tensor.nbytes for piece in pieces.values() if piece.is_written_here)
        if self.engine.async_save:
            on_all(lambda: self._make_room(pieces), self.group)
            self.thread = threading.Thread(target=self._touch, name="saver", daemon=True)
            self.thread.start()

    def save(self, pieces: dict[str, Piece], progress: Progress, texts: dict[str, str]) -> float:
        """Begin to save; the seconds that training waited. Raises what an earlier save came to."""
        began_s = time.perf_counter()
        self.wait()
        mine = {name: each for name, each in pieces.items() if each.is_written_here and each.tensor.numel()}
        copied = self._copy(mine) if self.engine.async_save else mine
        self.thread = threading.Thread(
            target=self._run, args=(copied, progress, texts, began_s), name="saver", daemon=True
        )
        self.thread.start()
        if not self.engine.async_save:
            self.wait()
        return time.perf_counter() - began_s

    def wait(self) -> None:
        """Until nothing is being written."""
        if self.thread:
            self.thread.join()
            self.thread = None
        if self.error:
            raise self.error

    @torch.no_grad()
    def _copy(self, pieces: dict[str, Piece]) -> dict[str, Piece]:
        """What this rank writes, out of reach of the next step."""
        self._make_room(pieces)
        for name, piece in pieces.items():
            self.copies[name].copy_(piece.tensor, non_blocking=True)
        if any(piece.tensor.is_cuda for piece in pieces.values()):
            torch.cuda.synchronize()
        return {name: piece._replace(tensor=self.copies[name]) for name, piece in pieces.items()}

    def _make_room(self, pieces: dict[str, Piece]) -> None:
        mine = {name: piece.tensor for name, piece in pieces.items() if piece.is_written_here and piece.tensor.numel()}
        try:
            for name, tensor in mine.items():
                if name not in self.copies:
                    self.copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        except RuntimeError as error:
            size = sum(tensor.nbytes for tensor in mine.values()) / 2**30
            raise CheckpointError(
                f"engine.async_save needs {size:.1f} GiB of host memory on rank {self.rank}, which could not be "
                f"had ({str(error).splitlines()[0]}); set engine.async_save = false"
            ) from error

    def _touch(self) -> None:
        """The system gives memory out page by page, at the first touch; what is pinned has been touched."""
        for copy in self.copies.values():
            if not copy.is_pinned():
                copy.zero_()

    def _run(self, pieces: dict[str, Piece], progress: Progress, texts: dict[str, str], began_s: float) -> None:
        try:
            path = self._write(pieces, progress, texts)
        except Exception as error:  # also a gloo that has lost a rank: nothing may die unheard in a thread
            self.error = CheckpointError(
                f"the checkpoint of step {progress.step} could not be saved: {error}; what was saved before is "
                f"untouched, so make room or choose another engine.output_dir and go on from there"
            )
            if self.rank == 0:
                with suppress(Exception):  # what was in the way of the save may be in the way of this too
                    remove_unfinished(self.output, progress.step)
            return
        took_s = time.perf_counter() - began_s
        self.slowest_s = max(self.slowest_s, took_s)
        if self.rank == 0:
            log.info(f"saved {path} in {took_s:.2f} s")

    def _write(self, pieces: dict[str, Piece], progress: Progress, texts: dict[str, str]) -> AnyPath:
        path, folder = checkpoint_path(self.output, progress.step), writing_path(self.output, progress.step)
        if on_first(lambda: is_complete(path), self.group):
            return path
        on_first(lambda: begin_checkpoint(self.output, progress.step), self.group)
        shares = on_all(lambda: write_share(folder, dist.get_rank(), pieces), self.group)
        on_first(lambda: commit_checkpoint(self.output, progress, texts, shares), self.group)
        on_first(self._tidy, self.group)
        return path

    def _tidy(self) -> None:
        """Only now that the new one is complete."""
        remove_old(self.output, self.engine.keep_last, self.engine.keep_best)
        send_beside(self.beside, self.output)
