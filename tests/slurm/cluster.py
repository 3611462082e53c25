"""A Slurm cluster of two nodes on this machine: a munged, a slurmctld and two slurmd of its own, under one folder.

Every daemon stays in the foreground and so is ended by its pid; nothing outside the folder is read or written.
"""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.ports import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
NODES = ("fourfold1", "fourfold2")
CORES_PER_NODE = 4  # more than there are: the tests share what this machine has
START_S = 60

SLURM_CONF = """
ClusterName=fourfold
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
SchedulerParameters=sched_interval=1,bf_interval=1
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
KillWait=60
NodeName={nodes[0]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cores}
NodeName={nodes[1]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs={cores}
PartitionName=all Nodes={nodes[0]},{nodes[1]} Default=YES MaxTime=60 OverSubscribe=NO
"""


@dataclass(frozen=True)
class Cluster:
    folder: Path
    environment: dict[str, str]

    def call(self, *command: str, timeout_s: float = 120, check: bool = True) -> str:
        """What a command says, run as a user of this cluster would."""
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        assert not check or done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def job(self, number: str) -> dict[str, str]:
        """What scontrol knows of a job, among it JobState, Restarts and ExitCode."""
        text = self.call("scontrol", "--oneliner", "show", "job", number)
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def logs(self) -> str:
        return "\n".join(f"== {path.name}\n{path.read_text(errors='replace')}" for path in self.folder.glob("*.log"))


def free_ports(count: int) -> list[int]:
    ports: set[int] = set()
    while len(ports) < count:
        ports.add(free_port())
    return list(ports)


@contextmanager
def running_cluster(folder: Path) -> Iterator[Cluster]:
    folder.chmod(0o755)  # munge refuses a socket that others cannot reach
    (folder / "state").mkdir()
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    text = SLURM_CONF.format(
        host=socket.gethostname(), folder=folder, ports=free_ports(3), nodes=NODES, cores=CORES_PER_NODE
    )
    (folder / "slurm.conf").write_text(text, encoding="utf-8")
    cluster = Cluster(folder, {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")})
    munge_files = [f"--{name}={folder}/munge.{name.split('-')[0]}" for name in ("pid-file", "log-file", "seed-file")]
    daemons = [["munged", "--foreground", "--force", f"--key-file={folder}/munge.key"]]
    daemons[0] += [f"--socket={folder}/munge.socket", *munge_files]
    daemons += [["slurmctld", "-D"], *(["slurmd", "-D", "-N", node] for node in NODES)]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for command in daemons:
            with (folder / f"{command[0]}-{len(started)}-console.log").open("wb") as console:
                program = shutil.which(command[0]) or f"/usr/sbin/{command[0]}"
                started.append(
                    subprocess.Popen([program, *command[1:]], env=cluster.environment, stdout=console, stderr=console)
                )
            if command[0] == "munged":
                wait_until(lambda: (folder / "munge.socket").exists(), cluster, "munged has opened its socket")
        wait_until(
            lambda: cluster.call("sinfo", "--noheader", "--format=%T %D", check=False).strip() == "idle 2",
            cluster,
            "both nodes are idle",
        )
        yield cluster
        cluster.call("scancel", "--user=root", check=False)
        wait_until(lambda: not cluster.call("squeue", "--noheader").strip(), cluster, "the queue is empty")
    finally:
        for daemon in reversed(started):
            daemon.send_signal(signal.SIGTERM)
        for daemon in reversed(started):
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def wait_until(
    is_so: Callable[[], bool], cluster: Cluster, what: str, timeout_s: float = START_S, log: Callable[[], str] = str
) -> None:
    end_s = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > end_s:
            pytest.fail(f"waited {timeout_s:.0f} s in vain until {what}\n{log()}\n{cluster.logs()}")
        time.sleep(0.2)
