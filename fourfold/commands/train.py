"""`fourfold train`: in this process, as one of several, or, where several are needed, by starting them."""

from pathlib import Path

import torch
import typer
from rich.table import Table

from fourfold.checkpoint.paths import local_folder, locate
from fourfold.checkpoint.store import checkpoint_path, is_complete
from fourfold.commands.options import prepare_config, screen, take_options
from fourfold.config.flags import parse_flags
from fourfold.config.keys import describe_keys
from fourfold.config.load import load_config
from fourfold.config.resolve import is_any_inferred, layout_of, processes_needed, with_vocab_size
from fourfold.config.schema import Config
from fourfold.cost.params import count_parameters
from fourfold.errors import CheckpointError, ConfigError, DataError, FourfoldError
from fourfold.generate.load import load_for_generation
from fourfold.generate.sample import Sampling, generate_tokens
from fourfold.launch.slurm import adopt_ranks, read_step, role_in
from fourfold.launch.torchrun import Machines, end_with_launcher, launch_local
from fourfold.layout.stages import PipeStage
from fourfold.mesh.fingerprint import fingerprint_of
from fourfold.mesh.process import count_cores, is_worker, join_processes, keep_compiled
from fourfold.mesh.shared import check_shared
from fourfold.train.fit import GIB, is_out_of_memory, out_of_memory
from fourfold.train.loop import Outcome, train
from fourfold.train.metrics import log, start_log
from fourfold.train.rehearse import choose_here, count_built, forecast
from fourfold.train.verify import CORPUS

DEFAULT_VOCAB_SIZE = 50304
MOST_PARAMETERS_TO_SHOW = 10**9
OPENING = "The "
OPTIONS = {"--debug": False, "--dry_run": False, "--help": False, "-h": False, "--log_dir": "", "--max_restarts": 0}


def train_command(context: typer.Context) -> None:
    """Train a model: fourfold train [CONFIG] [--key value ...] [--dry_run] [--max_restarts N]"""
    arguments, own = take_options(context.args, OPTIONS)
    if own["--help"] or own["-h"]:
        print_train_help()
        return
    if own["--dry_run"]:  # the text is not needed for it
        rehearse(*prepare_config([*arguments, "--input_dir", CORPUS], leaves_micro_batch=True))
        return
    machines = place_in_slurm(arguments)
    config, world_size = prepare_config(arguments, leaves_micro_batch=True)
    refuse_checkpoint(config.engine.output_dir)
    if own["--max_restarts"] < 0:
        raise ConfigError(f"--max_restarts = {own['--max_restarts']} is not a whole number of at least 0")
    log_dir = Path(own["--log_dir"] or local_folder(config.engine.output_dir) / "logs")
    # alone, it needs a launcher only to be started again
    if (world_size > 1 or own["--max_restarts"]) and not is_worker():
        here = world_size // machines.count
        warn_about_cores(config, here)
        debug = ["--debug"] if own["--debug"] else []
        launched = ["train", *arguments, *debug, "--log_dir", str(log_dir)]
        launch_local(here, launched, log_dir, own["--max_restarts"], machines)
    else:
        end_with_launcher()
        raise typer.Exit(work(config, log_dir))


def place_in_slurm(arguments: list[str]) -> Machines:
    """In a step of Slurm's: become one of its ranks, or learn which machines to start processes on."""
    step = None if is_worker() else read_step()
    if step is None:
        return Machines()
    config = load_config(*parse_flags(arguments))
    if role_in(step, step.tasks if is_any_inferred(config) else processes_needed(config)) == "worker":
        adopt_ranks(step)
    return Machines(step.nodes, step.node_rank == 0, step.address, step.port, step.job_id)


def work(config: Config, log_dir: Path) -> int:
    """Be the only process of a run, or one of several."""
    with join_processes(config.global_.device, config.distributed.timeout, fingerprint_of(config)) as process:
        output = locate(config.engine.output_dir)
        if isinstance(output, Path):
            check_shared(output)
        start_log(log_dir, process.rank, screen if process.is_first else None)
        for choice in process.choices:
            log.info(choice)
        if config.engine.compile:
            log.info(f"compiling in the first step; what is compiled is kept in {keep_compiled()}")
        try:
            outcome = train(config, process, screen)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise out_of_memory(config, layout_of(config, process.world_size), process.rank) from error
        if process.is_first and outcome.exit_code:
            conclude(outcome)
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
    config, choice = choose_here(config, layout)
    screen.print(f"{count_parameters(config.model):,} parameters on {world_size:,} processes: {layout}")
    kinds = ("weights", "gradients", "optimizer", "activations", "peak")
    table = Table("pipe rank", "stages: layers", *(f"{kind} GiB" for kind in kinds), box=None)
    for rank in forecast(config, layout):
        stages = "; ".join(describe_stage(stage) for stage in rank.stages)
        table.add_row(str(rank.pp_rank), stages, *(f"{size / GIB:.2f}" for size in (*rank.state, *rank.peak)))
    screen.print(table)
    built = count_built(config, layout, rank=0)
    screen.print(f"rank 0 was built: it stores {built:,} parameters.")
    screen.print(
        f"{choice} The peak is what the device holds at the end of forward, when all activations are there, or of "
        "backward, when all gradients are, whichever is more.",
        soft_wrap=True,
    )


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


TRAIN_HELP = """Usage: fourfold train [CONFIG] [-c CONFIG] [-o section.key=value] [--key value ...]

  --dry_run         builds one rank on a fake cluster and tells what each would hold, without training
  --log_dir DIR     where each rank leaves its workerlog.N (output_dir/logs)
  --max_restarts N  starts all ranks again from the last checkpoint when one fails, at most N times (0)
  --debug           shows tracebacks of mistakes too
"""


def print_train_help() -> None:
    screen.print(TRAIN_HELP, markup=False, soft_wrap=True)
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
