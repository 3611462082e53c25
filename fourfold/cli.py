"""The command line: which commands there are, and how errors leave it.

A user's mistake is printed as sentences and exits with code 2; `--debug` shows the traceback instead. Of several
processes, one per machine speaks, and what it tells is the first failure of all.
"""

import json
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Annotated

import typer
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler, record

from fourfold import __version__
from fourfold.commands.bench import bench_command
from fourfold.commands.checkpoint import checkpoint_app
from fourfold.commands.data import data_app
from fourfold.commands.doctor import doctor_command
from fourfold.commands.generate import generate_command
from fourfold.commands.launch import launch_app
from fourfold.commands.options import FREE_FORM
from fourfold.commands.prepare import prepare_command
from fourfold.commands.tokenizer import tokenizer_app
from fourfold.commands.train import train_command
from fourfold.commands.verify import trials_command, verify_command
from fourfold.errors import FourfoldError, LaunchError
from fourfold.mesh.failure import Failure, describe, exit_code_of, log_file
from fourfold.mesh.process import (
    is_launched_by_us,
    is_watched,
    is_worker,
    leave,
    rank_from_environment,
    speaks_for_host,
    tell_refusal,
)
from fourfold.train.metrics import log_failure

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
app.command("train", context_settings=FREE_FORM, add_help_option=False)(train_command)
app.command("verify", context_settings=FREE_FORM, add_help_option=False)(verify_command)
app.add_typer(launch_app, name="launch")
app.command("generate")(generate_command)
app.command("prepare")(prepare_command)
app.add_typer(tokenizer_app, name="tokenizer")
app.add_typer(data_app, name="data")
app.command("bench", context_settings=FREE_FORM, add_help_option=False)(bench_command)
app.command("doctor", context_settings=FREE_FORM, add_help_option=False)(doctor_command)
app.add_typer(checkpoint_app, name="checkpoint")
app.command("trials", hidden=True)(trials_command)


@app.callback(invoke_without_command=True)
def top(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    """Pretrain GPT models in four dimensions of parallelism."""
    if version:
        print(f"fourfold {__version__}")
        raise typer.Exit


def main() -> None:
    code = run()  # which may make a worker of this process, in a step of Slurm's
    if is_worker():
        leave(code)
    sys.exit(code)


def run() -> int:
    """The command, and its exit code."""
    try:
        record(app, FailureFile())()
    except SystemExit as ended:
        if not is_worker():
            raise
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except Exception as error:
        if not is_worker() and not isinstance(error, FourfoldError):
            raise
        if "--debug" in sys.argv:
            traceback.print_exc()
        elif is_shown(error):
            for sentence in story_of(error).splitlines():
                print(f"error: {sentence}", file=sys.stderr, flush=True)
        if is_worker():
            end_worker(error)
        return exit_code_of(error)
    return 0


def is_shown(error: Exception) -> bool:
    """Whether this process tells what went wrong: on each machine one does, unless its launcher will."""
    if not is_worker():
        return speaks_for_host()
    return speaks_for_host() and not is_launched_by_us() and (isinstance(error, FourfoldError) or not is_watched())


def story_of(error: Exception) -> str:
    """A mistake is told in its own words; any other error with its rank and where its log lies."""
    if isinstance(error, FourfoldError):
        return str(error)
    return Failure(rank_from_environment(), socket.gethostname(), describe(error), log_file(), 1).story


def end_worker(error: Exception) -> None:
    """Leave the traceback in the log, and tell ranks that still wait for this one."""
    if log_file() or not isinstance(error, FourfoldError):
        log_failure(rank_from_environment())
    if isinstance(error, FourfoldError) and not isinstance(error, LaunchError):
        tell_refusal(error)


class FailureFile(ErrorHandler):
    """What torchrun's agent shows of a rank that failed: which one and where its log lies, instead of a traceback."""

    def record_exception(self, e: BaseException) -> None:
        path = self._get_error_file_path()
        if path and isinstance(e, Exception):
            story = story_of(e)
            extra = {"py_callstack": story, "timestamp": str(int(time.time()))}
            message = {"message": describe(e), "story": story, "extraInfo": extra}
            Path(path).write_text(json.dumps({"message": message}), encoding="utf-8")
