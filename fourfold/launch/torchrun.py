"""Starting the processes of a layout on this machine, through torchrun's own launcher.

The first rank speaks on the console; the others' output goes to files. When a rank fails, the launcher ends the rest,
and the rank that failed first is the one that is shown.
"""

import logging
import os
import signal
import sys
import uuid
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from fourfold.errors import LaunchError

SHUTDOWN_S = 30
"""How long the others may take to end when a worker has failed."""

# Passed on to the workers, who save between two steps and end by themselves, in the time that they need.
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
STOPPED = (75, *(128 + number for number in PASSED_ON))
"""Exit codes of workers that were asked to stop, by `max_time` or a signal, and have saved."""


# What workers on one machine need; anything already set wins.
LOCAL_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    # without it a restarted group reads the addresses of the dead one
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


def launch_local(processes: int, arguments: list[str], log_dir: Path) -> None:
    """Run `fourfold <arguments>` as this many workers and wait for them. A worker's failure is a LaunchError."""
    for name, value in LOCAL_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(f"{log_dir} cannot be written to ({error.strerror}); write another folder") from error
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        shutdown_timeout=SHUTDOWN_S,
        signals_to_handle="SIGHUP,SIGQUIT",  # those of its own list that are not passed on: it ends the workers itself
        logs_specs=DefaultLogsSpecs(str(log_dir), redirects=dict.fromkeys(range(1, processes), Std.ALL)),
    )
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # says the same at greater length
    passed_on: list[int] = []
    for number in PASSED_ON:
        signal.signal(number, partial(_pass_on, passed_on))
    try:
        elastic_launch(config, sys.executable)("-m", "fourfold", *arguments)
    except ChildFailedError as error:
        if passed_on.count(signal.SIGINT) > 1:
            sys.exit(128 + signal.SIGINT)
        if error.get_first_failure()[1].exitcode in STOPPED:
            sys.exit(error.get_first_failure()[1].exitcode)
        raise _first_failure(error, log_dir) from error
    except SignalException as stopped:
        sys.exit(128 + int(stopped.sigval))


def _pass_on(passed_on: list[int], number: int, frame: FrameType | None) -> None:
    """To all workers; a second SIGINT as SIGKILL, for one that waits in a collective hears nothing else."""
    passed_on.append(number)
    workers = [int(pid) for each in Path("/proc/self/task").glob("*/children") for pid in each.read_text().split()]
    if not workers:  # not started yet
        sys.exit(128 + number)
    for pid in workers:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL if passed_on.count(signal.SIGINT) > 1 else number)


def _first_failure(error: ChildFailedError, log_dir: Path) -> LaunchError:
    """The rank that failed before the others, in a sentence; the others failed because it was gone."""
    rank, failure = error.get_first_failure()
    details = (failure.error_file_data or {}).get("message")
    if isinstance(details, dict):
        what = str(details["message"]).strip()
    elif failure.exitcode < 0:
        what = f"it was ended by {signal.Signals(-failure.exitcode).name}"
    else:
        what = f"it ended with exit code {failure.exitcode}"
    failed = LaunchError(
        f"rank {rank} failed first, and the others were stopped: {what}\n"
        f"its log, with the traceback, is {log_dir / f'workerlog.{rank}'}"
    )
    failed.exit_code = failure.exitcode if failure.exitcode > 0 else 1
    return failed
