"""Reading plain text whole: a file, a folder of files, or a corpus that every machine has.

Every way in which an input can be unsuitable is refused with a sentence. Tokenizing is not known here.
"""

import difflib
import os
from collections.abc import Callable
from pathlib import Path

from fourfold.errors import DataError

BUILTIN = "builtin:"
TEXT_SUFFIXES = frozenset(("", ".md", ".py", ".rst", ".tex", ".text", ".txt"))
CHOICES = "give a text file, a folder of text files, token files, or builtin:pydoc"


def read_text(input_dir: str, truncate: float) -> str:
    """The text of a file, of a folder's text files, or of a built-in corpus; of it, the first fraction `truncate`."""
    try:
        text = _read_whole(input_dir)
    except OSError as error:
        where = f" at '{error.filename}'" if error.filename not in (None, input_dir) else ""
        raise DataError(
            f"data.input_dir = '{input_dir}' cannot be read{where} ({error.strerror}); "
            "make it readable for the user who trains, or give another path"
        ) from error
    if not text or text.isspace():
        raise DataError(f"data.input_dir = '{input_dir}' is empty: it holds no text; {CHOICES}")
    kept = text[: int(len(text) * truncate)]
    if not kept:
        raise DataError(
            f"data.truncate = {truncate:g} keeps none of the {len(text)} characters of "
            f"data.input_dir = '{input_dir}'; use a larger fraction, up to 1"
        )
    return kept


def find_text_files(folder: str | Path) -> tuple[list[Path], list[Path]]:
    """The files of a folder that are read, in the order in which they are, and those that are passed over.

    Read are files at any depth whose suffix is in TEXT_SUFFIXES. Passed over are other suffixes and links to folders,
    which could lead round in a circle. Hidden files and folders are in neither list.
    """
    taken: list[Path] = []
    passed_over: list[Path] = []
    for parent, folders, names in os.walk(folder, onerror=_raise):
        folders[:] = [name for name in folders if not name.startswith(".")]
        passed_over += [Path(parent, name) for name in folders if Path(parent, name).is_symlink()]
        for path in (Path(parent, name) for name in names if not name.startswith(".")):
            # A dangling link counts as a file here, so that reading it fails aloud.
            is_text = path.suffix.lower() in TEXT_SUFFIXES and (path.is_file() or path.is_symlink())
            (taken if is_text else passed_over).append(path)
    # By parts, not by the order of the file system nor of the locale: the same folder is the same text everywhere.
    return sorted(taken, key=lambda path: path.parts), sorted(passed_over, key=lambda path: path.parts)


def _read_whole(input_dir: str) -> str:
    if input_dir.startswith(BUILTIN):
        return _read_builtin(input_dir)
    path = Path(input_dir)
    if path.is_file():
        return _read_file(input_dir, path)
    if path.is_dir():
        return _read_folder(input_dir, path)
    if path.exists():
        raise DataError(f"data.input_dir = '{input_dir}' is neither a file nor a folder; {CHOICES}")
    raise DataError(f"data.input_dir = '{input_dir}' does not exist{nearest(path)}; {CHOICES}")


def _read_builtin(input_dir: str) -> str:
    name = input_dir.removeprefix(BUILTIN)
    if name not in BUILTINS:
        known = ", ".join(BUILTIN + known for known in BUILTINS)
        raise DataError(f"data.input_dir = '{input_dir}' is not a built-in corpus; there is: {known}")
    return BUILTINS[name]()


def _read_folder(input_dir: str, folder: Path) -> str:
    taken, passed_over = find_text_files(folder)
    if not taken:
        others = f", only {', '.join(sorted({path.name for path in passed_over})[:3])}" if passed_over else ""
        raise DataError(
            f"data.input_dir = '{input_dir}' is a folder without a text file{others}; files that count as text end in "
            f"{', '.join(sorted(TEXT_SUFFIXES - {''}))} or have no suffix"
        )
    return "\n".join(_read_file(input_dir, path) for path in taken)


def _read_file(input_dir: str, path: Path) -> str:
    raw = path.read_bytes()
    try:
        text = raw.decode("utf-8")
        offset = raw.find(b"\0")  # valid UTF-8, but the mark of token files and of UTF-16
    except UnicodeDecodeError as error:
        text, offset = "", error.start
    if offset >= 0:
        which = "" if str(path) == str(Path(input_dir)) else f": the file '{path}'"
        raise DataError(
            f"data.input_dir = '{input_dir}'{which} is not UTF-8 text: byte {offset} is 0x{raw[offset]:02x}; "
            "convert it (iconv -f LATIN1 -t UTF-8, say) or move it away"
        )
    # A byte order mark is an artefact of some editors, not a character to learn.
    return text.removeprefix("\ufeff")


def _read_pydoc() -> str:
    """CPython's documentation of its own language: about 700,000 characters of English that every machine has.

    The text is that of the running Python, so a corpus fingerprint holds within one Python version.
    """
    try:
        # Here and not on top, because some Linux distributions ship Python without it.
        from pydoc_data.topics import topics
    except ImportError as error:
        raise DataError(
            f"data.input_dir = '{BUILTIN}pydoc' needs Python's module pydoc_data, which this Python came without; "
            "install the full standard library, or give a text file"
        ) from error
    return "\n".join(topics[name] for name in sorted(topics))


BUILTINS: dict[str, Callable[[], str]] = {"pydoc": _read_pydoc}


def nearest(path: Path) -> str:
    """A hint at the first part of the path that is not there: what its folder holds that is spelled like it."""
    missing = path
    while not missing.parent.exists():
        missing = missing.parent
    hint = "" if missing == path else f" (there is no '{missing}')"
    if missing.parent.is_dir():
        siblings = sorted(sibling.name for sibling in missing.parent.iterdir())
        close = difflib.get_close_matches(missing.name, siblings, n=1)
        hint += f" (did you mean '{missing.parent / close[0]}'?)" if close else ""
    return hint


def _raise(error: OSError) -> None:
    raise error
