"""What PyTorch takes from the environment, chosen where nobody has: the network interface and the threads.

Nothing here reads the environment by itself: process.py hands it over. What is already set stays, and every choice
comes with a sentence for the log.
"""

import array
import fcntl
import ipaddress
import socket
import struct
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

LIST_ADDRESSES = 0x8912
"""The ioctl SIOCGIFCONF: every IPv4 address with the name of its interface."""
REQUEST_BYTES, MOST_REQUESTS = 40, 256
ELSEWHERE = ("192.0.2.1", 9)
"""An address that nobody has, so that the kernel looks it up in its default route."""
UNSET = "set it to choose otherwise"


class Choice(NamedTuple):
    interface: str
    reason: str


def choose_environment(environment: MutableMapping[str, str], is_gpu: bool) -> tuple[str, ...]:
    """Fill in what a worker's environment lacks; what was chosen and why, a sentence each."""
    sentences = []
    is_several = has_several_machines(environment)
    chosen = pick_interface(environment.get("MASTER_ADDR", ""), is_several)
    # NCCL finds its own way on one machine; "=" has it take the name as it is, not as the beginning of one
    for name, prefix in (("GLOO_SOCKET_IFNAME", ""), *([("NCCL_SOCKET_IFNAME", "=")] if is_gpu and is_several else [])):
        if environment.get(name):
            sentences.append(f"{name} = {environment[name]}, as set before the start")
        elif chosen:
            environment[name] = prefix + chosen.interface
            sentences.append(f"{name} = {environment[name]}, {chosen.reason}; {UNSET}")
        else:
            sentences.append(f"{name} is not set, and no interface could be told to be the right one; set it")
    if environment.get("OMP_NUM_THREADS"):
        sentences.append(f"OMP_NUM_THREADS = {environment['OMP_NUM_THREADS']}, as set before the start")
    else:
        # Not by the number of cores: sums depend on it in their last bits, and torchrun and our own launcher set 1.
        environment["OMP_NUM_THREADS"] = "1"
        sentences.append(f"OMP_NUM_THREADS = 1, so that every way to start gives the same bits; {UNSET}")
    return tuple(sentences)


def has_several_machines(environment: MutableMapping[str, str]) -> bool:
    """Where nobody says how many processes are on this one, the address that they meet at decides."""
    if "LOCAL_WORLD_SIZE" in environment:
        return int(environment["WORLD_SIZE"]) > int(environment["LOCAL_WORLD_SIZE"])
    source = source_address(environment.get("MASTER_ADDR", ""))
    return source is not None and not is_loopback(source)


def pick_interface(master: str, is_several: bool) -> Choice | None:
    """The interface on the way to the first rank's machine. Left alone, gloo takes the one that the host's own name
    resolves to, which on Debian is the loopback, where no other machine is."""
    by_address = addresses_here()
    if not is_several:
        loopback = by_address.get("127.0.0.1") or by_address.get("::1")
        return Choice(loopback, "since all ranks are on this machine") if loopback else None
    source = source_address(master)
    if source in by_address and not is_loopback(source):
        return Choice(by_address[source], f"which reaches {master}")
    source = source_address(*ELSEWHERE)  # this is the first machine, and its name is the loopback here
    if source in by_address:
        return Choice(by_address[source], "which has the default route")
    others = {name for address, name in by_address.items() if not is_loopback(address)}
    return Choice(min(others), "the only one besides the loopback") if len(others) == 1 else None


def source_address(host: str, port: int = 9) -> str | None:
    """This machine's own address on the way to another, or None without a way. Nothing is sent: the kernel only looks
    up its routes."""
    with suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM) if host else ():
            with suppress(OSError), socket.socket(family, kind) as asking:
                asking.connect(address)
                return plain(asking.getsockname()[0])
    return None


def own_address(master: str) -> str | None:
    """This machine's address as the others of a run reach it: its own name may be the loopback."""
    for source in (source_address(master), source_address(*ELSEWHERE)):
        if source and not is_loopback(source):
            return source
    others = [address for address in addresses_here() if not is_loopback(address)]
    return others[0] if len(others) == 1 else None


def addresses_here() -> dict[str, str]:
    """Address -> name of the interface that has it; those valid on their link alone are left out."""
    found = {}
    buffer = array.array("B", bytes(REQUEST_BYTES * MOST_REQUESTS))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking, suppress(OSError):
        asked = struct.pack("iP", len(buffer), buffer.buffer_info()[0])
        (size, _) = struct.unpack("iP", fcntl.ioctl(asking, LIST_ADDRESSES, asked))
        for begin in range(0, size, REQUEST_BYTES):
            request = buffer[begin : begin + REQUEST_BYTES].tobytes()
            name = request[:16].split(b"\0")[0].decode().split(":")[0]  # eth0:1 is a second address of eth0
            found[socket.inet_ntoa(request[20:24])] = name
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text(encoding="utf-8").splitlines():
            digits, _, _, scope, _, name = line.split()
            if scope != "20":
                found[plain(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))] = name
    return found


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def plain(address: str) -> str:
    """Without the zone that an IPv6 address may carry."""
    return str(ipaddress.ip_address(address.split("%")[0]))
