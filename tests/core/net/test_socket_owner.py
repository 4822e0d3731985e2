"""Whose the other end of a connection is, wherever it says that it comes from."""

import contextlib
import os
import socket

import pytest

from ring_plugins.core.linux.interfaces import own_addresses
from ring_plugins.core.net import socket_owner
from ring_plugins.core.net.socket_owner import UnknownUser, are_same_user

LAN = next(iter(own_addresses()), "127.0.0.3")
OTHER_HOST = (("192.0.2.7", 29500), ("192.0.2.8", 40000))


@contextlib.contextmanager
def connection(source, target, mapped=False):
    """The accepting and the connecting end, at a listener at all addresses."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("", 0)))
        port = listener.getsockname()[1]
        client = stack.enter_context(socket.socket(socket.AF_INET6 if mapped else socket.AF_INET))
        prefix = "::ffff:" if mapped else ""
        client.bind((prefix + source, 0))
        client.connect((prefix + target, port))
        yield stack.enter_context(listener.accept()[0]), client


@pytest.mark.parametrize("mapped", [False, True], ids=["IPv4", "mapped into IPv6"])
@pytest.mark.parametrize(
    ("source", "target"),
    [("127.0.0.1", "127.0.0.1"), ("127.0.0.9", "127.0.0.1"), (LAN, "127.0.0.1"), ("127.0.0.1", LAN), (LAN, LAN)],
)
def test_another_user_is_known_from_whatever_address_it_connects(monkeypatch, source, target, mapped):
    with connection(source, target, mapped) as (server, client):
        assert are_same_user([server, client]) == [True, True]
        own = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: own + 1)
        assert are_same_user([server, client]) == [False, False]


def test_a_closed_socket_is_nobodys_though_the_kernel_shows_it_as_roots(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with connection("127.0.0.1", LAN) as (server, client):
        client.shutdown(socket.SHUT_WR)
        client.close()
        assert are_same_user([server]) == [False]
        server.close()
        assert are_same_user([server]) == [False]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([], True),  # another host
        ([("192.0.2.8:40000", "192.0.2.7:29500", "own")], True),
        ([("192.0.2.8:40000", "192.0.2.7:29500", "other")], False),
        ([("192.0.2.8:40000", "10.0.0.1:80", "other")], False),  # a packet filter has led it here
        ([("192.0.2.8:40000", "10.0.0.1:80", "own")], True),
        ([("192.0.2.8:40000", "10.0.0.1:80", "other"), ("192.0.2.8:40000", "192.0.2.7:29500", "own")], True),
        ([("192.0.2.8:40000", "192.0.2.7:29500", "own"), ("192.0.2.8:40000", "192.0.2.7:29500", "other")], False),
        ([("192.0.2.8:40001", "192.0.2.7:29500", "other"), ("192.0.2.7:29500", "192.0.2.8:40000", "other")], True),
    ],
)
def test_a_peer_is_on_this_host_if_its_end_is_in_the_table(monkeypatch, tmp_path, rows, expected):
    table, user = tmp_path / "tcp", {"own": os.geteuid(), "other": os.geteuid() + 1}

    def shown(end):
        address, _, port = end.partition(":")
        return next(socket_owner._as_in_tables((address, int(port))))

    lines = [f"0: {shown(a)} {shown(b)} 01 0:0 00:0 0 {user[who]} 0 4711 1" for a, b, who in rows]
    table.write_text("\n".join(["sl local rem st q tr re uid timeout inode", *lines]))
    monkeypatch.setattr(socket_owner, "_TABLES", (str(table),))
    monkeypatch.setattr(socket_owner, "_ends", lambda connected: OTHER_HOST)
    with connection("127.0.0.1", "127.0.0.1") as (server, _):
        assert are_same_user([server]) == [expected]


@pytest.mark.parametrize("why", ["no table", "user namespace"])
def test_if_the_kernel_does_not_tell_connections_inside_the_host_are_rejected(monkeypatch, why):
    if why == "no table":
        monkeypatch.setattr(socket_owner, "_TABLES", ("/proc/none", "/proc/none6"))
        expected = "/proc/none cannot be read .*Set RING_SECRET"
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 65534)
        monkeypatch.setattr(socket_owner, "_ALL_USERS", [])
        expected = "in this user namespace all users .*Set RING_SECRET"
    for source, target in [("127.0.0.1", "127.0.0.1"), (LAN, "127.0.0.1"), ("127.0.0.1", LAN), (LAN, LAN)]:
        with connection(source, target) as (server, _):
            with pytest.raises(UnknownUser, match=expected):
                are_same_user([server])
            assert are_same_user([server], unknown=True) == [True]
            assert are_same_user([server], unknown=False) == [False]
    monkeypatch.setattr(socket_owner, "_ends", lambda connected: OTHER_HOST)
    with connection("127.0.0.1", "127.0.0.1") as (server, _):
        assert are_same_user([server]) == [True]
        monkeypatch.setattr(socket_owner, "own_addresses", lambda: ["192.0.2.7", "192.0.2.8"])  # of one host
        with pytest.raises(UnknownUser, match=expected):
            are_same_user([server])


def test_a_row_that_the_kernel_skipped_once_is_looked_for_again(monkeypatch):
    read, reads = socket_owner._read, []

    def skip_once(found, ends, tables):
        reads.append(tables)
        return "" if len(reads) == 1 else read(found, ends, tables)

    monkeypatch.setattr(socket_owner, "_read", skip_once)
    with connection("127.0.0.1", "127.0.0.1") as (server, _):
        assert are_same_user([server]) == [True]
    assert len(reads) == 3
