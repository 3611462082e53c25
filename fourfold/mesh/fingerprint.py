"""What has to be the same in every process of a run: code, PyTorch, Python and every key of the config."""

import hashlib
import platform
import socket
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import torch

import fourfold
from fourfold.config.schema import Config

Fingerprint: TypeAlias = dict[str, Any]

MOST_TOLD = 5
"""Differences named; there may be many when a whole file is another one."""
OWN_TO_A_MACHINE = {"data.cache_dir"}


def fingerprint_of(config: Config | None = None) -> Fingerprint:
    """`host` tells where it was taken; all else is compared."""
    return {
        "host": socket.gethostname(),
        "fourfold": f"{fourfold.__version__} ({code_hash()})",
        "PyTorch": torch.__version__,
        "Python": ".".join(platform.python_version_tuple()[:2]),
        **{key: value for key, value in leaves(config).items() if key not in OWN_TO_A_MACHINE},
    }


@cache
def code_hash() -> str:
    """Of the package's sources, which can differ between machines of the same version."""
    digest = hashlib.sha256()
    top = Path(fourfold.__file__).parent
    for path in sorted(top.rglob("*.py")):
        digest.update(f"{path.relative_to(top)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:8]


def leaves(config: Config | None) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def walk(section: dict[str, Any], prefix: str) -> None:
        for key, value in section.items():
            if isinstance(value, dict) and f"{prefix}{key}" != "data.input_dir":
                walk(value, f"{prefix}{key}.")
            else:
                found[f"{prefix}{key}"] = value

    if config:
        walk(config.model_dump(mode="json", by_alias=True), "")
    return found


def differences(found: list[Fingerprint]) -> str:
    """What differs between ranks, as one sentence that names hosts and values; empty if nothing does."""
    first, told = found[0], []
    here = f"for rank 0 on {first['host']}"
    for rank, other in enumerate(found):
        told += [
            f"{key} is {first.get(key)} {here}, {other.get(key)} for rank {rank} on {other['host']}"
            for key in {**first, **other}
            if key != "host" and first.get(key) != other.get(key)
        ]
        if told:  # the first that differs stands for the rest
            more = f"; and {len(told) - MOST_TOLD} more" if len(told) > MOST_TOLD else ""
            return (
                "the machines of this run were not started alike: " + "; ".join(told[:MOST_TOLD]) + more + ". "
                "Start all of them with the same config, flags and installation"
            )
    return ""
