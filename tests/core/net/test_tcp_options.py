"""Options by which the kernel repeats lost data soon, and ends silent connections."""

import socket

import pytest

from ring_plugins.core.net import tcp_options
from ring_plugins.core.net.tcp_options import configure, enable_keepalive, end_when_silent

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
    monkeypatch.setattr(tcp_options, "_REPEATS_AT_MOST", allowed)
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
