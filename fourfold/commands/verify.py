"""`fourfold verify`: the same numbers from one process and from the layout, before anybody rents a cluster."""

import json
import tempfile
from pathlib import Path

import typer
from rich.table import Table

from fourfold.commands.options import prepare_config, screen, take_options
from fourfold.config.load import dump_config
from fourfold.config.resolve import layout_of
from fourfold.config.schema import Config
from fourfold.errors import ConfigError
from fourfold.launch.torchrun import launch_local
from fourfold.layout.layout import Layout
from fourfold.mesh.process import join_processes
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

TRIAL_TIMEOUT_S = 120.0


def verify_command(context: typer.Context) -> None:
    """Prove a layout on this machine's CPU: fourfold verify [CONFIG] [--key value ...] [--layouts all]"""
    defaults = {"--debug": False, "--help": False, "--layouts": "", "--world_size": 0, "--steps": 5, "--most": 8}
    arguments, own = take_options(context.args, defaults)
    if own["--help"]:
        screen.print(VERIFY_HELP, markup=False, soft_wrap=True)
        return
    if own["--layouts"] not in ("", "all"):
        raise ConfigError(f"--layouts = {own['--layouts']} is not all; leave it out to verify the config's own layout")
    for name in ("--steps", "--most"):
        if own[name] < 1:
            raise ConfigError(f"{name} = {own[name]} is not a whole number of at least 1")
    is_all = own["--layouts"] == "all"
    # the text itself is not needed: a built-in one stands in for it
    config, processes = prepare_config(
        [*arguments, "--input_dir", CORPUS], None if is_all else own["--world_size"] or None
    )
    world_size = own["--world_size"] or processes
    if is_all:
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


def trials_command(file: Path, results: Path) -> None:
    """Run the trials of a JSON file {name: config path} as one of the workers that `verify` starts."""
    configs = {name: Path(path) for name, path in json.loads(file.read_text(encoding="utf-8")).items()}
    with join_processes("cpu", TRIAL_TIMEOUT_S) as process:
        run_trials(configs, process, results)
