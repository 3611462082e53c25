"""What ranks do together about checkpoints: a failure of one is the failure of all, in the same words."""

import logging
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from fourfold.checkpoint.manifest import DamagedError, Manifest, read_manifest, verify_files
from fourfold.checkpoint.paths import AnyPath, locate
from fourfold.checkpoint.state import Piece
from fourfold.checkpoint.store import complete_checkpoints, load_pieces, named_checkpoint, set_aside
from fourfold.errors import CheckpointError, FourfoldError

log = logging.getLogger("fourfold")

Result = TypeVar("Result")


def on_all(action: Callable[[], Result], group: dist.ProcessGroup | None = None) -> list[Result]:
    """Every rank acts, and every rank learns what all of them got; or, if one failed, all raise what it raised."""
    result: Result | None = None
    failure: FourfoldError | None = None
    try:
        result = action()
    except FourfoldError as error:
        failure = error
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        failure = CheckpointError(f"{where}{error.strerror or error}")
    except Exception as error:  # a bug, or a remote store's own kind of error
        log.exception("a checkpoint could not be handled")
        failure = CheckpointError(f"{type(error).__name__}: {error}")
    gathered: list = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (result, failure), group=group)
    for _, failure in gathered:
        if failure is not None:
            raise failure
    return [result for result, _ in gathered]


def on_first(action: Callable[[], Result], group: dist.ProcessGroup | None = None) -> Result:
    """The first rank acts, and every rank learns what it got, or raises what it raised."""
    return on_all(lambda: action() if dist.get_rank() == 0 else None, group)[0]  # type: ignore[return-value]


def find_together(output: AnyPath, resume: str) -> Manifest | None:
    """The checkpoint that `engine.resume` means, with every byte of it checked, or None to begin anew.

    `auto` is the newest that is sound: damaged ones are set aside, loudly, since they would be in the way of the run's
    own. A path is that checkpoint or an error.
    """
    if resume == "never":
        return None
    if resume != "auto":
        return verify_together(on_first(lambda: str(named_checkpoint("engine.resume", resume))))
    for path in on_first(lambda: [str(each) for each in reversed(complete_checkpoints(output))]):
        try:
            return verify_together(path)
        except DamagedError as error:
            aside = on_first(lambda path=path: str(set_aside(locate(path))))  # type: ignore[misc]
            if dist.get_rank() == 0:
                log.error(f"PASSED OVER {path}: {error}. It lies now at {aside}; going on from an earlier one, if any")
    return None


def verify_together(path: str) -> Manifest:
    """Every byte of a checkpoint is read and checked once, by one rank or another, before anything is built on it."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    read: list[Manifest] = []  # once, where its failure is told to all; each rank keeps its own, which may be long

    def check() -> None:
        read.append(read_manifest(locate(path)))
        verify_files(read[0], rank, ranks)

    on_all(check)
    return read[0]


def load_together(manifest: Manifest, pieces: dict[str, Piece]) -> None:
    """Every rank reads its own blocks, and all go on only if all could."""
    on_all(lambda: load_pieces(manifest, pieces))
