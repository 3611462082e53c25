"""Starting this machine's processes of a layout, through torchrun's own agent, and again when one is lost.

The first rank speaks on the console; the others' output goes to files. When a rank fails, the agent ends the rest, and
the rank that failed first is the one that is shown. With several machines each runs one such agent; they meet at the
first machine's address.
"""

import ctypes
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from fourfold.errors import LaunchError
from fourfold.mesh.environment import own_address
from fourfold.train.watch import HUNG

SHUTDOWN_S = 5
"""How long the others may take to end when a worker has failed: without it they cannot finish a step."""
MEETING_S = 300
"""How long the first machine may be behind the others: machines import at different speeds."""
GATHERING_S = 900
"""How long to wait for machines that are not there yet, at the start and when one is lost."""

# Passed on to the workers, who save between two steps and end by themselves, in the time that they need.
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
# Tells workers the id of the process that started them.
LAUNCHER = "FOURFOLD_LAUNCHER"
STOPPED = (75, *(128 + number for number in PASSED_ON))
"""Exit codes of workers that were asked to stop, by `max_time` or a signal, and have saved."""
MISTAKE = 2
"""The exit code of a user's mistake, which would be the same the next time."""
PR_SET_PDEATHSIG = 1
LAST_WORDS = 12
"""Lines shown of what a worker wrote that left no exception behind."""


@dataclass(frozen=True)
class Machines:
    """All machines of a run, and where they meet. Alone, this one needs no agreed address."""

    count: int = 1
    is_first: bool = True
    """Whether this one is where the others meet."""
    address: str = "localhost"
    port: int = 0
    run_id: str = "output"
    """The name of the folder, beside the logs, for what ranks write that is not theirs: torch's words, say."""


# What workers need beyond what they choose themselves; anything already set wins.
LOCAL_ENVIRONMENT = {
    # without it a restarted group reads the addresses of the dead one
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    # below it are C++ stack traces of connections that end when a rank does, ahead of the sentence that says why
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


def launch_local(
    processes: int, arguments: list[str], log_dir: Path, max_restarts: int = 0, machines: Machines | None = None
) -> None:
    """Run `fourfold <arguments>` as this many workers here and wait for them. A worker's failure is a LaunchError."""
    machines = machines or Machines()
    for name, value in LOCAL_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ[LAUNCHER] = str(os.getpid())
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(
            f"the log folder {log_dir} cannot be written to ({error.strerror}); write another engine.output_dir or "
            "--log_dir"
        ) from error
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # says the same at greater length
    with told_meeting(machines):
        spec = WorkerSpec(
            role="worker",
            local_world_size=processes,
            entrypoint=sys.executable,
            args=("-m", "fourfold", *arguments),
            rdzv_handler=meeting_of(machines),
            max_restarts=max_restarts,
            local_addr=address_here(machines),
        )
        agent = Agent(spec, log_dir, processes)
        try:
            agent.run()
        except (RendezvousError, dist.DistError):
            if agent.failure is None:
                raise
            # otherwise another machine has given up, and the failure is why
        except SignalException as stopped:
            sys.exit(128 + int(stopped.sigval))
        finally:
            spec.rdzv_handler.shutdown()
    agent.conclude()


class Agent(LocalElasticAgent):
    """torchrun's agent for the workers of this machine. It says what it does, and does not start again what was asked
    to stop or would fail the same way."""

    def __init__(self, spec: WorkerSpec, log_dir: Path, processes: int) -> None:
        logs = DefaultLogsSpecs(str(log_dir), redirects=dict.fromkeys(range(1, processes), Std.ALL))
        super().__init__(spec, logs)
        self.log_dir = log_dir
        self.passed_on: list[int] = []
        self.failure: ProcessFailure | None = None
        """The first of the last attempt."""
        self.failed_rank = 0

    def run(self, *arguments: Any) -> RunResult:
        # those of torchrun's own list that are not passed on: it ends the workers itself
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGHUP,SIGQUIT"
        for number in PASSED_ON:
            signal.signal(number, partial(pass_on, self.passed_on))
        return super().run(*arguments)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        started = super()._start_workers(worker_group)
        context: Any = self._pcontext  # which ends the others by itself when one fails, and is patient
        context.close = lambda death_sig=None, timeout=0, close=context.close: close(death_sig, SHUTDOWN_S)
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        if result.state == WorkerState.FAILED and result.failures:
            self.failed_rank, self.failure = min(result.failures.items(), key=lambda each: each[1].timestamp)
            if self.passed_on or self.failure.exitcode in (*STOPPED, MISTAKE):
                self._remaining_restarts = 0
            if self._remaining_restarts:
                allowed = worker_group.spec.max_restarts
                print(
                    f"{self.describe_failure()}\nstarting all ranks again from the last checkpoint, "
                    f"restart {allowed - self._remaining_restarts + 1} of {allowed}",
                    file=sys.stderr,
                    flush=True,
                )
        else:
            self.failure = None
        return result

    def conclude(self) -> None:
        """Leave with the exit code of workers that were asked to stop; raise what made them fail."""
        if self.failure is None:
            return
        if self.passed_on.count(signal.SIGINT) > 1:
            sys.exit(128 + signal.SIGINT)
        if self.failure.exitcode in STOPPED:
            sys.exit(self.failure.exitcode)
        if -self.failure.exitcode in self.passed_on:  # it came before the worker was ready to save
            sys.exit(128 - self.failure.exitcode)
        failed = LaunchError(self.describe_failure())
        failed.exit_code = self.failure.exitcode if self.failure.exitcode > 0 else 1
        raise failed

    def describe_failure(self) -> str:
        """The rank that failed before the others, in one block; the others failed because it was gone."""
        assert self.failure is not None
        details = (self.failure.error_file_data or {}).get("message")
        if isinstance(details, dict):
            what = str(details.get("story", details["message"])).strip()
            # one that lost a peer tells what that one had left; of a hang every rank tells the same
            if what.startswith("rank ") or self.failure.exitcode == HUNG:
                return what.removeprefix("LaunchError: ")
        elif self.failure.exitcode < 0:
            what = f"it was ended by {signal.Signals(-self.failure.exitcode).name}{self.last_words()}"
        else:
            what = f"it ended with exit code {self.failure.exitcode}{self.last_words()}"
        return (
            f"rank {self.failed_rank} on {socket.gethostname()} failed first, and the others were stopped: {what}\n"
            f"its log, with the traceback, is {self.log_dir / f'workerlog.{self.failed_rank}'}"
        )

    def last_words(self) -> str:
        """What a worker wrote last that left no exception behind; those of one that was killed are of no use."""
        assert self.failure is not None
        written = Path(self.failure.error_file).with_name("stderr.log")
        if self.failure.exitcode == -signal.SIGKILL or not written.exists():
            return ""
        lines = written.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_WORDS:]
        return "".join(f"\n    {line}" for line in lines)


