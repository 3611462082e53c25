"""From `data.input_dir` to tokens and samples: reading text, and tying text, tokenizer and split together.

Every way in which an input can be unsuitable is refused here with a sentence, before anything is built. Nothing is
cached on disk: a character corpus is read and encoded faster than a stale cache is noticed.
"""

import difflib
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy.typing as npt

from fourfold.config.schema import Data
from fourfold.data.order import Splits, split_samples
from fourfold.data.tokenizer import TOKENIZERS, Tokenizer
from fourfold.errors import DataError

BUILTIN = "builtin:"
TEXT_SUFFIXES = frozenset(("", ".md", ".py", ".rst", ".tex", ".text", ".txt"))
CHOICES = "give a text file, a folder of text files, or builtin:pydoc"


class Corpus(NamedTuple):
    """A text as tokens, and which spans of it are samples of which part."""

    tokens: npt.NDArray[Any]
    tokenizer: Tokenizer
    splits: Splits
    num_characters: int
    passed_over: list[Path]  # files of a folder that are not text by their suffix, for the trainer to mention
    fingerprint: str  # changes with the tokens and with the tokenizer: a resumed run can tell that its text changed


def load_corpus(data: Data, seed: int, needs_valid: bool, tokenizer: Tokenizer | None = None) -> Corpus:
    """Reads, encodes and splits the text. A tokenizer given (a checkpoint's) must be the one the text would get."""
    if not data.input_dir:
        raise DataError(f"data.input_dir is not set; {CHOICES}")
    text = read_text(data.input_dir, data.truncate)
    own = TOKENIZERS[data.tokenizer].from_text(text)
    if tokenizer is not None and tokenizer != own:
        raise DataError(_other_vocabulary(data.input_dir, own, tokenizer))
    tokenizer = tokenizer or own
    tokens = tokenizer.encode(text)
    stride = data.max_seq_len if data.sample_stride == "auto" else data.sample_stride
    splits = split_samples(len(tokens), data.max_seq_len, stride, data.split, data.split_by, seed, needs_valid)
    passed_over = find_text_files(data.input_dir)[1] if Path(data.input_dir).is_dir() else []
    digest = hashlib.blake2b(tokenizer.fingerprint.encode() + b"\0", digest_size=8)
    digest.update(tokens.data)
    return Corpus(tokens, tokenizer, splits, len(text), passed_over, digest.hexdigest())


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
    raise DataError(f"data.input_dir = '{input_dir}' does not exist{_nearest(path)}; {CHOICES}")


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


def _nearest(path: Path) -> str:
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


def _other_vocabulary(input_dir: str, own: Tokenizer, given: Tokenizer) -> str:
    new = sorted(set(own.characters) - set(given.characters))
    absent = sorted(set(given.characters) - set(own.characters))
    differences = [
        f"{title} {', '.join(map(ascii, characters[:8]))}{' and more' if len(characters) > 8 else ''}"
        for title, characters in (("new are", new), ("missing are", absent))
        if characters
    ]
    return (
        f"data.input_dir = '{input_dir}' has {own.vocab_size} different characters, not the {given.vocab_size} of the "
        f"checkpoint's tokenizer: {'; '.join(differences) or 'their order differs'}; go on with the checkpoint's own "
        "text (same data.input_dir and data.truncate), or start anew with engine.resume = never"
    )


def _raise(error: OSError) -> None:
    raise error
