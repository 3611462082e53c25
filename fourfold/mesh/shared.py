"""Whether all machines see one and the same output folder: each rank writes its part of a checkpoint there, and a part
in a folder of its own would be missing from the others.
"""

import os
import socket
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from fourfold.errors import LaunchError

PATIENCE_S = 40.0
"""How long a network file system may take to show a new file on another machine."""

Told = TypeVar("Told")


def check_shared(folder: Path) -> None:
    """All ranks together, and all raise the same sentence if one of them cannot write there or sees another folder."""
    path = folder / f".shared.{tell_all(uuid.uuid4().hex)[0]}"
    host = socket.gethostname()
    problems = tell_all((host, leave_token(path) if dist.get_rank() == 0 else ""))
    if problems[0][1]:
        raise LaunchError(f"engine.output_dir = {folder} {problems[0][1]} on {problems[0][0]}; write another folder")
    problems = tell_all((host, look_for_token(path, PATIENCE_S)))
    if dist.get_rank() == 0:
        path.unlink(missing_ok=True)
    for rank, (host, problem) in enumerate(problems):
        if problem:
            raise LaunchError(
                f"engine.output_dir = {folder}, as rank {rank} on {host} sees it, {problem}; it must be a folder that "
                "all machines share and may write to, or an address like s3://bucket/run"
            )


def tell_all(mine: Told) -> list[Told]:
    told = [mine] * dist.get_world_size()
    dist.all_gather_object(told, mine)
    return told


def leave_token(path: Path) -> str:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    except OSError as error:
        return f"cannot be written to ({error.strerror})"
    return ""


def names_in(folder: Path) -> set[str]:
    """Reading a whole folder gets round an NFS client's memory of what was not there."""
    try:
        return {each.name for each in folder.iterdir()}
    except FileNotFoundError:
        with suppress(OSError):
            list(folder.parent.iterdir())
        return set()


def look_for_token(path: Path, patience_s: float) -> str:
    """What is wrong with the folder as this rank sees it."""
    end_s = time.monotonic() + patience_s
    try:
        while path.name not in names_in(path.parent):
            if time.monotonic() > end_s:
                return "is not the one that rank 0 writes to"
            time.sleep(0.25)
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return "" if os.access(path.parent, os.W_OK) else "cannot be written to"
