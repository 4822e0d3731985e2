"""How supervisors notice the end of the coordinator, and what counts as a message between them."""

import contextlib
import socket
import threading
from types import SimpleNamespace

import pytest

from ring_plugins.core.base.errors import LaunchError
from ring_plugins.core.net.acceptor import Acceptor
from ring_plugins.core.net.auth import Disconnected, Purpose
from ring_plugins.launcher import coordinator as coordinator_module
from ring_plugins.launcher.coordinator_link import HostJob, Link, read_message
from tests.launcher.coordinators import Polled, job


@pytest.fixture(autouse=True)
def _nobody_reads_the_last_message(monkeypatch):
    monkeypatch.setattr(coordinator_module, "_READ_SECONDS", 0.0)


def read(link, until):
    end = 200
    while not until() and end:
        link.read()
        end -= 1
        threading.Event().wait(0.02)
    assert until()


def test_a_supervisor_whose_coordinator_is_gone_is_orphaned_and_one_that_only_lost_the_connection_is_not():
    with Polled() as polled:
        link = Link(job(polled.coordinator))
        link.send("here", {"host": "a", "port": 1})
        while polled.coordinator._hosts[0].here is None:
            threading.Event().wait(0.01)
        link.send("here", {"host": "a", "port": -1})  # for which the coordinator closes the connection
        read(link, lambda: link.is_lost)
        assert not link.is_orphaned and link.read() == []
        lost = "host1 is lost, with ranks 0, 1; the others may go on."
        assert polled.told == ["host1 has sent what no supervisor sends (ValueError).", lost]
    with Polled() as polled:
        link = Link(job(polled.coordinator))
    read(link, lambda: link.is_lost)
    assert link.is_orphaned
    with pytest.raises(LaunchError, match=r"cannot reach the process that started this job \(127.0.0.1:"):
        Link(job(polled.coordinator))


@pytest.mark.parametrize("speaks", ["our language", "another"])
def test_what_listens_in_the_place_of_the_coordinator_without_its_key_is_not_taken_for_it(speaks):
    with Polled() as polled:
        link = Link(job(polled.coordinator))
    over = threading.Event()

    def answer(listener, acceptor):
        while not over.is_set():
            if acceptor is not None:
                acceptor.poll(0.02)
                continue
            with contextlib.suppress(TimeoutError), listener.accept()[0] as connected:
                connected.sendall(b"220 mail")

    with socket.create_server(("127.0.0.1", polled.coordinator.port)) as listener:
        listener.settimeout(0.02)
        acceptor = Acceptor(b"another key", Purpose.LAUNCHER) if speaks == "our language" else None
        if acceptor is not None:
            acceptor.add(listener)
        thread = threading.Thread(target=answer, args=(listener, acceptor))
        thread.start()
        try:
            read(link, lambda: link.is_lost)
            assert link.is_orphaned
        finally:
            over.set()
            thread.join()
            if acceptor is not None:
                acceptor.close()


def test_a_host_that_is_silent_does_not_count_as_ended(monkeypatch):
    with Polled() as polled:
        link = Link(job(polled.coordinator))
        polled.stop()
        timeout = Disconnected("Connection timed out", 110)
        monkeypatch.setattr(link, "_frames", SimpleNamespace(read=lambda: (_ for _ in ()).throw(timeout), close=list))
    link.read()
    assert link.is_lost and not link.is_orphaned


@pytest.mark.parametrize(
    "data", [b"1", b"null", b"[]", b'["over"]', b'["over", 1, 2]', b'[["over"], 1]', b'{"a": 1, "b": 2}']
)
def test_what_is_no_message_between_supervisor_and_coordinator_counts_as_the_end_of_the_connection(data):
    with pytest.raises(Disconnected, match="it sent an invalid message"):
        read_message(data)
    assert read_message(b'["over", null]') == ("over", None)


def test_a_host_job_is_the_same_after_its_way_to_another_host():
    sent = HostJob(
        ["10.0.0.1"], 29, "key", 1, 2, [2, 3], 4, ["x"], {"A": "b"}, most=6, is_added=True, question={"c": 1}
    )
    assert HostJob.unpack(sent.pack()) == sent
