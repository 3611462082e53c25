"""`fourfold prepare`: raw text to token files."""

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from fourfold.commands.options import option, screen
from fourfold.data.bpe import BpeTokenizer
from fourfold.data.documents import ENDS, Input, find_inputs, read_texts
from fourfold.data.formats.prepared import MANIFEST
from fourfold.data.prepare import Options, Tally, Told, prepare, remove_prepared
from fourfold.data.tokenizer import CharacterTokenizer, Tokenizer, open_tokenizer
from fourfold.errors import ConfigError, DataError
from fourfold.mesh.process import count_cores

NO_EOS = typer.Option("--no_append_eos/--append_eos", "--no-append-eos/--append-eos", help="End documents without it.")


def prepare_command(
    inputs: Annotated[list[str], typer.Argument(metavar="INPUT...", help=f"Files or folders: {ENDS}.")],
    output_prefix: Annotated[str, option("output_prefix", "What the names of the files written begin with.")],
    tokenizer: Annotated[
        str, option("tokenizer", "characters, or a tokenizer.json, ranks file, or folder with vocab and merges.")
    ],
    json_key: Annotated[str, option("json_key", "The key (or column) that holds the text.")] = "text",
    separator: Annotated[
        str | None, option("separator", "In .txt, a line of this ends a document; '' for a blank one.")
    ] = None,
    no_append_eos: Annotated[bool, NO_EOS] = False,
    eos_token: Annotated[str | None, option("eos_token", "The end-of-document token, if its name is unusual.")] = None,
    workers: Annotated[int, option("workers", "Processes that encode; 0 for one per core.", min=0)] = 0,
    shard_tokens: Annotated[int, option("shard_tokens", "Tokens per file, roughly.", min=1)] = 100_000_000,
    skip_bad: Annotated[int, option("skip_bad", "Pass over so many bad documents; -1 for any number.", min=-1)] = 0,
    overwrite: Annotated[bool, option("overwrite", "Remove what is there under this prefix first.")] = False,
    debug: Annotated[bool, option("debug", "Show tracebacks.")] = False,
) -> None:
    """Turn raw text into token files for training. Run again after an interruption, it goes on where it stopped."""
    found = find_inputs(inputs)
    prefix = Path(output_prefix)
    if prefix.is_dir() or not prefix.name:
        raise ConfigError(
            f"--output_prefix = {output_prefix} is a folder; add the beginning of a name, as in {prefix}/corpus"
        )
    options = Options(json_key, separator, not no_append_eos, shard_tokens, skip_bad, workers or count_cores())
    if overwrite:
        remove_prepared(prefix)
    chosen = pick_tokenizer(tokenizer, found, options, eos_token)
    began_s = time.perf_counter()
    with progress_bar() as progress:
        total = sum(each.num_bytes for each in found)
        task = progress.add_task("", total=total, documents=0, tokens=0, speed=0.0)
        before: list[int] = []

        def tell(told: Told) -> None:
            before.append(told.read_bytes)  # the first is what an earlier call has done
            speed = (told.read_bytes - before[0]) / 1e6 / max(1e-9, time.perf_counter() - began_s)
            progress.update(task, completed=told.read_bytes, documents=told.documents, tokens=told.tokens, speed=speed)

        tally = prepare(found, prefix, chosen, options, tell)
    conclude(tally, prefix, chosen, time.perf_counter() - began_s)


def pick_tokenizer(name: str, inputs: list[Input], options: Options, eos_token: str | None) -> Tokenizer:
    if name == "characters":
        # the vocabulary takes a pass of its own; what is bad is told in the second
        seen: set[str] = set()
        for text in read_texts(inputs, options.json_key, options.separator, skips_bad=True):
            seen.update(text)
        return CharacterTokenizer("".join(sorted(seen)), options.append_eos)
    tokenizer = open_tokenizer(name)
    if eos_token is None:
        return tokenizer
    named = BpeTokenizer(tokenizer.to_json()["tokenizer"], eos_token) if isinstance(tokenizer, BpeTokenizer) else None
    if named is None or named.eos_id is None:
        raise DataError(f"--eos_token = {eos_token} is not a token of '{name}'; name one that is, or --no_append_eos")
    return named


def progress_bar() -> Progress:
    return Progress(
        BarColumn(),
        TaskProgressColumn(),
        TextColumn(
            "{task.fields[documents]:,} documents, {task.fields[tokens]:,} tokens, {task.fields[speed]:.1f} MB/s"
        ),
        TextColumn("ETA"),
        TimeRemainingColumn(),
        console=screen,
        transient=True,
        disable=not screen.is_terminal,
    )


def conclude(tally: Tally, prefix: Path, tokenizer: Tokenizer, took_s: float) -> None:
    ratio = tally.tokens / max(1, tally.text_bytes)
    screen.print(
        f"{tally.documents:,} documents, {tally.tokens:,} tokens in {len(tally.shards)} shards, "
        f"{ratio:.3f} tokens per byte, {tally.skipped.total():,} skipped; {tally.text_bytes / 1e6:,.1f} MB of text "
        f"in {took_s:.1f} s",
        soft_wrap=True,
    )
    for reason, count in tally.skipped.most_common(10):
        screen.print(f"  skipped {count:,}: {reason}", markup=False, soft_wrap=True)
    screen.print(f"written: {prefix}{MANIFEST}; to train on it:", markup=False, soft_wrap=True)
    screen.print(f"  fourfold train CONFIG --input_dir {prefix}", markup=False, soft_wrap=True)
