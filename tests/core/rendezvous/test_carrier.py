"""What carries data under mpirun, decided by several ranks that meet in threads."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ring_plugins.core.base.errors import ArgumentError, LaunchError
from ring_plugins.core.linux.interfaces import Interface
from ring_plugins.core.net import transport_choice as carrier
from ring_plugins.core.net.network_choice import HostInterfaces


class SharedMemoryRendezvous:
    """Gathers among threads."""

    def __init__(self, size: int) -> None:
        self.items: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=10)

    def gather(self, rank: int, item: Any) -> list[Any]:
        self.items[rank] = item
        self.barrier.wait()
        found = list(self.items)
        self.barrier.wait()
        return found


def decided(monkeypatch, kernels=("a", "b"), networks=(1, 1), wishes=("", ""), fabrics=("", ""), wanted=""):
    """What ranks decide, rank i in network 10.<networks[i]>.0.0/16."""

    def offer(rank: int) -> HostInterfaces:
        found = (Interface("eth0", f"10.{networks[rank]}.0.{rank + 1}", 16, 1000, False),)
        return HostInterfaces(rank, f"host{rank + 1}", found, "", wanted, kernels[rank])

    monkeypatch.setattr(carrier, "own_offer", offer)
    meeting = SharedMemoryRendezvous(len(kernels))

    def run(rank: int) -> carrier.TransportChoice:
        threads[threading.get_ident()] = rank
        return carrier.decide(rank, lambda item: meeting.gather(rank, item))

    threads: dict[int, int] = {}
    monkeypatch.setattr(carrier, "_wish", lambda rank: wishes[rank])
    monkeypatch.setattr(carrier, "fabric", lambda: fabrics[threads[threading.get_ident()]])
    with ThreadPoolExecutor(len(kernels)) as pool:
        first, *others = pool.map(run, range(len(kernels)))
    assert all(other == first for other in others)
    return first


SOCKETS = ("10.1.0.1", "10.1.0.2")


def test_sockets_between_hosts_and_mpi_where_it_knows_better(monkeypatch):
    assert decided(monkeypatch).listen == SOCKETS
    assert decided(monkeypatch, fabrics=("", "mlx5_0")).listen == ()
    assert decided(monkeypatch, fabrics=("", "mlx5_0"), wishes=("tcp", "tcp")).listen == SOCKETS
    assert decided(monkeypatch, wishes=("mpi", "mpi")) == (("host1", "host2"), (), SOCKETS[:1], "")


def test_one_host_needs_neither(monkeypatch):
    assert decided(monkeypatch, kernels=("a", "a")).listen == ()
    assert decided(monkeypatch, kernels=("a", "a"), wishes=("tcp", "tcp")).listen == ("127.0.0.1", "127.0.0.1")


def test_without_a_common_network_mpi_may_know_a_way(monkeypatch):
    assert decided(monkeypatch, networks=(1, 2)).listen == ()
    for asked in ({"wishes": ("tcp", "tcp")}, {"wanted": "eth0"}):
        with pytest.raises(LaunchError, match="no network is common"):
            decided(monkeypatch, networks=(1, 2), **asked)


def test_different_wishes_are_refused_by_name(monkeypatch):
    with pytest.raises(LaunchError, match=r"RING_PLANE is 'mpi' on rank 0 \(host1\), but '' on rank 1 \(host2\)"):
        decided(monkeypatch, wishes=("mpi", ""))


def test_a_wish_that_nobody_knows(monkeypatch):
    monkeypatch.setenv("RING_PLANE", "ucx")
    with pytest.raises(ArgumentError, match="RING_PLANE='ucx' on rank 3 is neither tcp nor mpi"):
        carrier._wish(3)


@pytest.mark.parametrize(("state", "found"), [("4: ACTIVE\n", "mlx5_0"), ("1: DOWN\n", "")])
def test_a_device_counts_when_it_is_connected(monkeypatch, tmp_path: Path, state, found):
    port = tmp_path / "infiniband" / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text(state)
    monkeypatch.setattr(carrier, "_DEVICES", tmp_path)
    assert carrier.fabric() == found
    (tmp_path / "cxi" / "cxi0").mkdir(parents=True)
    assert carrier.fabric() == (found or "cxi0")
