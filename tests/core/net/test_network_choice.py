"""The choice among the hosts' networks."""

import concurrent.futures
import contextlib
import socket
import threading

import pytest

from ring_plugins.core.base.errors import LaunchError
from ring_plugins.core.linux.interfaces import Interface
from ring_plugins.core.net.network_choice import HostInterfaces, choose, measure, own_interfaces, unmeasured


def interface(name, address, speed=0, internal=False):
    return Interface(name, address, 16, speed, internal)


def host(rank, *found, preferred="", wanted=""):
    return HostInterfaces(rank, f"host{rank}", found, preferred, wanted, f"kernel{rank}")


DOCKER = interface("docker0", "172.17.0.1", internal=True)


def test_known_speeds_decide():
    hosts = [
        host(r, DOCKER, interface("eth0", f"10.1.0.{r + 1}", 1000), interface("ib0", f"10.2.0.{r + 1}", 100_000))
        for r in (0, 1)
    ]
    assert unmeasured(hosts) == []
    choice = choose(hosts)
    assert choice.addresses == ("10.2.0.1", "10.2.0.2")
    assert choice.text == (
        "ib0 (10.2.0.0/16) connects the hosts with 100,000 Mbit/s; slower: 10.1.0.0/16 with 1,000 Mbit/s"
    )


def test_unknown_speeds_are_measured_and_the_rendezvous_decides_between_equals():
    hosts = [
        host(r, interface("a", f"10.1.0.{r + 1}", 1000), interface("b", f"10.2.0.{r + 1}"), preferred=f"10.2.0.{r + 1}")
        for r in (0, 1)
    ]
    assert unmeasured(hosts) == ["10.1.0.0/16", "10.2.0.0/16"]
    assert choose(hosts, {"10.1.0.0/16": 990, "10.2.0.0/16": 950}).addresses == ("10.2.0.1", "10.2.0.2")
    choice = choose(hosts, {"10.1.0.0/16": 990, "10.2.0.0/16": 0})
    assert choice.addresses == ("10.1.0.1", "10.1.0.2")
    assert "as measured; slower: 10.2.0.0/16, which is silent" in choice.text


def test_hosts_on_their_own_subnets_use_the_addresses_that_reach_rank_0():
    hosts = [host(r, interface("eth0", f"10.{r}.0.1"), preferred=f"10.{r}.0.1") for r in range(3)]
    assert choose(hosts).addresses == ("10.0.0.1", "10.1.0.1", "10.2.0.1")
    stray = host(2, interface("eth0", "10.9.0.1"), preferred="127.0.0.1")
    with pytest.raises(LaunchError, match=r"host0 \(rank 0\) has eth0 \(10.0.0.0/16\), but host1 \(rank 1\) has"):
        choose([*hosts[:2], stray])


def test_a_host_with_nothing_but_bridges_is_named():
    with pytest.raises(LaunchError, match=r"host1 \(rank 1\) has no network that leads to other hosts; it has docker0"):
        choose([host(0, interface("eth0", "10.0.0.1")), host(1, DOCKER)])
    forced = host(1, interface("docker0", "10.0.0.2", internal=True), wanted="docker0")
    assert choose([host(0, interface("eth0", "10.0.0.1")), forced]).addresses == ("10.0.0.1", "10.0.0.2")


def test_ranks_of_one_host_talk_over_loopback(monkeypatch):
    assert choose([own_interfaces(0), own_interfaces(1)]) == (("127.0.0.1", "127.0.0.1"), "")
    monkeypatch.setenv("RING_INTERFACE", "ib7,10.250.0.0/24")
    with pytest.raises(LaunchError, match=r"RING_INTERFACE='ib7,10.250.0.0/24' is not an interface of .* \(rank 3\)"):
        own_interfaces(3)


@pytest.mark.parametrize("said", [b"", b"\0" * 4096])
def test_a_measurement_ignores_strangers_that_connect_first(said):
    hosts = [host(r, interface("a", "127.0.0.1")) for r in (0, 1)]
    everything, barrier = [None, None], threading.Barrier(2)

    def gather(rank, item):
        everything[rank] = item
        barrier.wait()
        found = list(everything)
        if rank == 1 and item is None and isinstance(found[0], list):  # between learning the port and connecting
            for _ in range(20):
                stranger = strangers.enter_context(socket.create_connection(("127.0.0.1", found[0][0])))
                stranger.sendall(said)
        barrier.wait()
        return found

    with contextlib.ExitStack() as strangers, concurrent.futures.ThreadPoolExecutor(2) as pool:
        found = pool.map(lambda rank: measure(["127.0.0.0/16"], hosts, rank, lambda item: gather(rank, item)), (0, 1))
        speeds = list(found)
    assert speeds[0] == speeds[1]
    assert speeds[0]["127.0.0.0/16"] > 1  # 1 would be too little to tell, 0 nothing
