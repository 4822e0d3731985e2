"""A timeline has all ranks on one clock, even when a rank dies."""

import json
import os
import signal
import threading
import time
from collections import defaultdict
from functools import partial

import pytest

from ring_plugins.core.base.member import Member, Members
from ring_plugins.core.control import rank_zero
from ring_plugins.core.control.channel import Channel
from ring_plugins.core.observe import timeline
from ring_plugins.core.observe.timeline import ClockOffset, TimelineAggregator, TimelineReporter
from ring_plugins.core.trace.recorder import recorder
from tests.core.observe.fakes import FakeChannel
from tests.launch import run_ranks, start_ranks

TRAIN = """
import os, sys, time
import ring_plugins as ring
ring.init(ranks=int(os.environ["TEST_RANKS"]))
from tests.campaigns.light_torch import import_torch
import_torch()
import torch
from ring_plugins.torch import DistributedOptimizer, Timeline
from tests.worker import report, report_pid

torch.set_num_threads(1)
torch.manual_seed(0)  # all ranks begin with the same weights, without a broadcast in the timeline
model = torch.nn.Sequential(*(torch.nn.Linear(600, 600) for _ in range(4)))
optimizer = DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=1e-9), model.named_parameters(), bucket_bytes=40000
)

def step():
    optimizer.zero_grad()
    model(torch.ones(4, 600)).sum().backward()
    optimizer.step()
    ring.barrier()
"""


def by_rank(events, category):
    found = defaultdict(list)
    for event in events:
        if event.get("cat") == category:
            found[event["pid"]].append(event)
    return found


def test_steps_buckets_and_waits_of_all_ranks_on_one_clock(tmp_path):
    """Ranks without shared memory behave as on two hosts: their clocks are compared over the channel."""
    body = (
        TRAIN
        + """
from ring_plugins.core import world
from ring_plugins.core.trace.recorder import recorder
from ring_plugins.observe import timeline

timeline._PATIENCE = 60.0  # on a busy machine, monitor threads may take seconds to switch the recording
clock = world.current().observers.spans._clock
step()
with Timeline(sys.argv[1]):
    while not clock.is_known or (ring.rank() and not clock.uncertainty):
        time.sleep(0.01)
    for _ in range(20):
        step()
    if ring.rank():  # is in an operation that rank 0 has left already
        while not world.current().observers.spans._is_to_end:
            time.sleep(0.001)
        recorder.record("call", "the last", time.monotonic_ns(), time.monotonic_ns())
step()
"""
    )
    run_ranks(body, 2, "mpirun", [str(tmp_path)], env={"RING_SHARED_MEMORY": "0"}, timeout=90)
    events = json.loads((tmp_path / "timeline.json").read_text())
    assert {e["args"]["name"].split(" on ")[0] for e in events if e["name"] == "process_name"} == {"rank 0", "rank 1"}
    for rank in (0, 1):
        assert len(by_rank(events, "step")[rank]) == 20
        assert len(by_rank(events, "backward")[rank]) == 20
        buckets = [e for e in by_rank(events, "bucket")[rank] if e["ph"] == "b" and e["name"].startswith("bucket")]
        assert len(buckets) == 20 * 4
        operations = by_rank(events, "operation")[rank]
        assert sum("bucket" in e["args"]["part_of"] for e in operations) >= 20 * 4
    assert "the last" in [e["name"] for e in by_rank(events, "call")[1]]
    # No rank leaves a barrier before all have arrived. Rank 0 begins while the other is still leaving an earlier one.
    calls: list[list[dict]] = [[], []]
    for rank in (0, 1):
        barriers = [e for e in by_rank(events, "call")[rank] if "barrier" in e["name"]]
        for one in by_rank(events, "step")[rank]:
            calls[rank].append(next(e for e in barriers if e["ts"] >= one["ts"] + one["dur"]))
    allowed = max(e["args"]["uncertainty"] for e in events if e["name"] == "process_labels") / 1e3
    assert allowed > 0
    for one, other in zip(*calls, strict=True):
        assert one["ts"] < other["ts"] + other["dur"] + allowed
        assert other["ts"] < one["ts"] + one["dur"] + allowed


