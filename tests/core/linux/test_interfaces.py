"""Addresses of this host."""

import socket
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest

from ring_plugins.core.linux import interfaces as module
from ring_plugins.core.linux.interfaces import address_towards, free_port, interfaces, own_addresses, reserve_port


def test_loopback_is_internal():
    assert any(i.address == "127.0.0.1" and i.internal and i.network == "127.0.0.0/8" for i in interfaces())
    assert not any(address.startswith("127.") for address in own_addresses())


@pytest.fixture
def sysfs(monkeypatch, tmp_path):
    """A host with a card, its second address, a bridge, a card without a cable, and one that is down."""

    def address(text, mask="255.255.0.0"):
        return SimpleNamespace(family=socket.AF_INET, address=text, netmask=mask)

    found = {"eth0": "10.1.0.1", "eth0:1": "10.1.0.9", "docker0": "172.17.0.1", "eth1": "10.2.0.1", "eth2": "10.3.0.1"}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {name: [address(text)] for name, text in found.items()})
    monkeypatch.setattr(module, "_SYSFS", tmp_path)
    for name, flags, carrier in (("eth0", 0x1003, 1), ("docker0", 0x1003, 1), ("eth1", 0x1003, 0), ("eth2", 0x1002, 0)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "flags").write_text(hex(flags))
        (tmp_path / name / "carrier").write_text(f"{carrier}\n")
        (tmp_path / name / "speed").write_text("10000\n")
    (tmp_path / "eth0" / "device").mkdir()


@pytest.mark.usefixtures("sysfs")
def test_bridges_and_unplugged_cards_are_internal_and_virtual_speeds_do_not_count():
    assert [tuple(i) for i in interfaces()] == [
        ("eth0", "10.1.0.1", 16, 10000, False),
        ("eth0", "10.1.0.9", 16, 10000, False),
        ("docker0", "172.17.0.1", 16, 0, True),
        ("eth1", "10.2.0.1", 16, 0, True),
    ]


def test_the_address_towards_a_host_is_one_of_ours_or_none():
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert address_towards("no such name.") == ""


def test_a_free_port_can_be_listened_on():
    socket.create_server(("", free_port())).close()


def test_a_reserved_port_goes_to_nobody_but_a_server_that_asks_for_it():
    with reserve_port() as reserved:
        port = reserved.getsockname()[1]
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("", port))  # as any program that does not know of it
        child = f"import socket; server = socket.create_server(('', {port})); print(server.getsockname()[1])"
        assert subprocess.run([sys.executable, "-c", child], capture_output=True, check=True).stdout == b"%d\n" % port
        with socket.create_server(("", port)) as server:
            socket.create_connection(server.getsockname()).close()
