"""The command line. Each command reads its arguments, calls one function and prints; nothing is decided here.

`train` takes every key of the schema as a flag. A user's mistake is printed as sentences and exits with code 2;
`--debug` shows the traceback instead.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch.distributed.elastic.multiprocessing.errors import record

from fourfold import __version__
from fourfold.checkpoint.store import checkpoint_path, newest_checkpoint
from fourfold.config.flags import parse_flags
from fourfold.config.keys import describe_keys
from fourfold.config.load import dump_config, load_config
from fourfold.config.problems import problems
from fourfold.config.resolve import layout_of, processes_needed, resolve, with_vocab_size
from fourfold.config.schema import Config
from fourfold.cost.params import count_parameters
from fourfold.errors import CheckpointError, ConfigError, FourfoldError
from fourfold.generate.load import load_for_generation
from fourfold.generate.sample import Sampling, generate_tokens
from fourfold.launch.torchrun import launch_local
from fourfold.layout.layout import Layout
from fourfold.layout.stages import PipeStage
from fourfold.mesh.process import (
    count_cores,
    has_gpu,
    is_first_process,
    is_worker,
    join_processes,
    pick_device,
    rank_from_environment,
    world_size_from_environment,
)
from fourfold.train.loop import Outcome, train
from fourfold.train.metrics import log_failure, start_log
from fourfold.train.rehearse import count_built, forecast
from fourfold.train.trial import Trial, run_trials
from fourfold.train.verify import (
    CORPUS,
    TOLERANCE,
    Comparison,
    legal_layouts,
    on_one_process,
    shrink,
    shrink_layout,
)

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
screen = Console(highlight=False)

GROUP_TIMEOUT_S = 600.0
TRIAL_TIMEOUT_S = 120.0
DEFAULT_VOCAB_SIZE = 50304
MOST_PARAMETERS_TO_SHOW = 10**9


@app.callback(invoke_without_command=True)
def top(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    """Pretrain GPT models in four dimensions of parallelism."""
    if version:
        print(f"fourfold {__version__}")
        raise typer.Exit


# A command whose flags are the keys of the schema reads its arguments itself.
FREE_FORM = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@app.command("train", context_settings=FREE_FORM, add_help_option=False)
def train_command(context: typer.Context) -> None:
    """Train a model: fourfold train [CONFIG] [--key value ...] [--dry_run]"""
    arguments, own = take_options(context.args, {"--debug": False, "--dry_run": False, "--help": False, "-h": False})
    if own["--help"] or own["-h"]:
        print_train_help()
        return
    config, world_size = prepare_config(arguments)
    if own["--dry_run"]:
        rehearse(config, world_size)
    elif world_size > 1 and not is_worker():
        warn_about_cores(config, world_size)
        launch_local(world_size, ["train", *arguments], Path(config.engine.output_dir) / "logs")
    else:
        raise typer.Exit(work(config))


def work(config: Config) -> int:
    """Be the only process of a run, or one of several."""
    with join_processes(config.global_.device, GROUP_TIMEOUT_S) as process:
        if process.device.type == "cuda":
            torch.set_float32_matmul_precision("high")
        start_log(Path(config.engine.output_dir), process.rank, process.is_first and not screen.is_terminal)
        outcome = train(config, process, screen)
    if process.is_first:
        conclude(outcome)
    return outcome.exit_code


def take_options(arguments: list[str], defaults: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Split off a command's own options (a bool default: no value follows) from the keys of the schema."""
    rest, own = [], dict(defaults)
    waiting = iter(arguments)
    for argument in waiting:
        name, equals, value = argument.partition("=")
        if name.replace("-", "_").replace("__", "--", 1) in own:
            name = name.replace("-", "_").replace("__", "--", 1)
        if name not in own:
            rest.append(argument)
        elif isinstance(own[name], bool):
            own[name] = True
        else:
            text = value if equals else next(waiting, None)
            if text is None:
                raise ConfigError(f"{name} is not followed by a value; the default is {own[name]}")
            own[name] = read_option(name, text, type(own[name]))
    return rest, own


def read_option(name: str, text: str, kind: type) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(f"{name} = {text} is not a whole number") from None


def prepare_config(arguments: list[str], world_size: int | None = None) -> tuple[Config, int]:
    """The resolved config and its number of processes, or every problem at once."""
    path, overrides = parse_flags(arguments)
    config = load_config(path, overrides)
    world_size = world_size or world_size_from_environment() or processes_needed(config)
    found = problems(config, world_size)
    if found:
        raise ConfigError(found)
    return resolve(config, world_size, has_gpu()), world_size


