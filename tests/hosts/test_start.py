"""Starting on several hosts: which network is chosen, and the errors when something keeps the ranks apart."""

import pytest

from tests.hosts import hosts
from tests.launch import slowness

MEET = """
import os, socket
import numpy as np
import ring_plugins as ring
from tests.worker import report, transport

variable, _, value = os.environ.get("ON_" + socket.gethostname(), "").partition("=")
os.environ |= {variable: value} if variable else {}
ring.init()
peers = getattr(transport(), "peers", None)  # MPI's transport does not know addresses
report("address", peers and peers[ring.rank()].address)
assert ring.all_reduce(np.ones(3), ring.SUM)[0] == ring.size()
"""


@pytest.fixture(scope="module")
def cluster():
    with hosts(2, networks={"eth0": "100mbit", "eth1": "1gbit"}, docker=True, loopback_names=True) as cluster:
        yield cluster


def reject(cluster, port=29500, **variables):
    """A launch of one rank a host that is not going to start."""
    return cluster.environment(MEET, 1, env={"RING_START_TIMEOUT": "4", **variables}, port=port)


def errors(job):
    """What the ranks print while they fail to start, as one line."""
    result = job.wait(30)
    assert result.returncode != 0
    assert result.seconds < 20 * slowness()
    return " ".join(result.stderr.split())


def test_the_fastest_network_that_all_are_on_is_taken_and_named(cluster):
    result = cluster.environment(MEET, 1).run()
    assert result.values("address") == [cluster.address(host, "eth1") for host in cluster.hosts]
    assert result.stderr.count("ring_plugins: eth1 (10.2.0.0/16) connects the hosts with ") == 1
    assert "slower: 10.1.0.0/16 with " in result.stderr
    result = cluster.environment(MEET, 1, env={"RING_INTERFACE": "eth0"}).run()
    assert result.values("address") == [cluster.address(host) for host in cluster.hosts]
    assert "eth0 (10.1.0.0/16) connects the hosts, as RING_INTERFACE says" in result.stderr


@pytest.mark.mpi
def test_a_slow_network_that_mpirun_was_told_to_use_is_used_and_said(cluster):
    warning = "MPI was told to use eth0 (OMPI_MCA_btl_tcp_if_include), but eth1 (10.2.0.0/16) connects the hosts with "
    for transport, address in (("tcp", "10.1.0.1"), ("mpi", None)):
        result = cluster.mpirun(MEET, 1, interface="eth0", env={"RING_TRANSPORT": transport}).run()
        assert result.stderr.count(warning) == 1
        assert result.reports[0]["address"] == address
    result = cluster.mpirun(MEET, 1, interface="eth1").run()
    assert "ring_plugins" not in result.stderr
    assert result.values("address") == [cluster.address(host, "eth1") for host in cluster.hosts]


def test_hosts_that_want_different_networks_are_both_named(cluster):
    other = {"ON_host1": "RING_INTERFACE=eth0", "ON_host2": "RING_INTERFACE=10.2.0.0/16"}
    with (
        reject(cluster, **other) as different,
        reject(cluster, port=29501, ON_host2="RING_INTERFACE=ib0") as missing,
    ):
        text = errors(different)
        assert "host1 (rank 0) with RING_INTERFACE=eth0 has eth0 (10.1.0.0/16), but host2 (rank 1) with" in text
        has = "which has lo (127.0.0.1/8), eth0 (10.1.0.2/16)"
        assert f"RING_INTERFACE='ib0' is not an interface of host2 (rank 1), {has}" in errors(missing)


def test_a_rank_0_that_cannot_be_reached_is_explained(cluster):
    """Four jobs at once, since each waits for RING_START_TIMEOUT."""
    with (
        cluster.firewall("host1", "29500"),
        reject(cluster) as blocked,
        reject(cluster, port=29501, ON_host2="MASTER_ADDR=10.1.0.77") as absent,
        reject(cluster, port=29502, ON_host2="MASTER_ADDR=nowhere") as unknown,
        reject(cluster, port=29503, ON_host2="MASTER_ADDR=host2") as loopback,
    ):
        text = errors(blocked)
        silent = "no answer from host1:29500: the host is down, or a firewall"
        assert f"rank 1 on host2 could not reach rank 0: {silent}" in text
        assert "rank 1 of 2 did not connect to rank 0 on host1, port 29500, in time" in text
        unreachable = "10.1.0.77:29501 cannot be reached (No route to host)"
        assert f"rank 1 on host2 could not reach rank 0: {unreachable}" in errors(absent)
        assert "the name nowhere does not resolve here" in errors(unknown)
        itself = "host2 resolves to 127.0.1.1 here, which is this host itself, and nothing listens there"
        assert itself in errors(loopback)


@pytest.mark.slow
def test_a_firewall_between_the_other_ports_is_named_with_both_hosts(cluster):
    with (
        cluster.firewall("host2", "30000-65534", sources="30000-65534"),
        reject(cluster, RING_INTERFACE="eth0") as blocked,
    ):
        text = errors(blocked)
    assert "rank 0 on host1 cannot reach rank 1 on host2 at 10.1.0.2:" in text
    assert "A firewall between the hosts drops connections" in text
