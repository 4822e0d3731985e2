"""SLURM's compressed lists."""

import pytest

from ring_plugins.core.rendezvous import slurm


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [("a1,a2", "a1"), ("a1", "a1"), ("rack[03-07,12]-gpu", "rack03-gpu"), ("n[5,7-9]", "n5"), ("", "127.0.0.1")],
)
def test_first_host_of_slurms_list(nodelist, host):
    assert slurm.first_host(nodelist) == host


def test_several_brackets_multiply():
    assert slurm.expand("r[1-2]n[08-09]") == ["r1n08", "r1n09", "r2n08", "r2n09"]


def test_counts_per_node_may_be_repeated():
    assert slurm.expand_counts("4(x2),1") == [4, 4, 1]


def test_the_ports_of_two_steps_differ_and_stay_in_range():
    ports = {slurm.port(job, step) for job in range(1000, 1010) for step in range(3)}
    assert len(ports) == 30 and all(15000 <= port < 30000 for port in ports)
