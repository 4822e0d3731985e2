"""The live view: ranks are asked only while somebody watches, and shown with the numbers that scripts see."""

import json
import os
import threading
import time
from types import SimpleNamespace

import pytest

from ring_plugins.core.base import config
from ring_plugins.core.control.channel import EVERYONE
from ring_plugins.core.control.wait import LongWait, long_waits
from ring_plugins.core.net.local_service import connected, processes
from ring_plugins.core.observe import live
from ring_plugins.core.observe.live import SERVICE, LiveView, Vitals
from ring_plugins.core.trace.steps import StepClock
from tests.launch import run_ranks


class Channel:
    """Keeps what is told; messages to this rank are handled at once."""

    def __init__(self, rank):
        self.rank, self.handlers, self.told = rank, {}, []

    def on(self, kind, handler, **_):
        self.handlers[kind] = handler

    def tell(self, rank, kind, body=None, **_):
        self.told.append((rank, kind))
        if rank == self.rank and kind in self.handlers:
            self.handlers[kind](self.rank, body)


def members(*ranks, of=4):
    known = {rank: SimpleNamespace(host=f"host{rank}", pid=100 + rank) for rank in range(of)}
    return SimpleNamespace(ranks=ranks, known=known, shards=of, view=of - len(ranks))


@pytest.fixture
def view():
    channel = Channel(1)
    vitals, found = Vitals(channel, StepClock()), LiveView(channel, members(1, 3))
    yield SimpleNamespace(channel=channel, view=found, vitals=vitals)
    found.close()
    vitals.close()


def test_a_rank_says_what_it_has_done_since_it_was_asked_last(monkeypatch):
    steps, channel = StepClock(), Channel(0)
    vitals = Vitals(channel, steps)
    monkeypatch.setattr(live.time, "monotonic", lambda: vitals._before[0] + 2.0)
    steps.count, steps.waiting, steps.moving, steps.compression = 8, 1.0, 0.5, "int8"
    steps.ended.append((0.0, 7, 0.0, 0.0, 0.0, 4096))
    monkeypatch.setitem(long_waits, "here", LongWait("c", "all_reduce", 1, "", (3,), vitals._before[0] - 1, 0.0))
    found = vitals._look()
    assert found["steps"] == 8 and found["step_seconds"] == pytest.approx(0.25)
    assert (found["waiting"], found["moving"]) == pytest.approx((0.5, 0.25))
    assert found["step_bytes"] == 4096 and found["compression"] == "int8" and found["memory_bytes"] > 1e6
    assert (found["waits_in"], found["waits_for"], found["waits_seconds"]) == ("all_reduce", [3], 3.0)
    assert vitals._look()["step_seconds"] is None  # none since then


def test_ranks_are_asked_only_while_somebody_watches(view):
    def ticking():
        while not over.is_set():
            view.view.tick(time.monotonic())
            time.sleep(0.01)

    over = threading.Event()
    for _ in range(3):
        view.view.tick(time.monotonic())
    assert view.channel.told == []
    thread = threading.Thread(target=ticking)
    thread.start()
    try:
        frames = connected(SERVICE, os.getpid(), 1 << 16, 20)
        view.view._note(3, {"steps": 5, "waits_for": [0, 1]})
        job = json.loads(frames.receive(20))
        frames.close()
    finally:
        over.set()
        thread.join()
    assert (EVERYONE, "request_vitals") in view.channel.told
    assert (job["ranks"], job["ranks_at_start"], job["changes"], job["lost"]) == (2, 4, 2, [0, 2])
    first, second = job["rows"]
    assert (first["rank"], first["host"], first["pid"]) == (0, "host1", 101)
    assert (second["rank"], second["steps"], second["waits_for"], second["answers"]) == (1, 5, [0], True)


def test_only_the_lowest_rank_shows_the_job_and_serves_its_numbers(view, monkeypatch):
    ended = []
    monkeypatch.setenv(config.METRICS.name, ":9400")
    monkeypatch.setattr(live, "serve", lambda address, snapshot, warn: lambda: ended.append(address))
    other = LiveView(Channel(3), members(1, 3))
    other.tick(0.0)
    assert other._service is None
    view.view.tick(time.monotonic())
    assert (1, "request_vitals") in view.channel.told  # with nobody at the socket
    view.view.close()
    assert ended == [("127.0.0.1", 9400)]


def test_an_address_that_is_taken_is_tried_again_and_told_once(view, monkeypatch):
    results, told = [None, None, lambda: None], []

    def serve(address, snapshot, warn):
        warn("it is taken")
        return results.pop(0)

    monkeypatch.setenv(config.METRICS.name, ":9400")
    monkeypatch.setattr(live, "serve", serve)
    monkeypatch.setattr(live.logger, "warning", told.append)
    for now in (1.0, 2.0, 7.0, 13.0, 19.0, 25.0):
        view.view.tick(now)
    assert results == [] and told == ["it is taken"]


def test_a_forked_child_does_not_keep_what_watchers_connect_to(view):
    view.view.tick(time.monotonic())
    ended = []
    view.view._end_metrics = lambda is_forked=False: ended.append(is_forked)
    assert os.getpid() in processes(SERVICE)
    view.view.detach_after_fork()
    assert os.getpid() not in processes(SERVICE) and ended == [True]


WATCHED = """
import json, os, re, time
from pathlib import Path
import ring_plugins as ring
from ring_plugins.cli.main import app
from tests.worker import report
from typer.testing import CliRunner

ring.init(ranks=int(os.environ["TEST_RANKS"]))
if ring.rank() == 0:
    rows, until = [], time.monotonic() + 60
    while not (rows and all(row.get("memory_bytes") for row in rows)) and time.monotonic() < until:
        time.sleep(0.2)  # until the first look of the monitor thread, and the answers of the others
        found = CliRunner().invoke(app, ["top", "--once", "--json", "--job", str(os.getpid())])
        rows = json.loads(found.stdout)["rows"] if found.exit_code == 0 else []
    report("ranks", [row["rank"] for row in rows])
    report("of", json.loads(found.stdout)["ranks_at_start"])
    of_job = rf" (\\d+) @ring_plugins/top/{os.geteuid()}/{os.getpid()}/"
    sockets = set(re.findall(of_job, Path("/proc/net/unix").read_text()))
    read_end, write_end = os.pipe()
    if os.fork() == 0:
        inodes = {str(os.stat(one).st_ino) for one in Path("/proc/self/fd").iterdir() if one.exists()}
        os.write(write_end, b"%d" % len(sockets & inodes))
        os._exit(0)
    report("sockets", [len(sockets) > 0, int(os.read(read_end, 9))])
    os.wait()
ring.barrier()
"""


@pytest.mark.slow
def test_a_running_job_is_watched_by_its_process_id():
    result = run_ranks(WATCHED, ranks=3, timeout=120)
    assert result.reports[0] == {"ranks": [0, 1, 2], "of": 3, "sockets": [True, 0]}
