"""From a path to token files: a file, the common prefix of several, or a folder with all files in it."""

from pathlib import Path

from fourfold.data.formats.flat import open_flat
from fourfold.data.formats.megatron import open_megatron
from fourfold.data.formats.paddle import IDS, INDEX, LEGACY, open_paddle, open_paddle_legacy
from fourfold.data.formats.prepared import LENGTHS, MANIFEST, PROGRESS, TOKENIZER, TOKENS, open_prepared
from fourfold.data.formats.tokenfile import TokenFile
from fourfold.errors import DataError

# How names end, and what opens them, given the path without that end. A .bin is Megatron's if it has an .idx beside it,
# else it is flat.
OPENERS = {
    MANIFEST: open_prepared,
    IDS: lambda prefix: [open_paddle(prefix)],
    LEGACY: lambda prefix: [open_paddle_legacy(prefix)],
    ".idx": lambda prefix: [open_megatron(prefix)],
    ".bin": lambda prefix: [open_flat(prefix.with_name(prefix.name + ".bin"))],
}
COMPANIONS = (INDEX, TOKENIZER, TOKENS, LENGTHS)
"""Ends of files that belong to one of the above."""


def is_token_path(path: Path) -> bool:
    """Whether a path leads to token files by the names found there; nothing is opened."""
    if path.is_dir():
        return any(_is_token_name(child.name) for child in path.iterdir() if child.is_file())
    return _is_token_name(path.name) if path.is_file() else _of_prefix(path) is not None


def open_token_files(path: Path) -> list[TokenFile]:
    """In the order of their names."""
    if path.is_dir():
        names = sorted(child.name for child in path.iterdir() if child.is_file())
        _refuse_unfinished(path, names)
        # a Megatron pair is opened by its .idx
        mains = [
            name for name in names if _end_of(name) and not (name.endswith(".bin") and f"{name[:-4]}.idx" in names)
        ]
        return [file for name in mains for file in _open(path / name)]
    if not path.is_file():
        path = _of_prefix(path) or path
    if path.name.endswith(INDEX):
        path = path.with_name(path.name.removesuffix(INDEX) + IDS)
    if path.suffix == ".bin" and path.with_suffix(".idx").exists():
        path = path.with_suffix(".idx")
    if path.name.endswith((TOKENS, LENGTHS)):
        prefix = path.name.rpartition("-")[0]
        if not path.with_name(prefix + MANIFEST).exists():
            _refuse_unfinished(path.parent, [path.name])
        path = path.with_name(prefix + MANIFEST)
    return _open(path)


def passed_over(folder: Path) -> list[Path]:
    """Files of a folder of token files that are not read."""
    return sorted(
        child
        for child in folder.iterdir()
        if not child.name.startswith(".") and not _is_token_name(child.name) and not child.name.endswith(".json")
    )


def _open(path: Path) -> list[TokenFile]:
    end = _end_of(path.name)
    assert end is not None, path
    return OPENERS[end](path.with_name(path.name.removesuffix(end)))


def _end_of(name: str) -> str | None:
    return next((end for end in OPENERS if name.endswith(end)), None)


def _is_token_name(name: str) -> bool:
    return _end_of(name) is not None or name.endswith(COMPANIONS)


def _of_prefix(prefix: Path) -> Path | None:
    """The file that a common prefix stands for."""
    return next((path for end in OPENERS if (path := prefix.with_name(prefix.name + end)).is_file()), None)


def _refuse_unfinished(folder: Path, names: list[str]) -> None:
    complete = {name.removesuffix(MANIFEST) for name in names if name.endswith(MANIFEST)}
    for name in names:
        prefix = name.removesuffix(PROGRESS) if name.endswith(PROGRESS) else name.rpartition("-")[0]
        if name.endswith((PROGRESS, TOKENS)) and prefix not in complete:
            raise DataError(
                f"'{folder / prefix}' is not complete: '{prefix}{MANIFEST}' is missing; run the same "
                "`fourfold prepare` again, which goes on where it stopped"
            )
