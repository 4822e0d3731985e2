"""Sockets by which processes of one user find each other."""

import contextlib
import os
import socket

import pytest

from ring_plugins.core.linux.interfaces import own_addresses
from ring_plugins.core.net import sockets
from ring_plugins.core.net.sockets import (
    UnknownUser,
    are_same_user,
    configure,
    connect_below,
    connect_to,
    enable_keepalive,
    end_when_silent,
    listen_below,
    names_below,
)


@pytest.fixture
def name():
    return f"ring_plugins/test/{os.urandom(8).hex()}"


def test_a_process_finds_the_socket_of_its_user_below_a_name(name):
    assert connect_below(name) is None
    with socket.socket(socket.AF_UNIX) as listener:
        listen_below(listener, name, 1)
        assert len(names_below(name)) == 1
        with connect_below(name) as connection:
            listener.accept()[0].sendall(b"x")
            assert connection.recv(1) == b"x"
    assert connect_below(name) is None and names_below(name) == []


def test_a_socket_of_another_user_and_one_at_the_name_itself_do_not_count(name, monkeypatch):
    with socket.socket(socket.AF_UNIX) as stranger, socket.socket(socket.AF_UNIX) as listener:
        stranger.bind(f"\0{name}")
        stranger.listen()
        assert connect_below(name) is None
        listen_below(listener, name, 1)
        user = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
        assert connect_below(name) is None


def test_a_socket_that_nobody_serves_is_waited_for(name):
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as waiting:
        listen_below(listener, name, 0)
        waiting.connect(listener.getsockname())
        with pytest.raises(BlockingIOError):
            connect_to(names_below(name)[0])
        assert connect_below(name, seconds=0.05) is None


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
        return next(sockets._as_in_tables((address, int(port))))

    lines = [f"0: {shown(a)} {shown(b)} 01 0:0 00:0 0 {user[who]} 0 4711 1" for a, b, who in rows]
    table.write_text("\n".join(["sl local rem st q tr re uid timeout inode", *lines]))
    monkeypatch.setattr(sockets, "_TABLES", (str(table),))
    monkeypatch.setattr(sockets, "_ends", lambda connected: OTHER_HOST)
    with connection("127.0.0.1", "127.0.0.1") as (server, _):
        assert are_same_user([server]) == [expected]


@pytest.mark.parametrize("why", ["no table", "user namespace"])
def test_if_the_kernel_does_not_tell_connections_inside_the_host_are_rejected(monkeypatch, why):
    if why == "no table":
        monkeypatch.setattr(sockets, "_TABLES", ("/proc/none", "/proc/none6"))
        expected = "/proc/none cannot be read .*Set RING_SECRET"
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 65534)
        monkeypatch.setattr(sockets, "_ALL_USERS", [])
        expected = "in this user namespace all users .*Set RING_SECRET"
    for source, target in [("127.0.0.1", "127.0.0.1"), (LAN, "127.0.0.1"), ("127.0.0.1", LAN), (LAN, LAN)]:
        with connection(source, target) as (server, _):
            with pytest.raises(UnknownUser, match=expected):
                are_same_user([server])
            assert are_same_user([server], unknown=True) == [True]
            assert are_same_user([server], unknown=False) == [False]
    monkeypatch.setattr(sockets, "_ends", lambda connected: OTHER_HOST)
    with connection("127.0.0.1", "127.0.0.1") as (server, _):
        assert are_same_user([server]) == [True]
        monkeypatch.setattr(sockets, "own_addresses", lambda: ["192.0.2.7", "192.0.2.8"])  # of one host
        with pytest.raises(UnknownUser, match=expected):
            are_same_user([server])


def test_a_row_that_the_kernel_skipped_once_is_looked_for_again(monkeypatch):
    read, reads = sockets._read, []

    def skip_once(found, ends, tables):
        reads.append(tables)
        return "" if len(reads) == 1 else read(found, ends, tables)

    monkeypatch.setattr(sockets, "_read", skip_once)
    with connection("127.0.0.1", "127.0.0.1") as (server, _):
        assert are_same_user([server]) == [True]
    assert len(reads) == 3


#: Linux's TCP_RTO_MAX_MS.
RTO_MAX_MS = 44


@pytest.fixture
def connected():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as connected:
        yield connected


def longest_ms(connected):
    try:
        return connected.getsockopt(socket.IPPROTO_TCP, RTO_MAX_MS)
    except OSError:
        pytest.skip("Linux knows TCP_RTO_MAX_MS since 6.15")


@pytest.mark.parametrize(("seconds", "milliseconds"), [(6, 1000), (3, 1000), (60, 10_000), (900, 120_000)])
def test_what_another_host_does_not_acknowledge_is_soon_repeated_where_linux_can(
    connected, monkeypatch, seconds, milliseconds
):
    """So a network that is back within RING_NETWORK_TIMEOUT is found to be; tests/hosts cuts one.

    Every second for 60 s would be too many repeats: Linux would end the connection after 15 s.
    """
    monkeypatch.setenv("RING_NETWORK_TIMEOUT", str(seconds))
    default = longest_ms(connected)
    configure(connected)
    assert longest_ms(connected) == min(milliseconds, default)


def test_tcp_keeps_its_own_times_where_it_may_repeat_data_only_a_few_times(connected, monkeypatch, tmp_path):
    """Some clusters let Linux end a connection after 5 repeats. Repeating every second would use these up in 4 s."""
    allowed = tmp_path / "tcp_retries2"
    allowed.write_text("5\n")
    monkeypatch.setattr(sockets, "_REPEATS_AT_MOST", allowed)
    default = longest_ms(connected)
    configure(connected)
    assert longest_ms(connected) == default


def test_the_kernel_ends_a_connection_whose_other_host_is_silent(connected, monkeypatch):
    monkeypatch.setenv("RING_NETWORK_TIMEOUT", "2.5")
    end_when_silent(connected)
    assert connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 2500
    assert connected.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


def test_an_idle_connection_is_probed_within_the_network_timeout(connected, monkeypatch):
    monkeypatch.setenv("RING_NETWORK_TIMEOUT", "6")
    enable_keepalive(connected)
    options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    idle, interval, probes = (connected.getsockopt(socket.IPPROTO_TCP, option) for option in options)
    assert connected.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert idle + interval * probes == 6
