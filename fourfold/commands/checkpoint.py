"""`fourfold checkpoint list|verify|inspect DIR`: what lies in an output folder, whether it is sound, what is in it."""

from math import prod
from typing import Annotated

import typer
from rich.table import Table

from fourfold.checkpoint.manifest import DamagedError, read_manifest
from fourfold.checkpoint.paths import AnyPath, locate
from fourfold.checkpoint.store import (
    best_checkpoint,
    complete_checkpoints,
    is_complete,
    load_index,
    load_progress,
    verify_checkpoint,
)
from fourfold.checkpoint.texts import load_saved_config
from fourfold.commands.options import screen
from fourfold.config.load import SHAPE_KEYS
from fourfold.errors import CheckpointError

Folder = Annotated[str, typer.Argument(metavar="DIR", help="A run's output folder, or one checkpoint; also s3://...")]

checkpoint_app = typer.Typer(no_args_is_help=True, help="Look at checkpoints.")


def found_in(folder: str) -> list[AnyPath]:
    path = locate(folder)
    found = [path] if is_complete(path) else complete_checkpoints(path)
    if not found:
        raise CheckpointError(f"{folder} holds no checkpoint; name a run's output_dir, or one checkpoint in it")
    return found


@checkpoint_app.command("list")
def list_command(folder: Folder) -> None:
    """Every complete checkpoint: step, size, evaluation loss. Contents are not read; `verify` does."""
    table = Table("checkpoint", "step", "MiB", "files", "evaluation loss", box=None)
    paths = found_in(folder)
    best = best_checkpoint(paths)
    for path in paths:
        try:
            manifest = read_manifest(path)
            loss = load_progress(manifest).eval_loss
        except CheckpointError as error:
            what = "damaged" if isinstance(error, DamagedError) else "unreadable"
            table.add_row(str(path), what, "", "", str(error))
            continue
        size = sum(entry.bytes for entry in manifest.files.values()) / 2**20
        shown = "" if loss is None else f"{loss:.4f}{' (best)' if path == best else ''}"
        table.add_row(str(path), f"{manifest.step:,}", f"{size:,.1f}", str(len(manifest.files)), shown)
    screen.print(table, soft_wrap=True)


@checkpoint_app.command("verify")
def verify_command(folder: Folder) -> None:
    """Read every byte of every checkpoint and compare it with its manifest; exit code 2 if one is damaged."""
    problems = []
    for path in found_in(folder):
        try:
            manifest = verify_checkpoint(path)
        except CheckpointError as error:
            problems.append(str(error))
            screen.print(f"{path}: damaged", soft_wrap=True)
        else:
            screen.print(f"{path}: sound, {len(manifest.files)} files", soft_wrap=True)
    if problems:
        raise CheckpointError("\n".join(problems))


@checkpoint_app.command("inspect")
def inspect_command(folder: Folder) -> None:
    """What the newest checkpoint holds: its model, the layout that wrote it, where the run stood, every tensor."""
    manifest = read_manifest(found_in(folder)[-1])
    config, progress, index = load_saved_config(manifest), load_progress(manifest), load_index(manifest)
    distributed = config.distributed
    screen.print(f"{manifest.path}", style="bold", soft_wrap=True)
    for what, value in {
        **{key: getattr(config.model, key) for key in SHAPE_KEYS},
        "written on": f"pp{distributed.pp_degree} x dp{distributed.dp_degree} x "
        f"sharding{distributed.sharding.sharding_degree} x mp{distributed.mp_degree}",
        "steps": f"{progress.step:,}, of which {progress.updates:,} changed the weights",
        "evaluation loss": progress.eval_loss,
        "loss scale": progress.loss_scale,
        "text": f"{config.data.input_dir} ({progress.corpus})",
    }.items():
        screen.print(f"  {what:<24} {value}", soft_wrap=True, markup=False)
    table = Table("tensor", "dtype", "shape", "numbers", "pieces", box=None)
    for name, entry in index.items():
        shape = " x ".join(map(str, entry["shape"]))
        table.add_row(name, entry["dtype"], shape, f"{prod(entry['shape']):,}", str(len(entry["pieces"])))
    screen.print(table, soft_wrap=True)