def warn_about_cores(config: Config, world_size: int) -> None:
    if config.global_.device == "cpu" and world_size > count_cores():
        screen.print(
            f"warning: {world_size} processes share {count_cores()} cores, so this will be slow", style="yellow"
        )


def rehearse(config: Config, world_size: int) -> None:
    """Build one rank of the layout on a fake cluster, and tell what every rank would hold."""
    layout = layout_of(config, world_size)
    config = with_vocab_size(config, DEFAULT_VOCAB_SIZE)
    screen.print(f"{count_parameters(config.model):,} parameters on {world_size:,} processes: {layout}")
    table = Table(
        "pipe rank", "stages: layers", "weights GiB", "gradients GiB", "optimizer GiB", "in all GiB", box=None
    )
    for rank in forecast(config, layout):
        stages = "; ".join(describe_stage(stage) for stage in rank.stages)
        table.add_row(str(rank.pp_rank), stages, *(f"{size / 2**30:.2f}" for size in (*rank.state, rank.state.total)))
    screen.print(table)
    built = count_built(config, layout, rank=0)
    screen.print(f"rank 0 was built: it stores {built:,} parameters. Activations come on top of these bytes.")


def describe_stage(stage: PipeStage) -> str:
    ends = (
        ["embedding"] * stage.has_embedding + [f"{stage.layers[0]} to {stage.layers[-1]}"] + ["head"] * stage.has_head
    )
    return ", ".join(ends)


@app.command("verify", context_settings=FREE_FORM, add_help_option=False)
def verify_command(context: typer.Context) -> None:
    """Prove a layout on this machine's CPU: fourfold verify [CONFIG] [--key value ...] [--layouts all]"""
    defaults = {"--debug": False, "--help": False, "--layouts": "", "--world_size": 0, "--steps": 5, "--most": 8}
    arguments, own = take_options(context.args, defaults)
    if own["--help"]:
        screen.print(VERIFY_HELP, markup=False, soft_wrap=True)
        return
    if own["--layouts"] not in ("", "all"):
        raise ConfigError(f"--layouts = {own['--layouts']} is not all; leave it out to verify the config's own layout")
    # the text itself is not needed: a built-in one stands in for it
    config, world_size = prepare_config([*arguments, "--input_dir", CORPUS], own["--world_size"] or None)
    if own["--layouts"] == "all":
        layouts = legal_layouts(config, world_size)
    else:
        asked = layout_of(config, world_size)
        layouts = {str(asked): shrink_layout(asked, own["--most"])}
    if not verify(config, layouts, own["--steps"]):
        raise typer.Exit(1)


VERIFY_HELP = f"""Usage: fourfold verify [CONFIG] [--key value ...] [--layouts all --world_size N] [--steps N]

Shrinks the model, runs it on one process and on the layout, on this machine's CPU, and compares every step's loss and
gradient norm. Fails (exit code 1) if any differs by more than {TOLERANCE:g} relative.

  --layouts all    every legal layout of --world_size processes, instead of the config's own
  --world_size N   processes, where the config does not say
  --steps N        steps to compare (5)
  --most N         most processes to start here; larger layouts are verified with smaller degrees (8)"""


def verify(config: Config, layouts: dict[str, Layout], steps: int) -> bool:
    small = {name: shrink(config, layout, steps) for name, layout in layouts.items()}
    references = {name: on_one_process(each) for name, each in small.items()}
    with tempfile.TemporaryDirectory() as folder:
        ones = run_configs(references, 1, Path(folder) / "one")
        ours = run_configs(small, next(iter(layouts.values())).world_size, Path(folder) / "layout")
    compared = {name: Comparison(ours[name], ones[name]) for name in layouts}
    for name, comparison in compared.items():
        instead = "" if name == str(layouts[name]) else f", verified as {layouts[name]}"
        screen.print(f"\n{name}{instead}", style="bold")
        if len(compared) == 1:
            print_steps(comparison)
        verdict = "pass" if comparison.passes else "FAIL"
        screen.print(f"worst difference {comparison.worst:.1e} (at most {TOLERANCE:g}): {verdict}")
    return all(comparison.passes for comparison in compared.values())


def print_steps(comparison: Comparison) -> None:
    table = Table("step", "loss, one process", "loss, layout", "norm, one process", "norm, layout", box=None)
    ours, one = comparison.ours, comparison.reference
    rows = zip(one.losses, ours.losses, one.grad_norms, ours.grad_norms, strict=True)
    for step, row in enumerate(rows, start=1):
        table.add_row(str(step), *(f"{value:.7f}" for value in row))
    screen.print(table)