def end_with_launcher() -> None:
    """Have the kernel send SIGTERM to this worker when its launcher is gone, however it went, so that it saves and ends
    instead of training on with nobody there."""
    launcher = os.environ.get(LAUNCHER)
    if launcher is None:  # another launcher's worker
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(launcher):
        sys.exit(128 + signal.SIGTERM)


def pass_on(passed_on: list[int], number: int, frame: FrameType | None) -> None:
    """To all workers; a second SIGINT as SIGKILL, for one that waits in a collective hears nothing else."""
    passed_on.append(number)
    workers = [int(pid) for each in Path("/proc/self/task").glob("*/children") for pid in each.read_text().split()]
    if not workers:  # not started yet
        sys.exit(128 + number)
    for pid in workers:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL if passed_on.count(signal.SIGINT) > 1 else number)


def meeting_of(machines: Machines) -> RendezvousHandler:
    several = {} if machines.count == 1 else {"is_host": machines.is_first}
    return get_rendezvous_handler(
        RendezvousParameters(
            backend="c10d",
            endpoint=f"{machines.address}:{machines.port}",
            run_id=machines.run_id,
            min_nodes=machines.count,
            max_nodes=machines.count,
            local_addr=address_here(machines),
            read_timeout=MEETING_S,
            join_timeout=GATHERING_S,
            **several,
        )
    )


def address_here(machines: Machines) -> str | None:
    if machines.count == 1:
        return "localhost"  # whatever this machine's name is, or does not resolve to
    socket.getaddrinfo(machines.address, machines.port)  # raises for a name that nobody knows
    return own_address(machines.address)


@contextmanager
def told_meeting(machines: Machines) -> Iterator[None]:
    """Torch's words for machines that do not find each other, as a sentence."""
    try:
        yield
    except (RendezvousError, dist.DistError, socket.gaierror) as error:
        failed = LaunchError(
            f"the {machines.count} machines of this run could not meet at {machines.address}:{machines.port}: "
            f"{error.__cause__ or error}; check that the first one is up, that its name resolves on the others and "
            "that the port is free there"
        )
        failed.exit_code = 1  # another start may mend it
        raise failed from error
