"""What the coordinator of a job on several hosts makes of its hosts' reports."""

import select
import signal
import socket
import threading

import pytest

from ring_plugins.core.base.errors import LaunchError
from ring_plugins.core.net.auth import Claim, ClientHandshake, Purpose, advance, wait_for
from ring_plugins.launcher import coordinator as coordinator_module
from ring_plugins.launcher.coordinator import Coordinator
from ring_plugins.launcher.coordinator_link import Link
from ring_plugins.launcher.job_hosts import End, verdict
from ring_plugins.launcher.processes import Processes
from tests.launcher.coordinators import Logins, Polled, coordinator, job


@pytest.fixture(autouse=True)
def _nobody_reads_the_last_message(monkeypatch):
    monkeypatch.setattr(coordinator_module, "_READ_SECONDS", 0.0)


def test_added_ranks_go_to_hosts_that_have_ranks():
    with coordinator(most=6) as found:
        assert found.add_ranks(1, None) == "no: the job has not begun yet"
        found._started = {}
        assert found.add_ranks(1, "host3") == "no: --host host3 is none of the job's hosts: host1, me@host2"
        assert found.add_ranks(1, "host2") == "ok: rank 4 on me@host2 will join where an epoch begins"
        found._hosts[1].report = []
        assert found.add_ranks(1, "host2") == "no: --host host2 is none of the job's hosts: host1"
        assert found.add_ranks(2, None) == "no: 2 asked for, but 1 of the job's 6 slots (--max-ranks 6) is free"
        found._hosts[0].is_lost = True
        assert found.add_ranks(1, None) == "no: the job ends"


@pytest.mark.parametrize("is_over", [False, True])
@pytest.mark.parametrize("min_ranks", [1, 2, 3])
def test_nobody_is_advised_to_add_ranks_to_a_job_that_is_over(is_over, min_ranks):
    told = []
    with coordinator(told.append, logins=Logins(), min_ranks=min_ranks) as of:
        of._failed = [End(3, 1, "failed")] * is_over
        of._hosts[1].report = []
        of._give_out_anew(of._hosts[1])
    advice = "`ring add-ranks 2` lets other processes take the places of ranks 2, 3, and --host chooses where."
    assert told == ([] if is_over or min_ranks == 3 else [advice])


def test_added_ranks_whose_host_is_lost_join_on_another_one():
    with Polled(most=6) as polled:
        links = [Link(job(polled.coordinator, index)) for index in range(2)]
        for link in links:
            link.send("here", {"host": "a", "port": 1})
        while not all(host.here for host in polled.coordinator._hosts):
            threading.Event().wait(0.01)
        polled.coordinator._started = {}
        polled.coordinator.add_ranks(2, "host2")
        links[1].send("joined", [4])
        links[1].close()
        told, end = [], 400
        while len(told) < 2 and end:
            told, end = [*told, *links[0].read()], end - 1
            threading.Event().wait(0.01)
        assert told == [
            ("added", {"in use": 6, "slots": [[4, 1, 0], [5, 1, 0]]}),
            ("added", {"in use": 6, "slots": [[5, 0, 1]]}),
        ]
    assert polled.told[1:] == ["rank 5 will join on host1, since me@host2 has no ranks any more."]


NOWHERE = (
    "nowhere: the login ended with status 255 before its ranks started; its output above says why; "
    "rank 5 will not join."
)


def test_a_host_that_is_added_gets_the_join_info_of_another_one_and_all_hear_who_waits_there():
    def next_of(link, kind):
        for _ in range(400):
            for found, body in link.read():
                if found == kind:
                    return body
            threading.Event().wait(0.01)
        raise AssertionError(kind)

    logins = Logins()
    with Polled(most=6, logins=logins) as polled:
        found = polled.coordinator
        links = [Link(job(found, index)) for index in range(2)]
        for link in links:
            link.send("here", {"host": "a", "port": 1})
        while not all(host.here for host in found._hosts):
            threading.Event().wait(0.01)
        found._started = {"secret": "hush"}
        assert found.add_ranks(1, "host3") == "ok: rank 4 on host3 will join where an epoch begins"
        added = Link(job(found, 2))
        added.send("here", {"host": "c", "port": 0})
        next_of(links[0], "join info?")
        links[0].send("join info", {"address": "10.1.0.1"})
        start = next_of(added, "start")
        assert start["join info"] == {"address": "10.1.0.1"} and start["added"]["slots"] == [[4, 2, 0]]
        added.send("members", {"members": 0, "joiners": [{"slot": 4}]})
        assert next_of(links[1], "joiners") == [{"slot": 4}]
        added.send("members", {"members": 1, "joiners": []})
        assert next_of(links[1], "joiners") == []
        logins.code = 255
        assert found.add_ranks(1, "nowhere").startswith("ok: rank 5 on nowhere")
        while NOWHERE not in polled.told:
            threading.Event().wait(0.01)
        assert found._added_slots.told()["in use"] == 5