#: Two jobs in one script: the first ends with `shutdown`, the second with the script. Ranks leave one by one.
TWO_JOBS = """
import os, sys, time
import numpy as np
import ring_plugins as ring

for name in ("first", "second"):
    os.environ["RING_TIMELINE"] = f"{sys.argv[1]}/{name}"
    ring.init(ranks=int(os.environ["TEST_RANKS"]))
    for _ in range(100):
        ring.all_reduce(np.ones(10))
    time.sleep(0.1 * ((ring.rank() - int(sys.argv[2])) % 3))
    if name == "first":
        ring.shutdown()
"""


@pytest.mark.parametrize(
    ("launcher", "first_to_leave"),
    [("spawned", 0), *(pytest.param(*one, marks=pytest.mark.slow) for one in (("mpirun", 1), ("torchrun", 0)))],
)
def test_no_launcher_loses_the_beginning_or_the_end_of_a_rank(launcher, first_to_leave, tmp_path):
    run_ranks(TWO_JOBS, 3, launcher, [str(tmp_path), str(first_to_leave)])
    for name in ("first", "second"):
        events = json.loads((tmp_path / name / "timeline.json").read_text())
        counts = {rank: len(found) for rank, found in by_rank(events, "call").items()}
        assert counts == {0: 100, 1: 100, 2: 100}, name
        assert sorted(e["pid"] for e in events if e["name"] == "process_labels") == [0, 1, 2]


@pytest.mark.slow
def test_a_timeline_holds_what_a_rank_did_before_it_died(tmp_path):
    body = TRAIN + "for _ in range(5):\n    step()\ntime.sleep(2)\nreport_pid()\nwhile True:\n    step()\n"
    with start_ranks(body, 2, env={"RING_TIMELINE": str(tmp_path)}) as job:
        job.send_signal(1, signal.SIGKILL)
        assert job.wait(30).returncode != 0
    events = json.loads((tmp_path / "timeline.json").read_text())
    assert len(by_rank(events, "step")[1]) >= 4
    assert len(by_rank(events, "step")[0]) >= 4


def test_a_large_timeline_begins_a_new_file_and_stays_readable(tmp_path, monkeypatch):
    monkeypatch.setattr(timeline, "_LARGEST", 20_000)
    channel = FakeChannel(size=1)
    aggregator = TimelineAggregator(channel, Members(0, [Member(0, 0, "here", 1)]))
    aggregator.start(tmp_path)
    for i in range(500):
        channel.receive(0, "report_spans", {"rows": [["step", f"step {i}", i * 1000, i * 1000 + 500, {}]]})
    path = aggregator.finish()
    latest = json.loads(path.read_text())
    before = json.loads((tmp_path / "timeline.previous.json").read_text())
    names = [e["name"] for e in [*before, *latest] if e["ph"] == "X"]
    assert names == [f"step {i}" for i in range(500 - len(names), 500)]
    assert sorted(os.listdir(tmp_path)) == ["timeline.json", "timeline.previous.json"]
    assert all((tmp_path / name).stat().st_size < 25_000 for name in os.listdir(tmp_path))


def test_the_end_waits_for_ranks_that_are_still_connected(tmp_path):
    channel = FakeChannel(size=3)
    channel.connected = [1, 2]
    aggregator = TimelineAggregator(channel, Members(0, [Member(rank, rank, "here", rank) for rank in range(3)]))
    aggregator.start(tmp_path)
    aggregator.stop()
    for rank in (0, 1):
        channel.receive(rank, "end_recording", {"uncertainty": 0, "lost": 0})
    assert not aggregator.is_complete
    channel.connected = [1]  # rank 2 is gone
    assert aggregator.is_complete


def test_rank_0_waits_at_the_end_for_ranks_that_have_not_even_connected(tmp_path):
    """A short script is over before the monitor threads of the others have connected to rank 0's."""
    channel = FakeChannel(size=3)
    channel.connected = [1]
    aggregator = TimelineAggregator(channel, Members(0, [Member(rank, rank, "here", rank) for rank in range(3)]))
    aggregator.start(tmp_path)
    aggregator._note_joined(1)
    arriving = [
        lambda: channel.receive(0, "end_recording", {"uncertainty": 0, "lost": 0}),
        lambda: (channel.connected.append(2), aggregator._note_joined(2)),
        lambda: (channel.receive(1, "end_recording", {"uncertainty": 0, "lost": 0}), channel.connected.remove(1)),
        lambda: channel.receive(2, "report_spans", {"rows": [["step", "the last", 1, 2, {}]]}),
        lambda: channel.receive(2, "end_recording", {"uncertainty": 0, "lost": 7}),
        lambda: channel.connected.remove(2),
    ]
    channel.poll = lambda seconds: arriving.pop(0)()
    aggregator.close()
    events = json.loads((tmp_path / "timeline.json").read_text())
    assert [e["name"] for e in events if e["ph"] == "X"] == ["the last"]
    assert "7 spans lost" in events[-1]["args"]["labels"]


