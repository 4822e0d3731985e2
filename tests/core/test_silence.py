import socket
from types import SimpleNamespace

from ring_plugins.core.control.tcp_liveness import Line, TcpLiveness, unanswered

LINE = Line(("10.0.0.1", 5), ("10.0.0.2", 7))
ADDRESSES = [["10.0.0.1", "172.17.0.1"], ["10.0.0.2", "172.17.0.1"], ["10.0.0.2"]]


class Told:
    rank = 0

    def __init__(self):
        self.lost = []

    def lose_network(self, rank, how):
        self.lost.append((rank, how))


def look_on(looks, line=LINE):
    """What is told after each look, one a second; a look is how often the kernel has repeated something."""
    told, left = Told(), list(looks)
    failure_detector = TcpLiveness(told, ADDRESSES, lambda: {line: left.pop(0)})
    lost = []
    for second in range(len(looks)):
        failure_detector.tick(1.001 * second)
        lost.append(bool(told.lost))
    return lost, told.lost


def test_only_silence_that_lasts_is_told():
    lost, (first, *_) = look_on([1, 2, 3, 4, 4, 5, 5, 5])
    assert lost == [False] * 6 + [True] * 2
    assert first == (1, "10.0.0.2, port 7, has acknowledged nothing from 10.0.0.1, port 5, for 6 s")


def test_what_is_acknowledged_now_and_then_is_a_crowded_network():
    assert look_on([1, 2, 3, 4, 1, 2, 3, 4, 5, 1, 2, 3])[1] == []
    assert look_on([1, 2, 2, 2, 2, 2, 2, 2, 2, 2])[1] == []


def test_other_connections_of_the_process_do_not_count():
    for stranger in ("8.8.8.8", "172.17.0.1"):
        assert look_on([9] * 10, Line(("10.0.0.1", 5), (stranger, 7)))[1] == []


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
        assert Line(full.getsockname(), taken.getsockname()) not in unanswered()
        taken.close()
