"""`fourfold data inspect`: what is in a corpus, and what a step sees of it."""

import typer
from rich.table import Table

from fourfold.commands.options import FREE_FORM, screen, take_options
from fourfold.config.flags import parse_flags
from fourfold.config.load import load_config
from fourfold.config.schema import Config
from fourfold.data.corpus import Corpus, load_corpus
from fourfold.data.inspect import document_lengths, histogram, members, rows_of_step, sample_texts
from fourfold.errors import ConfigError

data_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Look at data.")

INSPECT_HELP = """Usage: fourfold data inspect PATH [--step N] [--samples N] [--key value ...]

PATH is a corpus, or the YAML config of a run; every key of a config is a flag (--max_seq_len, --seed, --split ...).

  --step N      the exact rows of the run's N-th step, in full
  --samples N   decoded samples to show (3)
  --width N     characters of each to show (200)"""


@data_app.callback()
def data_group() -> None:
    """Look at data."""


@data_app.command("inspect", context_settings=FREE_FORM, add_help_option=False)
def inspect_command(context: typer.Context) -> None:
    """Counts, lengths of documents, decoded samples, and the exact rows of a step."""
    defaults = {"--debug": False, "--help": False, "--step": 0, "--samples": 3, "--width": 200}
    arguments, own = take_options(context.args, defaults)
    if own["--help"] or not arguments:
        screen.print(INSPECT_HELP, markup=False, soft_wrap=True)
        return
    path, overrides = parse_flags(arguments)
    is_config = path is None or path.endswith((".yaml", ".yml"))
    config = load_config(
        path if is_config else None, overrides if is_config else [("input_dir", path or ""), *overrides]
    )
    if own["--step"] < 0 or own["--samples"] < 0 or own["--width"] < 1:
        raise ConfigError("--step and --samples must be 0 or more, --width 1 or more")
    # without a config to say so, evaluation is not asked of a corpus that is only looked at
    needs_valid = is_config and config.engine.eval_iters != 0
    corpus = load_corpus(config.data, config.global_.seed, needs_valid, None, config.model.vocab_size)
    describe(corpus, config)
    if own["--step"]:
        show_step(corpus, config, own["--step"], own["--width"])
    else:
        for number, text in enumerate(sample_texts(corpus, own["--samples"])):
            screen.print(f"\nsample {number}", style="bold")
            screen.print(shortened(text, own["--width"]), markup=False, soft_wrap=True)


def describe(corpus: Corpus, config: Config) -> None:
    screen.print(corpus.description, markup=False, soft_wrap=True)
    tokenizer = corpus.tokenizer
    screen.print(
        f"tokenizer {tokenizer.to_json()['type']}, {tokenizer.vocab_size:,} tokens, end of document "
        f"{'unknown' if tokenizer.eos_id is None else tokenizer.eos_id}; corpus {corpus.fingerprint}"
    )
    table = Table("part", "weight", "documents", "tokens", f"samples of {config.data.max_seq_len}", box=None)
    for name, part in corpus.splits._asdict().items():
        for member in members(part):
            documents = len(member.source.part.lengths) if hasattr(member.source, "part") else None
            tokens = member.source.num_tokens if hasattr(member.source, "num_tokens") else None
            counts = ("" if count is None else f"{count:,}" for count in (documents, tokens))
            table.add_row(name, f"{member.weight:.3f}", *counts, f"{len(member.source):,}")
    screen.print(table)
    lengths = document_lengths(corpus)
    if len(lengths):
        mean = lengths.mean()
        screen.print(
            f"\ndocuments of {lengths.min():,} to {lengths.max():,} tokens, {mean:,.1f} on average", style="bold"
        )
        bars = histogram(lengths)
        most = max(count for _, _, count in bars)
        for low, below, count in bars:
            bar = "#" * -(-count * 40 // most)
            screen.print(f"  {low:>12,} to {below - 1:>12,}  {count:>12,}  {bar}", markup=False)


def show_step(corpus: Corpus, config: Config, step: int, width: int) -> None:
    screen.print(f"\nstep {step}, seed {config.global_.seed}", style="bold")
    for row in rows_of_step(corpus, step, config.global_.global_batch_size):
        about = f"row {row.row}: {len(row.tokens)} tokens"
        about += f" of {row.documents} documents" if row.documents else ""
        about += f", member {row.member}" if hasattr(corpus.splits.train, "sources") else ""
        ids = " ".join(map(str, row.tokens.tolist()))
        screen.print(f"{about}\n  {shortened(ids, width)}", markup=False, soft_wrap=True)
        screen.print(f"  {shortened(corpus.tokenizer.decode(row.tokens), width)}", markup=False, soft_wrap=True)


def shortened(text: str, width: int) -> str:
    shown = repr(text)[1:-1]
    return shown if len(shown) <= width else f"{shown[:width]} ..."
