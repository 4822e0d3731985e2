"""The choice of a transport under mpirun, with threads as ranks."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import LaunchError
from ring_plugins.core.linux.interfaces import Interface
from ring_plugins.core.net import transport
from ring_plugins.core.net.network_choice import HostInterfaces


class ThreadGather:
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


def decided(monkeypatch, kernels=("a", "b"), networks=(1, 1), requested=("", ""), devices=("", ""), wanted=""):
    """The ranks' choice, with rank i in network 10.<networks[i]>.0.0/16."""

    def own_interfaces(rank: int) -> HostInterfaces:
        found = (Interface("eth0", f"10.{networks[rank]}.0.{rank + 1}", 16, 1000, False),)
        return HostInterfaces(rank, f"host{rank + 1}", found, "", wanted, kernels[rank])

    monkeypatch.setattr(transport, "own_interfaces", own_interfaces)
    group = ThreadGather(len(kernels))

    def run(rank: int) -> transport.TransportChoice:
        threads[threading.get_ident()] = rank
        return transport.choose_transport(rank, lambda item: group.gather(rank, item))

    threads: dict[int, int] = {}
    this_rank = lambda: threads[threading.get_ident()]  # noqa: E731
    monkeypatch.setattr(config.TRANSPORT, "get", lambda: requested[this_rank()])
    monkeypatch.setattr(transport, "rdma_device", lambda: devices[this_rank()])
    with ThreadPoolExecutor(len(kernels)) as pool:
        first, *others = pool.map(run, range(len(kernels)))
    assert all(other == first for other in others)
    return first


SOCKETS = ("10.1.0.1", "10.1.0.2")


def test_sockets_between_hosts_and_mpi_over_rdma(monkeypatch):
    assert decided(monkeypatch).listen == SOCKETS
    assert decided(monkeypatch, devices=("", "mlx5_0")).listen == ()
    assert decided(monkeypatch, devices=("", "mlx5_0"), requested=("tcp", "tcp")).listen == SOCKETS
    assert decided(monkeypatch, requested=("mpi", "mpi")) == (("host1", "host2"), (), SOCKETS[:1], "")


def test_one_host_needs_neither(monkeypatch):
    assert decided(monkeypatch, kernels=("a", "a")).listen == ()
    assert decided(monkeypatch, kernels=("a", "a"), requested=("tcp", "tcp")).listen == ("127.0.0.1", "127.0.0.1")


def test_without_a_common_network_mpi_is_used(monkeypatch):
    assert decided(monkeypatch, networks=(1, 2)).listen == ()
    for asked in ({"requested": ("tcp", "tcp")}, {"wanted": "eth0"}):
        with pytest.raises(LaunchError, match="no network is common"):
            decided(monkeypatch, networks=(1, 2), **asked)


def test_ranks_that_request_different_transports_are_named(monkeypatch):
    with pytest.raises(LaunchError, match=r"RING_TRANSPORT is 'mpi' on rank 0 \(host1\), but '' on rank 1 \(host2\)"):
        decided(monkeypatch, requested=("mpi", ""))


def test_the_network_that_mpi_was_told_to_use_is_used_by_sockets_too(monkeypatch):
    monkeypatch.setenv("OMPI_MCA_btl_tcp_if_include", "10.1.0.0/16")
    assert decided(monkeypatch) == (("host1", "host2"), SOCKETS, SOCKETS[:1], "")


@pytest.mark.parametrize(("state", "found"), [("4: ACTIVE\n", "mlx5_0"), ("1: DOWN\n", "")])
def test_a_device_counts_when_it_is_connected(monkeypatch, tmp_path: Path, state, found):
    port = tmp_path / "infiniband" / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text(state)
    monkeypatch.setattr(transport, "_DEVICES", tmp_path)
    assert transport.rdma_device() == found
    (tmp_path / "cxi" / "cxi0").mkdir(parents=True)
    assert transport.rdma_device() == (found or "cxi0")
