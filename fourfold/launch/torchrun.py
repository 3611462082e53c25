"""Starting the processes of a layout on this machine, through torchrun's own launcher.

The first rank speaks on the console; the others' output goes to files. When a rank fails, the launcher ends the rest,
and the rank that failed first is the one that is shown.
"""

import logging
import os
import signal
import sys
import uuid
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from fourfold.errors import LaunchError

SHUTDOWN_S = 30
"""How long a worker that was asked to stop may take to save."""


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
    log_dir.mkdir(parents=True, exist_ok=True)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        shutdown_timeout=SHUTDOWN_S,
        logs_specs=DefaultLogsSpecs(str(log_dir), redirects=dict.fromkeys(range(1, processes), Std.ALL)),
    )
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # says the same at greater length
    try:
        elastic_launch(config, sys.executable)("-m", "fourfold", *arguments)
    except ChildFailedError as error:
        raise _first_failure(error, log_dir) from error
    except SignalException as stopped:
        sys.exit(128 + int(stopped.sigval))


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