def run_configs(configs: dict[str, Config], world_size: int, folder: Path) -> dict[str, Trial]:
    """Trials of one world size, in one launch."""
    folder.mkdir()
    for number, config in enumerate(configs.values()):
        (folder / f"{number}.yaml").write_text(dump_config(config), encoding="utf-8")
    listing, results = folder / "trials.json", folder / "results.jsonl"
    paths = {name: str(folder / f"{number}.yaml") for number, name in enumerate(configs)}
    listing.write_text(json.dumps(paths), encoding="utf-8")
    with screen.status(f"{len(configs)} x {world_size} processes"):
        launch_local(world_size, ["trials", str(listing), str(results)], folder / "logs")
    entries = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    return {entry.pop("name"): Trial(**entry) for entry in entries}


def conclude(outcome: Outcome) -> None:
    """Where everything lies, how to go on, and a few words from the model."""
    run = outcome.run
    folder = run.output_dir
    if outcome.exit_code:
        screen.print(
            f"\nStopped after step {outcome.step:,} of {run.total_steps:,} and saved. To go on from there:\n"
            f"  fourfold train {folder / 'config.yaml'}",
            soft_wrap=True,
        )
        return
    if count_parameters(run.config.model) <= MOST_PARAMETERS_TO_SHOW:
        screen.print("\nThe model writes:\n", style="bold")
        screen.print(write_sample(outcome), markup=False)
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


def write_sample(outcome: Outcome) -> str:
    """From the checkpoint just saved, as anybody would: the layout that trained it does not matter."""
    run = outcome.run
    gpt, model, tokenizer = load_for_generation(checkpoint_path(run.output_dir, outcome.step), run.process.device)
    prompt, sampling = [int(run.corpus.tokens[0])], Sampling(max_new_tokens=300, temperature=0.8)
    return tokenizer.decode(list(generate_tokens(gpt, model, prompt, sampling, tokenizer.vocab_size)))


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
    return typer.Option(*spellings, help=text, **limits)  # type: ignore[arg-type]


@app.command("generate")
def generate_command(
    source: Annotated[str, typer.Argument(metavar="OUTPUT_DIR", help="A run's output folder, or one checkpoint.")],
    prompt: Annotated[str | None, option("prompt", "The text to continue; by default a first character.")] = None,
    max_new_tokens: Annotated[int, option("max_new_tokens", "How many tokens to add.", min=1)] = 200,
    temperature: Annotated[float, option("temperature", "0 always takes the likeliest token.", min=0.0)] = 1.0,
    top_k: Annotated[int, option("top_k", "Choose among the k likeliest tokens; 0 among all.", min=0)] = 0,
    top_p: Annotated[float, option("top_p", "Choose among the likeliest with this probability.", min=0, max=1)] = 1.0,
    seed: Annotated[int, option("seed", "The same seed gives the same text.", min=0, max=2**63 - 1)] = 1234,
    device: Annotated[Literal["auto", "cpu", "gpu"], option("device", "Where to compute.")] = "auto",
    no_cache: Annotated[
        bool, option("no_cache", "Compute every token again for each new one: slower, same text.")
    ] = False,
    debug: Annotated[bool, option("debug", "Show tracebacks.")] = False,
) -> None:
    """Continue a text with a trained model."""
    path = newest_checkpoint(Path(source))
    if path is None:
        raise CheckpointError(f"{source} holds no checkpoint; name a run's output_dir, or one checkpoint in it")
    if prompt == "":
        raise ConfigError("--prompt is empty; give at least one character to continue, or leave it out")
    gpt, model, tokenizer = load_for_generation(path, pick_device(device, 0))
    sampling = Sampling(max_new_tokens, temperature, top_k, top_p, seed, not no_cache)
    text = tokenizer.decode([0]) if prompt is None else prompt
    tokens = tokenizer.encode(text).tolist()
    print(text, end="", flush=True)
    for token in generate_tokens(gpt, model, tokens, sampling, tokenizer.vocab_size):
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
        # leaves what went wrong where torchrun looks for it, so that the rank that failed first is the one it shows
        record(app)()
    except FourfoldError as error:
        if "--debug" in sys.argv:
            raise
        if is_first_process():
            for sentence in str(error).splitlines():
                print(f"error: {sentence}", file=sys.stderr)
        sys.exit(error.exit_code)
    except Exception:
        if not is_worker():
            raise
        log_failure(rank_from_environment())
        sys.exit(1)
