"""`fourfold train`: in this process, as one of several, or, where several are needed, by starting them."""

import torch
import typer
from rich.table import Table

from fourfold.checkpoint.paths import local_folder, locate
from fourfold.checkpoint.store import checkpoint_path, is_complete
from fourfold.commands.options import prepare_config, screen, take_options
from fourfold.config.keys import describe_keys
from fourfold.config.resolve import layout_of, with_vocab_size
from fourfold.config.schema import Config
from fourfold.cost.params import count_parameters
from fourfold.errors import CheckpointError, DataError, FourfoldError
from fourfold.generate.load import load_for_generation
from fourfold.generate.sample import Sampling, generate_tokens
from fourfold.launch.torchrun import launch_local
from fourfold.layout.stages import PipeStage
from fourfold.mesh.process import count_cores, is_worker, join_processes, wait_for_all
from fourfold.train.loop import Outcome, train
from fourfold.train.metrics import start_log
from fourfold.train.rehearse import count_built, forecast
from fourfold.train.verify import CORPUS

GROUP_TIMEOUT_S = 600.0
DEFAULT_VOCAB_SIZE = 50304
MOST_PARAMETERS_TO_SHOW = 10**9
OPENING = "The "


def train_command(context: typer.Context) -> None:
    """Train a model: fourfold train [CONFIG] [--key value ...] [--dry_run]"""
    arguments, own = take_options(context.args, {"--debug": False, "--dry_run": False, "--help": False, "-h": False})
    if own["--help"] or own["-h"]:
        print_train_help()
        return
    if own["--dry_run"]:  # the text is not needed for it
        rehearse(*prepare_config([*arguments, "--input_dir", CORPUS]))
        return
    config, world_size = prepare_config(arguments)
    refuse_checkpoint(config.engine.output_dir)
    if world_size > 1 and not is_worker():
        warn_about_cores(config, world_size)
        debug = ["--debug"] if own["--debug"] else []
        launch_local(world_size, ["train", *arguments, *debug], local_folder(config.engine.output_dir) / "logs")
    else:
        raise typer.Exit(work(config))


def work(config: Config) -> int:
    """Be the only process of a run, or one of several."""
    with join_processes(config.global_.device, GROUP_TIMEOUT_S) as process:
        start_log(local_folder(config.engine.output_dir), process.rank, screen if process.is_first else None)
        outcome = train(config, process, screen)
        if process.is_first and outcome.exit_code:
            conclude(outcome)
        wait_for_all()  # whoever leaves first with an exit code ends the others
    if process.is_first and not outcome.exit_code:  # nobody waits for the sample
        conclude(outcome)
    return outcome.exit_code


def refuse_checkpoint(output_dir: str) -> None:
    if is_complete(locate(output_dir)):
        raise CheckpointError(
            f"engine.output_dir = {output_dir} is itself a checkpoint, which is never written to; write another "
            f"folder, and engine.resume = {output_dir} to go on from it"
        )


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


def conclude(outcome: Outcome) -> None:
    """Where everything lies, how to go on, and a few words from the model."""
    run = outcome.run
    folder = run.output_dir
    if outcome.exit_code:
        screen.print(
            f"\nStopped after step {outcome.step:,} of {run.total_steps:,} and saved. To go on from there:\n"
            f"  fourfold train {folder / 'config.yaml'}"
            + ("" if run.config.engine.resume == "auto" else " --resume auto"),
            soft_wrap=True,
        )
        return
    if count_parameters(run.config.model) <= MOST_PARAMETERS_TO_SHOW:
        try:
            sample = write_sample(outcome)
        except (torch.OutOfMemoryError, FourfoldError) as error:
            screen.print(f"\nA sample is left out: {str(error).splitlines()[0]}", markup=False, soft_wrap=True)
        else:
            screen.print("\nThe model writes:\n", style="bold")
            screen.print(sample, markup=False)
    loss = "" if outcome.eval_loss is None else f", validation loss {outcome.eval_loss:.4f} nats per token"
    screen.print(f"\n{outcome.step:,} steps done{loss}.", style="bold")
    for what, where in (
        ("checkpoints", locate(run.config.engine.output_dir) / "checkpoints"),
        ("metrics", folder / "metrics.jsonl"),
        ("curves", f"tensorboard --logdir {folder / 'tensorboard'}"),
        ("config", folder / "config.yaml"),
        ("more text", f'fourfold generate {run.config.engine.output_dir} --prompt "..."'),
    ):
        screen.print(f"  {what:<12} {where}", soft_wrap=True, markup=False)


def write_sample(outcome: Outcome) -> str:
    """From the checkpoint just saved, as anybody would: the layout that trained it does not matter."""
    run = outcome.run
    had_nothing_to_do = outcome.step == run.first_step and run.resumed_from
    path = had_nothing_to_do or checkpoint_path(locate(run.config.engine.output_dir), outcome.step)
    gpt, model, tokenizer = load_for_generation(path, run.process.device)
    try:
        prompt = tokenizer.encode(OPENING).tolist()
    except DataError:  # a text without these letters
        prompt = [run.corpus.first_token]
    sampling = Sampling(max_new_tokens=300, temperature=0.8)
    return tokenizer.decode([*prompt, *generate_tokens(gpt, model, prompt, sampling, tokenizer.vocab_size)])


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
        table.add_row(f"--{leaf.key}", f"{leaf.doc} ({leaf.choices}; default {leaf.default_text})".replace("[", r"\["))
    screen.print(table)