def test_a_timeline_is_closed_while_spans_still_arrive(tmp_path):
    """`Timeline.stop` gives up on a rank that is stopped; its spans then arrive on the monitor thread."""
    channel = FakeChannel(size=2)
    aggregator = TimelineAggregator(channel, Members(0, [Member(rank, rank, "here", rank) for rank in range(2)]))
    is_over, failed = threading.Event(), []

    def send():
        while not (is_over.is_set() or failed):
            try:
                channel.receive(1, "report_spans", {"rows": [["step", "step", i, i + 1, {}] for i in range(50)]})
                aggregator.tick(0.0)
            except Exception as error:
                failed.append(error)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        for _ in range(20):
            aggregator.start(tmp_path)
            time.sleep(0.003)
            json.loads(aggregator.finish().read_text())
    finally:
        is_over.set()
        sender.join()
    assert not failed


def test_a_new_recording_has_lost_nothing_yet():
    channel = FakeChannel(rank=1)
    reporter = TimelineReporter(channel, same_clock=True)
    recorder.lost = 5
    channel.receive(0, "switch_recording", {"on": True})
    assert recorder.lost == 0
    reporter.close()


def test_a_rank_records_and_sends_while_rank_0_asks_for_it():
    channel = FakeChannel(rank=1)
    reporter = TimelineReporter(channel, same_clock=True)
    channel.receive(0, "switch_recording", {"on": True})
    recorder.record("step", "step 0", 1, 2)
    reporter.tick(time.monotonic())
    channel.receive(0, "switch_recording", {"on": False})
    recorder.record("step", "step 1", 3, 4)
    reporter.close()
    (_, kind, body), end = channel.take()
    assert (kind, body["rows"]) == ("report_spans", [["step", "step 0", 1, 2, {}]])
    assert end == (0, "end_recording", {"uncertainty": 0, "lost": recorder.lost})


def test_a_rank_that_is_still_in_the_recorded_steps_records_to_their_end():
    channel = FakeChannel(rank=1)
    reporter = TimelineReporter(channel, same_clock=True)
    for begins_first in (True, False):  # this rank's script, before rank 0's
        if begins_first:
            reporter.hold()
        channel.receive(0, "switch_recording", {"on": True})
        if not begins_first:
            reporter.hold()
        channel.receive(0, "switch_recording", {"on": False})
        recorder.record("call", "in flight", 1, 2)
        assert recorder.on and not channel.take()
        reporter.release()
        (_, kind, body), (_, last, _) = channel.take()
        assert (kind, body["rows"], last) == ("report_spans", [["call", "in flight", 1, 2, {}]], "end_recording")
        assert not recorder.on
    reporter.close()
    assert not channel.take()


def test_the_offset_of_another_clock_is_within_its_uncertainty(monkeypatch):
    listening = rank_zero.RankZero(2)
    server = Channel(0, 2, listening)
    client = Channel(1, 2, connect=partial(rank_zero.connect, 1, listening.address, True))
    ClockOffset(server, same=True)
    far = ClockOffset(client, same=False)
    ahead = 5_000_000_000
    real = time.monotonic_ns
    for channel, shift in ((server, ahead), (client, 0)):
        handlers = {
            kind: (lambda sender, body, h=handler, s=shift: _shifted(monkeypatch, real, s, lambda: h(sender, body)))
            for kind, (handler, _) in channel._handlers.items()
        }
        for kind, handler in handlers.items():
            channel.on(kind, handler)
        channel.start()
    end = time.monotonic() + 10
    while not far.is_known and time.monotonic() < end:
        far.ask(time.monotonic())
        client.poll(0.005)
        server.poll(0.005)
    client.close()
    server.close()
    assert far.is_known
    assert abs(far.offset - ahead) <= far.uncertainty


def _shifted(monkeypatch, real, shift, call):
    with monkeypatch.context() as patch:
        patch.setattr(timeline, "monotonic_ns", lambda: real() + shift)
        call()
