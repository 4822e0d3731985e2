"""Hosts that go silent, with made-up retransmission counts."""

import socket
from types import SimpleNamespace

from ring_plugins.core.base.member import Member, Members
from ring_plugins.core.control.tcp_liveness import TcpConnection, TcpLiveness, retransmissions

CONNECTION = TcpConnection(("10.0.0.1", 5), ("10.0.0.2", 7))
ADDRESSES = [("10.0.0.1", "172.17.0.1"), ("10.0.0.2", "172.17.0.1"), ("10.0.0.2",)]


class Detector:
    rank = 0

    def __init__(self, mesh=None, ports=(0, 0, 0)):
        self.lost, self.mesh = [], mesh
        self.members = Members(0, [Member(r, r, port=ports[r], addresses=ADDRESSES[r]) for r in range(3)])

    def lose_network(self, rank, how):
        self.lost.append((rank, how))


def look_on(looks, connection=CONNECTION, mesh=None, ports=(0, 0, 0)):
    """What is reported after each check, one per second; a look is the kernel's count of retransmissions."""
    detector, left = Detector(mesh, ports), list(looks)
    liveness = TcpLiveness(detector, lambda: {connection: left.pop(0)})
    lost = []
    for second in range(len(looks)):
        liveness.tick(1.001 * second)
        lost.append(bool(detector.lost))
    return lost, detector.lost


def test_silence_is_reported_only_after_the_timeout():
    lost, (first, *_) = look_on([1, 2, 3, 4, 4, 5, 5, 5])
    assert lost == [False] * 6 + [True] * 2
    assert first == (1, "10.0.0.2, port 7, has acknowledged nothing from 10.0.0.1, port 5, for 6 s")


def test_a_congested_network_acknowledges_something_now_and_then():
    assert look_on([1, 2, 3, 4, 1, 2, 3, 4, 5, 1, 2, 3])[1] == []
    assert look_on([1, 2, 2, 2, 2, 2, 2, 2, 2, 2])[1] == []


def test_other_connections_of_the_process_do_not_count():
    for other in ("8.8.8.8", "172.17.0.1"):
        assert look_on([9] * 10, TcpConnection(("10.0.0.1", 5), (other, 7)))[1] == []


def test_nor_do_those_to_other_programs_on_a_ranks_host_if_the_job_goes_on_without_lost_ranks():
    for local, remote, is_of_the_job in ((40_000, 7, True), (5, 40_000, True), (40_000, 5432, False)):
        connection = TcpConnection(("10.0.0.1", local), ("10.0.0.2", remote))
        assert bool(look_on([9] * 10, connection, object(), (5, 7, 0))[1]) == is_of_the_job
        assert look_on([9] * 10, connection)[1]


def test_a_rank_that_is_waited_for_is_named_rather_than_another_of_its_host(monkeypatch):
    waiting = {1: SimpleNamespace(missing=(2,))}
    monkeypatch.setattr("ring_plugins.core.control.tcp_liveness.long_waits", waiting)
    assert look_on([5] * 8)[1][0][0] == 2


def test_a_process_that_does_not_read_is_not_silent():
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as full:
        taken, _ = listener.accept()
        full.setblocking(False)
        try:
            while True:
                full.send(bytes(1 << 16))
        except BlockingIOError:
            pass
        assert TcpConnection(full.getsockname(), taken.getsockname()) not in retransmissions()
        taken.close()
