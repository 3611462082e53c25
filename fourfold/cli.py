"""The command line. Each command reads its arguments, calls one function and prints; nothing is decided here.

`train` takes every key of the schema as a flag. A user's mistake is printed as sentences and exits with code 2; `--debug`
shows the traceback instead.
"""

import json
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from fourfold import __version__
from fourfold.checkpoint.store import find_checkpoint
from fourfold.config.flags import parse_flags
from fourfold.config.keys import describe_keys
from fourfold.config.load import load_config
from fourfold.config.problems import problems
from fourfold.config.resolve import processes_needed, resolve
from fourfold.config.schema import Config
from fourfold.errors import ConfigError, FourfoldError
from fourfold.generate.load import load_for_generation
from fourfold.generate.sample import Sampling, generate_tokens
from fourfold.mesh.process import has_gpu, join_processes, pick_device, world_size_from_environment
from fourfold.train.loop import Outcome, train
from fourfold.train.metrics import start_log
from fourfold.train.trial import run_trials

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
screen = Console(highlight=False)

GROUP_TIMEOUT_S = 600.0
TRIAL_TIMEOUT_S = 120.0


@app.callback(invoke_without_command=True)
def top(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    """Pretrain GPT models in four dimensions of parallelism."""
    if version:
        print(f"fourfold {__version__}")
        raise typer.Exit


@app.command(
    "train",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
def train_command(context: typer.Context) -> None:
    """Train a model: fourfold train [CONFIG] [--key value ...]"""
    arguments = [argument for argument in context.args if argument != "--debug"]
    if "--help" in arguments or "-h" in arguments:
        print_train_help()
        return
    config = prepare_config(arguments)
    with join_processes(config.global_.device, GROUP_TIMEOUT_S) as process:
        if process.device.type == "cuda":
            torch.set_float32_matmul_precision("high")
        start_log(Path(config.engine.output_dir), process.rank, process.is_first and not screen.is_terminal)
        outcome = train(config, process, screen)
        if process.is_first:
            conclude(outcome)
    raise typer.Exit(outcome.exit_code)


def prepare_config(arguments: list[str]) -> Config:
    path, overrides = parse_flags(arguments)
    config = load_config(path, overrides)
    world_size = world_size_from_environment() or processes_needed(config)
    found = problems(config, world_size)
    if world_size > 1:
        found.append(
            f"the layout needs {world_size} processes, and this version trains in one; set dp_degree, sharding_degree, "
            "mp_degree and pp_degree to 1"
        )
    if found:
        raise ConfigError(found)
    return resolve(config, world_size, has_gpu())


def conclude(outcome: Outcome) -> None:
    """Where everything lies, how to go on, and a few words from the model."""
    run = outcome.run
    folder = run.output_dir
    if outcome.exit_code:
        screen.print(
            f"\nStopped after step {outcome.step:,} of {run.total_steps:,}, saved. The same command goes on from there:\n"
            f"  fourfold train {folder / 'config.yaml'}",
            soft_wrap=True,
        )
        return
    tokenizer = run.corpus.tokenizer
    prompt = [int(run.corpus.tokens[0])]
    tokens = list(
        generate_tokens(run.parallel.parts[0], run.config.model, prompt, Sampling(max_new_tokens=300, temperature=0.8))
    )
    screen.print("\nThe model writes:\n", style="bold")
    screen.print(tokenizer.decode(tokens), markup=False)
    loss = "" if outcome.eval_loss is None else f", validation loss {outcome.eval_loss:.4f} nats per token"
    screen.print(f"\n{outcome.step:,} steps done{loss}.", style="bold")
    for what, where in (
        ("checkpoints", folder / "checkpoints"),
        ("metrics", folder / "metrics.jsonl"),
        ("curves", f"tensorboard --logdir {folder / 'tensorboard'}"),
        ("config", folder / "config.yaml"),
        ("more text", f'fourfold generate {folder} --prompt "..."'),
    ):
        screen.print(f"  {what:<12} {where}", soft_wrap=True, markup=False)


def print_train_help() -> None:
    screen.print("Usage: fourfold train [CONFIG] [-c CONFIG] [-o section.key=value] [--key value ...] [--debug]\n")
    screen.print(
        "Every key of the config file is a flag; booleans may be bare. The keys, with their defaults:", soft_wrap=True
    )
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    section = ""
    for leaf in describe_keys():
        if leaf.section != section:
            section = leaf.section
            table.add_row("")
            table.add_row(f"[bold]{section}[/bold]")
        table.add_row(f"--{leaf.key}", f"{leaf.doc} ({leaf.choices}; default {leaf.default})".replace("[", r"\["))
    screen.print(table)


def option(name: str, text: str, **limits: float) -> typer.models.OptionInfo:
    """An option spelled like the config's keys, with dashes accepted too."""
    spellings = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
    return typer.Option(*spellings, help=text, **limits)  # type: ignore[arg-type, no-any-return]


@app.command("generate")
def generate_command(
    source: Annotated[str, typer.Argument(metavar="OUTPUT_DIR", help="A run's output folder, or one checkpoint.")],
    prompt: Annotated[str, option("prompt", "The text to continue.")] = "\n",
    max_new_tokens: Annotated[int, option("max_new_tokens", "How many tokens to add.", min=1)] = 200,
    temperature: Annotated[float, option("temperature", "0 always takes the likeliest token.", min=0.0)] = 1.0,
    top_k: Annotated[int, option("top_k", "Choose among the k likeliest tokens; 0 among all.", min=0)] = 0,
    top_p: Annotated[float, option("top_p", "Choose among the likeliest with this probability.", min=0, max=1)] = 1.0,
    seed: Annotated[int, option("seed", "The same seed gives the same text.")] = 1234,
    device: Annotated[str, option("device", "auto, cpu or gpu.")] = "auto",
    no_cache: Annotated[
        bool, option("no_cache", "Compute every token again for each new one: slower, same text.")
    ] = False,
    debug: Annotated[bool, option("debug", "Show tracebacks.")] = False,
) -> None:
    """Continue a text with a trained model."""
    path = find_checkpoint(Path(source), "auto") or find_checkpoint(Path(source), source)
    assert path is not None
    gpt, model, tokenizer = load_for_generation(path, pick_device(device, 0))
    sampling = Sampling(max_new_tokens, temperature, top_k, top_p, seed, not no_cache)
    print(prompt, end="", flush=True)
    for token in generate_tokens(gpt, model, tokenizer.encode(prompt).tolist(), sampling):
        print(tokenizer.decode([token]), end="", flush=True)
    print()


@app.command("trials", hidden=True)
def trials_command(file: Path, results: Path) -> None:
    """Run the trials of a JSON file {name: config path} as one of the workers that `verify` starts."""
    configs = {name: Path(path) for name, path in json.loads(file.read_text(encoding="utf-8")).items()}
    with join_processes("cpu", TRIAL_TIMEOUT_S) as process:
        run_trials(configs, process, results)


def main() -> None:
    try:
        app()
    except FourfoldError as error:
        if "--debug" in sys.argv:
            raise
        for sentence in str(error).splitlines():
            print(f"error: {sentence}", file=sys.stderr)
        sys.exit(error.exit_code)