def test_a_host_that_is_added_with_other_versions_runs_no_ranks():
    logins = Logins(problems=lambda host, report: [f"torch {report}, but 2.13 on a: pip install it."])
    with Polled(most=6, logins=logins) as polled:
        found = polled.coordinator
        member = Link(job(found, 0))
        member.send("here", {"host": "a", "port": 1})
        while not found._hosts[0].here:
            threading.Event().wait(0.01)
        found._started = {"secret": "hush"}
        found.add_ranks(1, "host3")
        added = Link(job(found, 2))
        added.send("here", {"host": "c", "port": 0, "report": "2.5"})
        while not polled.told:
            threading.Event().wait(0.01)
        assert logins.ended == 1 and polled.told == [
            "host3 cannot run ranks as it is: torch 2.5, but 2.13 on a: pip install it; rank 4 will not join."
        ]
        heard = []
        while "end" not in heard:
            heard += [kind for kind, _ in added.read()]
        assert "start" not in heard


@pytest.mark.parametrize("lost", ["login", "supervisor", "time"])
def test_a_job_does_not_begin_without_a_supervisor(monkeypatch, lost):
    monkeypatch.setenv("RING_START_TIMEOUT", "0.001" if lost == "time" else "60")
    logins = Logins(code=255 if lost == "login" else None)
    with coordinator(logins=logins) as of:
        of.log_in()
        assert logins.started == [("host1", 0), ("me@host2", 1)]
        of._hosts[0].here, of._hosts[1].is_lost = {}, lost == "supervisor"
        threading.Event().wait(0.01)
        status, why = of.finish()
    expected = {
        "login": "me@host2: the login ended with status 255 before its ranks started; its output above says why.",
        "supervisor": "me@host2: the supervisor ended before its ranks started; its output above says why.",
        "time": "me@host2 did not come within 0.001 s. Set RING_START_TIMEOUT to wait longer.",
    }
    assert status == 1 and expected[lost] in why


@pytest.mark.parametrize("comes", [True, False])
def test_a_host_that_comes_when_all_others_have_ended_does_not_keep_the_job_from_its_end(comes):
    logins = Logins()
    with Polled(most=6, logins=logins) as polled:
        found = polled.coordinator
        found._started = {"secret": "hush"}
        assert found.add_ranks(1, "host3") == "ok: rank 4 on host3 will join where an epoch begins"
        for host in found._hosts[:2]:
            host.report = [End(rank, 0, "") for rank in host.ranks]
        link = Link(job(found, 2)) if comes else None
        if link is not None:
            link.send("here", {"host": "c", "port": 0})
        for _ in range(500):
            if found._hosts[2].is_over:
                break
            threading.Event().wait(0.01)
        assert found._hosts[2].is_over and logins.ended == 1
        assert polled.told == ["host3 comes too late, since the other ranks have ended; rank 4 will not join."]
        assert verdict(found._hosts, [], 4) == (0, None)


def test_a_supervisor_that_dies_when_it_has_proved_itself_is_lost_and_ends_nothing_else():
    with coordinator() as of, socket.create_connection(("127.0.0.1", of.port)) as connected:
        of._poll(0.1)
        handshake = ClientHandshake(of.key.encode(), Purpose.LAUNCHER, Claim(1))
        assert wait_for(connected, select.POLLIN, 5) and not handshake.has_proved
        connected.setblocking(False)
        assert not advance(connected, handshake) and handshake.has_proved
        connected.close()  # its kernel answers the result of the handshake with a reset
        for _ in range(100):
            of._poll(0.05)
            if of._hosts[1].is_lost:
                break
        assert [host.is_lost for host in of._hosts] == [False, True]


def test_a_supervisor_that_comes_when_the_job_ends_already_is_not_waited_for():
    with Polled() as polled:
        polled.coordinator._end(signal.SIGTERM)
        with pytest.raises(LaunchError, match="does not expect this rank"):
            Link(job(polled.coordinator, 1))
        assert not polled.coordinator._hosts[1].is_connected


def test_a_signal_ends_the_job_with_its_status():
    with coordinator() as found:
        found._processes.signalled = signal.SIGTERM
        assert found.finish() == (143, None)


def test_a_supervisor_in_the_same_process_gets_messages_without_a_connection():
    with Coordinator([("host1", [0, 1])], Processes(), print, None, most=4, takes_requests=True) as found:
        assert found.port == 0
        link = found.connect(0)
        link.send("here", {"host": "a", "port": 0})
        ((kind, start),) = link.read()
        assert kind == "start" and start["address"] == "127.0.0.1"
        assert found.add_ranks(1, None) == "ok: rank 2 will join where an epoch begins"
        assert found.add_ranks(1, "host9") == "no: --host host9 is none of the job's hosts: host1"
        assert link.read() == [("added", {"in use": 3, "slots": [(2, 0, 0)]})]
        link.send("ended", {"ranks": [[0, 0, ""], [1, 3, "failed"]], "why": None})
        assert link.read() == [("over", 3)] and found.result == (3, "rank 1 ended with exit status 3.")
