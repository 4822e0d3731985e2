import os
import resource
import socket

import pytest

from ring_plugins.core.linux.interfaces import Interface
from ring_plugins.doctor import host


def test_a_containers_quota_is_a_warning(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.setattr(host.process, "cores", lambda: 1)
    monkeypatch.setattr(host.process, "cpu_quota", lambda: 1.5)
    usable, quota = host.cores()
    assert "enough for 1 rank of" in usable.summary
    assert quota.severity.name == "WARNING" and "1.5 of the 16 cores" in quota.summary


def test_too_few_open_files_are_a_warning(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 256))
    (finding,) = host.limits()
    assert finding.severity.name == "WARNING" and "ulimit -n 4096" in finding.remedy


def test_an_interface_that_is_not_there_is_an_error(monkeypatch):
    monkeypatch.setenv("RING_INTERFACE", "ib77")
    (finding,) = host.networks()
    assert finding.severity.name == "ERROR" and "ib77" in finding.summary


@pytest.mark.parametrize(("addresses", "severity"), [([], "WARNING"), (["127.0.1.1"], "FINE"), (["10.0.0.1"], "FINE")])
def test_the_hosts_own_name(monkeypatch, addresses, severity):
    monkeypatch.setattr(socket, "gethostname", lambda: "node1")
    monkeypatch.setattr(host, "resolve", lambda name: addresses)
    (finding,) = host.host_name()
    assert finding.severity.name == severity and "node1" in finding.summary
    assert ("/etc/hosts" in finding.remedy) == (addresses != ["10.0.0.1"])


def test_addresses_are_grouped_by_interface_external_ones_first(monkeypatch):
    addresses = [
        Interface("lo", "127.0.0.1", 8, 0, True),
        Interface("eth0", "10.0.0.1", 16, 0, False),
        Interface("eth0", "10.1.0.1", 16, 0, False),
    ]
    monkeypatch.setattr(host.linux, "interfaces", lambda: addresses)
    first, last = host.network_interfaces()
    assert first.name == "eth0" and first.external
    assert first.addresses == ("10.0.0.1", "10.1.0.1") and first.networks == ("10.0.0.0/16", "10.1.0.0/16")
    assert last.name == "lo" and not last.external
