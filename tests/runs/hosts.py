"""Two hosts on one machine: network namespaces with addresses and names of their own, joined by one cable.

Each host's own name resolves to 127.0.1.1 on it, as Debian has it, and the other's to its real address. Needs root.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.require import require, require_root

ROOT = Path(__file__).parents[2]
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
# what the tests' own process has chosen is not these hosts' choice
CHOSEN = ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "FOURFOLD_LAUNCHER")


@dataclass(frozen=True)
class Host:
    name: str
    address: str
    interface: str
    namespace: str

    def start(self, *command: str, log: Path, **environment: object) -> subprocess.Popen[str]:
        """Run a command there; what it says goes to a file. The process id is the command's own."""
        inside = ["unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', self.name, *command]
        inherited = {name: value for name, value in os.environ.items() if name not in CHOSEN}
        with log.open("a", encoding="utf-8") as stream:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.namespace, *inside],
                stdout=stream,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=ROOT,
                start_new_session=True,
                env=inherited | {name: str(value) for name, value in environment.items()},
            )

    def kill(self) -> None:
        """Every process on it at once, as if its power had gone."""
        found = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=False)
        for pid in found.stdout.split():
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    require("ip", "unshare", "hostname")
    require_root()
    hosts = tuple(
        Host(f"host{letter}", f"10.77.0.{number}", f"v{letter}{os.getpid()}", f"fourfold{letter}{os.getpid()}")
        for number, letter in enumerate("AB", start=1)
    )
    first, second = hosts
    try:
        for host, other in ((first, second), (second, first)):
            _ip("netns", "add", host.namespace)
            folder = Path("/etc/netns") / host.namespace  # mounted over /etc by ip netns exec
            folder.mkdir(parents=True)
            names = f"127.0.0.1 localhost\n127.0.1.1 {host.name}\n{other.address} {other.name}\n"
            (folder / "hosts").write_text(f"{names}{host.address} cable-of-{host.name}\n", encoding="utf-8")
            (folder / "resolv.conf").write_text("nameserver 127.0.0.1\n", encoding="utf-8")  # none, and known at once
        _ip("link", "add", first.interface, "type", "veth", "peer", "name", second.interface)
        for host in hosts:
            _ip("link", "set", host.interface, "netns", host.namespace)
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", host.interface)
            for link in ("lo", host.interface):
                _ip("-n", host.namespace, "link", "set", link, "up")
        yield first, second
    finally:
        for host in hosts:
            host.kill()
            subprocess.run(["ip", "netns", "delete", host.namespace], capture_output=True, check=False)
            shutil.rmtree(Path("/etc/netns") / host.namespace, ignore_errors=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
