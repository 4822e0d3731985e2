import socket
import time

import pytest

from ring_plugins.core.control import ControlClient, ControlServer
from ring_plugins.core.control.channel import EVERYONE, FrameSocket


@pytest.fixture
def channels():
    made = []
    yield made
    for channel in made:
        channel.abandon()


def hub_and_links(channels, ranks, same_host=True, address=None):
    hub = ControlServer(ranks, () if same_host else ("127.0.0.1",))
    where = {**hub.address, **(address or {})}
    channels += [hub, *(ControlClient(rank, ranks, where, same_host) for rank in range(1, ranks))]
    return hub, channels[1:]


def run(channels, until, seconds=10):
    end = time.monotonic() + seconds
    while not until() and time.monotonic() < end:
        for channel in channels:
            channel.poll(0.005)
    return until()


@pytest.mark.parametrize("same_host", [True, False], ids=["one host", "over TCP"])
def test_messages_both_ways_whole_and_in_order(channels, same_host):
    hub, links = hub_and_links(channels, 5, same_host)
    heard = []
    hub.on("to hub", lambda sender, body: heard.append((sender, body["i"], len(body["text"]))))
    for link in links:
        for i in range(20):
            link.tell(0, "to hub", {"i": i, "text": "x" * (100_000 if i == 7 else 3)})
    assert run(channels, lambda: len(heard) == 80)
    for rank in range(1, 5):
        assert [(i, n) for sender, i, n in heard if sender == rank] == [
            (i, 100_000 if i == 7 else 3) for i in range(20)
        ]
    got = []
    for link in links:
        link.on("news", lambda sender, body, rank=link.rank: got.append((rank, sender, body["n"])))
    hub.tell(EVERYONE, "news", {"n": 1})
    hub.tell(3, "news", {"n": 2})
    assert run(channels, lambda: len(got) == 5)
    assert sorted(got) == [(1, 0, 1), (2, 0, 1), (3, 0, 1), (3, 0, 2), (4, 0, 1)]


def test_rank_0_can_tell_itself(channels):
    hub, _ = hub_and_links(channels, 2)
    heard = []
    hub.on("note", lambda sender, body: heard.append((sender, body)))
    hub.tell(0, "note", {"a": 1})
    assert run(channels, lambda: bool(heard))
    assert heard == [(0, {"a": 1})]


def test_an_end_without_farewell_is_a_loss_and_one_with_it_is_not(channels):
    hub, (one, two) = hub_and_links(channels, 3)
    lost, left = [], []
    hub.on_lost, hub.on_left = lambda rank, how: lost.append(rank), left.append
    assert run(channels, lambda: len(hub.connected) == 2)
    one.close()
    two.abandon()
    assert run([hub], lambda: bool(lost and left))
    assert (lost, left) == ([2], [1])


def test_rank_0s_end_is_noticed(channels):
    hub, (link,) = hub_and_links(channels, 2)
    lost = []
    link.on_lost = lambda rank, how: lost.append(rank)
    assert run(channels, lambda: hub.connected == [1])
    assert run(channels, lambda: link._hub is not None and link._hub.trusted)
    hub.abandon()
    assert run([link], lambda: bool(lost))
    assert lost == [0]


def test_who_does_not_know_the_secret_is_not_heard(channels):
    hub, (stranger,) = hub_and_links(channels, 2, address={"secret": "00" * 32})
    heard = []
    hub.on("note", lambda sender, body: heard.append(body))
    stranger.tell(0, "note", {"a": 1})
    assert not run(channels, lambda: bool(heard or hub.connected), seconds=0.5)


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", b"\xff\xff\xff\xff" + b"x" * 4096, b"\0\0\0\x02[]"])
def test_what_is_no_rank_is_shown_the_door(channels, said):
    hub, _ = hub_and_links(channels, 2, same_host=False)
    with socket.create_connection(("127.0.0.1", hub.address["port"])) as intruder:
        intruder.sendall(said)
        intruder.setblocking(False)
        assert run([hub], lambda: bool(hub._strangers))
        assert run([hub], lambda: not hub._strangers, seconds=2)
    assert hub.connected == []


def test_what_may_be_dropped_is_dropped_and_the_rest_is_kept():
    here, there = socket.socketpair()
    with there:
        end = FrameSocket(here)
        end.trusted = True
        for _ in range(100):
            end.send(["x" * 100_000, {}], droppable=True)
        end.send(["kept", {}])
        assert 50 < end.dropped < 100
        other = FrameSocket(there)
        other.trusted = True
        messages = []
        while not messages or messages[-1][0] != "kept":
            end.write()
            messages += other.read()
        assert len(messages) == 101 - end.dropped
        end.close()
