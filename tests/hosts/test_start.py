"""Starting on several hosts: which network is taken, and what is said when something keeps the ranks apart."""

import pytest

from tests.hosts import hosts

MEET = """
import os, socket
import numpy as np
import ring_plugins as ring
from tests.worker import report

variable, _, value = os.environ.get("ON_" + socket.gethostname(), "").partition("=")
os.environ |= {variable: value} if variable else {}
ring.init()
from ring_plugins.core.world import current
peers = getattr(current()._rendezvous.transport, "_peers", None)  # MPI does not say
report("address", peers and peers[ring.rank()].address)
assert ring.all_reduce(np.ones(3), ring.SUM)[0] == ring.size()
"""


@pytest.fixture(scope="module")
def cluster():
    with hosts(2, networks={"eth0": "100mbit", "eth1": "1gbit"}, docker=True, loopback_names=True) as cluster:
        yield cluster


def refused(cluster, **variables):
    """What each rank says when it does not start, one rank a host."""
    own = {"RING_START_TIMEOUT": "4", **variables}
    result = cluster.environment(MEET, 1, env=own).run(check=False)
    assert result.returncode != 0
    assert result.seconds < 20
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
    said = "MPI was told to use eth0 (OMPI_MCA_btl_tcp_if_include), but eth1 (10.2.0.0/16) connects the hosts with "
    for transport, address in (("tcp", "10.1.0.1"), ("mpi", None)):
        result = cluster.mpirun(MEET, 1, interface="eth0", env={"RING_TRANSPORT": transport}).run()
        assert result.stderr.count(said) == 1
        assert result.reports[0]["address"] == address
    result = cluster.mpirun(MEET, 1, interface="eth1").run()
    assert "ring_plugins" not in result.stderr
    assert result.values("address") == [cluster.address(host, "eth1") for host in cluster.hosts]


def test_hosts_that_want_different_networks_are_both_named(cluster):
    said = refused(cluster, ON_host1="RING_INTERFACE=eth0", ON_host2="RING_INTERFACE=10.2.0.0/16")
    assert "host1 (rank 0) with RING_INTERFACE=eth0 has eth0 (10.1.0.0/16), but host2 (rank 1) with" in said
    said = refused(cluster, ON_host2="RING_INTERFACE=ib0")
    assert (
        "RING_INTERFACE='ib0' is no interface of host2 (rank 1), which has lo (127.0.0.1/8), eth0 (10.1.0.2/16)" in said
    )


def test_a_firewall_before_the_rendezvous_is_suspected_on_both_sides(cluster):
    with cluster.firewall("host1", "29500"):
        said = refused(cluster)
    assert "rank 1 on host2 could not reach rank 0: no answer from host1:29500: the host is down, or a firewall" in said
    assert "rank 1 of 2 did not come to rank 0 on host1, port 29500, in time" in said


def test_a_firewall_between_the_other_ports_is_named_with_both_hosts(cluster):
    with cluster.firewall("host2", "30000-65534", sources="30000-65534"):
        said = refused(cluster, RING_INTERFACE="eth0")
    assert "rank 0 on host1 cannot reach rank 1 on host2 at 10.1.0.2:" in said
    assert "A firewall between the hosts drops connections" in said


def test_a_host_that_nobody_reaches_and_a_name_that_nobody_knows(cluster):
    said = refused(cluster, ON_host2="MASTER_ADDR=10.1.0.77")
    assert "rank 1 on host2 could not reach rank 0: 10.1.0.77:29500 cannot be reached (No route to host)" in said
    said = refused(cluster, ON_host2="MASTER_ADDR=nowhere")
    assert "the name nowhere does not resolve here" in said
    said = refused(cluster, ON_host2="MASTER_ADDR=host2")
    assert "host2 resolves to 127.0.1.1 here, which is this host itself, and nobody listens there" in said
