import socket

import pytest

from fourfold.mesh.environment import addresses_here, choose_environment, pick_interface, source_address


def worker(**more: str) -> dict[str, str]:
    return {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", **more}


def test_ranks_of_one_machine_talk_over_the_loopback_whatever_its_name_resolves_to() -> None:
    environment = worker(MASTER_ADDR="192.0.2.7")
    told = choose_environment(environment, is_gpu=False)
    assert environment["GLOO_SOCKET_IFNAME"] == "lo"
    assert any("GLOO_SOCKET_IFNAME = lo" in sentence and "set it to choose otherwise" in sentence for sentence in told)


def test_what_is_set_stays_and_is_said_to_be_set() -> None:
    environment = worker(GLOO_SOCKET_IFNAME="eth7", OMP_NUM_THREADS="3")
    told = choose_environment(environment, is_gpu=False)
    assert (environment["GLOO_SOCKET_IFNAME"], environment["OMP_NUM_THREADS"]) == ("eth7", "3")
    assert sum("as set before the start" in sentence for sentence in told) == 2


def test_threads_do_not_depend_on_the_machine() -> None:
    environment = worker()
    choose_environment(environment, is_gpu=False)
    assert environment["OMP_NUM_THREADS"] == "1"


def test_nccl_gets_the_interface_between_machines_only() -> None:
    several = worker(LOCAL_WORLD_SIZE="2")
    one = worker()
    for environment in (several, one):
        choose_environment(environment, is_gpu=True)
    assert "NCCL_SOCKET_IFNAME" not in one
    assert several.get("NCCL_SOCKET_IFNAME") in (None, "=" + several.get("GLOO_SOCKET_IFNAME", ""))


def test_an_address_that_does_not_resolve_is_no_error_yet() -> None:
    environment = worker(LOCAL_WORLD_SIZE="2", MASTER_ADDR="no-such-host.invalid")
    assert choose_environment(environment, is_gpu=False)


def test_no_interface_is_chosen_among_several_that_could_be_right(monkeypatch: pytest.MonkeyPatch) -> None:
    two = {"127.0.0.1": "lo", "198.51.100.1": "eth0", "203.0.113.1": "eth1"}
    monkeypatch.setattr("fourfold.mesh.environment.addresses_here", lambda: two)
    monkeypatch.setattr("fourfold.mesh.environment.source_address", lambda host, port=9: None)
    assert pick_interface("elsewhere", is_several=True) is None
    del two["203.0.113.1"]
    chosen = pick_interface("elsewhere", is_several=True)
    assert chosen is not None and chosen.interface == "eth0"


def test_the_way_to_the_first_machine_wins_over_the_default_route(monkeypatch: pytest.MonkeyPatch) -> None:
    here = {"127.0.0.1": "lo", "198.51.100.1": "eth0", "fd77::1": "ib0"}
    monkeypatch.setattr("fourfold.mesh.environment.addresses_here", lambda: here)
    ways = {"fd77::9": "fd77::1", "192.0.2.1": "198.51.100.1", "itself": "127.0.1.1"}
    monkeypatch.setattr("fourfold.mesh.environment.source_address", lambda host, port=9: ways[host])
    for master, interface in {"fd77::9": "ib0", "itself": "eth0"}.items():
        chosen = pick_interface(master, is_several=True)
        assert chosen is not None and chosen.interface == interface


def test_interfaces_are_found_by_their_addresses_of_both_kinds() -> None:
    found = addresses_here()
    assert found["127.0.0.1"] == "lo"
    assert source_address("127.0.0.1") == "127.0.0.1"
    if socket.has_ipv6 and "::1" in found:
        assert found["::1"] == "lo" and source_address("::1") == "::1"
