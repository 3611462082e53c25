"""The command line: which commands there are, and how errors leave it.

A user's mistake is printed as sentences and exits with code 2; `--debug` shows the traceback instead.
"""

import sys
from typing import Annotated

import typer
from torch.distributed.elastic.multiprocessing.errors import record

from fourfold import __version__
from fourfold.commands.bench import bench_command
from fourfold.commands.checkpoint import checkpoint_app
from fourfold.commands.data import data_app
from fourfold.commands.generate import generate_command
from fourfold.commands.options import FREE_FORM
from fourfold.commands.prepare import prepare_command
from fourfold.commands.tokenizer import tokenizer_app
from fourfold.commands.train import train_command
from fourfold.commands.verify import trials_command, verify_command
from fourfold.errors import FourfoldError
from fourfold.mesh.process import is_first_process, is_worker, rank_from_environment
from fourfold.train.metrics import log_failure

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
app.command("train", context_settings=FREE_FORM, add_help_option=False)(train_command)
app.command("verify", context_settings=FREE_FORM, add_help_option=False)(verify_command)
app.command("generate")(generate_command)
app.command("prepare")(prepare_command)
app.add_typer(tokenizer_app, name="tokenizer")
app.add_typer(data_app, name="data")
app.command("bench", context_settings=FREE_FORM, add_help_option=False)(bench_command)
app.add_typer(checkpoint_app, name="checkpoint")
app.command("trials", hidden=True)(trials_command)


@app.callback(invoke_without_command=True)
def top(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    """Pretrain GPT models in four dimensions of parallelism."""
    if version:
        print(f"fourfold {__version__}")
        raise typer.Exit


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
