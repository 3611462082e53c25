"""`fourfold tokenizer train`: a byte-level BPE of one's own."""

from pathlib import Path
from typing import Annotated

import typer

from fourfold.commands.options import option, screen
from fourfold.data.bpe import train_bpe
from fourfold.data.documents import ENDS, find_inputs, read_texts
from fourfold.data.tokenizer import load_tokenizer
from fourfold.errors import DataError

tokenizer_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Tokenizers of one's own.")


@tokenizer_app.callback()
def tokenizer_group() -> None:
    """Tokenizers of one's own."""


@tokenizer_app.command("train")
def tokenizer_train_command(
    inputs: Annotated[list[str], typer.Argument(metavar="INPUT...", help=f"Files or folders: {ENDS}.")],
    vocab_size: Annotated[int, option("vocab_size", "Tokens in all, the end of a document included.", min=1)] = 32000,
    output: Annotated[str, option("output", "The file to write.")] = "tokenizer.json",
    json_key: Annotated[str, option("json_key", "The key (or column) that holds the text.")] = "text",
    debug: Annotated[bool, option("debug", "Show tracebacks.")] = False,
) -> None:
    """Train a byte-level BPE and write it as a Hugging Face tokenizer.json."""
    texts = read_texts(find_inputs(inputs), json_key, None)
    content = train_bpe(texts, vocab_size, screen.is_terminal)
    path = Path(output)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n", encoding="utf-8")
    except OSError as error:
        raise DataError(f"'{path}' cannot be written ({error.strerror}); write another --output") from error
    tokenizer = load_tokenizer(path)
    screen.print(f"{path}: {tokenizer.vocab_size:,} tokens, the last of them ends a document", markup=False)
    if tokenizer.vocab_size < vocab_size:
        screen.print("the input is too small for more; give more text for a larger vocabulary")
