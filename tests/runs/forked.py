"""Runs as real processes that start in a blink: this process imports everything once and forks the ranks of each run.

`python -m tests.runs.forked` reads one JSON object per line, {"config": path, "ranks": n, "log": path, "port": n}, and
answers each with the process ids of the ranks; a line {"wait": [pids]} is answered with their exit codes.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

from fourfold.checkpoint.paths import local_folder
from fourfold.commands import train as command
from fourfold.commands.options import prepare_config
from fourfold.errors import FourfoldError
from fourfold.launch.torchrun import LOCAL_ENVIRONMENT
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
PATIENCE_S = 3.0


class Forks:
    """The forking process, seen from a test; its runs have `folder` as their working folder."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or ROOT

    def __enter__(self) -> Self:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.runs.forked"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=LOCAL_ENVIRONMENT | os.environ | {"PYTHONPATH": str(ROOT)},
            cwd=self.folder,
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait(60)

    def ask(self, question: dict[str, Any]) -> list[int]:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())  # type: ignore[no-any-return]

    def start(self, config: Path, ranks: int, log: Path) -> list[int]:
        port = free_port()
        return self.ask({"config": str(config), "ranks": ranks, "log": str(log), "port": port})

    def wait(self, pids: list[int]) -> list[int]:
        """Exit codes, negative for signals."""
        return self.ask({"wait": pids})


def be_rank(question: dict[str, Any], rank: int) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": question["ranks"], "MASTER_PORT": question["port"]}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in place.items()}}
    log = os.open(question["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (0, 1, 2):
        os.dup2(log, descriptor)
    code = 1
    try:
        config, _ = prepare_config([question["config"]])
        code = command.work(config, local_folder(config.engine.output_dir) / "logs")
    except FourfoldError as error:
        print(f"error: {error}", flush=True)
        code = error.exit_code
    finally:
        os._exit(code)


def wait_for(pids: list[int]) -> list[int]:
    """As a launcher does: when one has failed, the others have a few seconds to notice."""
    codes: dict[int, int] = {}
    killed_at_s = float("inf")
    while len(codes) < len(pids):
        for pid in pids:
            if pid not in codes and (found := os.waitpid(pid, os.WNOHANG))[0]:
                codes[pid] = os.waitstatus_to_exitcode(found[1])
        if any(codes.values()):
            killed_at_s = min(killed_at_s, time.monotonic() + PATIENCE_S)
        if time.monotonic() > killed_at_s:
            for pid in set(pids) - codes.keys():
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return [codes[pid] for pid in pids]


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    for line in sys.stdin:
        question = json.loads(line)
        if "wait" in question:
            answer = wait_for(question["wait"])
        else:
            answer = []
            for rank in range(question["ranks"]):
                pid = os.fork()
                if pid == 0:
                    be_rank(question, rank)
                answer.append(pid)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
