"""How a communicator between GPUs goes on, with stand-ins for its executor, its host's communicator and NCCL."""

import contextlib
from types import SimpleNamespace

import pytest

from ring_plugins.core.base.errors import ArgumentError, DeviceError, MembersLost
from ring_plugins.core.gpu import recovery
from ring_plugins.core.gpu.recovery import GpuRecovery


class Wait:
    def until(self, ready, missing, what):
        for _ in range(1000):
            if ready():
                return
        raise AssertionError(f"waits for ever: {what()}")


class Host:
    """A communicator of two ranks; the other one tells `others`, and dies where `dies` says."""

    name = "gradients"

    def __init__(self, job):
        self.job, self.ranks, self.rank, self.size = job, (0, 1), 0, 2
        self.others, self.dies, self.wholes = [], "", []

    def whole(self, operation, function):
        self.wholes.append(operation)
        return function()

    def all_gather_object(self, item, purpose=""):
        self._meet("exchange")
        return [item, *self.others] if self.size > 1 else [item]

    def barrier(self):
        self._meet("barrier")

    def _meet(self, place):
        if self.dies == place:
            self.ranks, self.size, self.dies = (0,), 1, ""
            self.job.view += 1
            self.job.dead = set()
            raise MembersLost("rank 1 died.", 1)


class Connection:
    is_open, shrinks = True, True

    def __init__(self, executor):
        self.calls, self._executor = [], executor

    def shrink(self, is_lost):
        self.calls.append("shrink")
        self._executor.unfinished *= self._executor.is_stuck  # kernels that waited end
        return self.shrinks

    def connect(self, is_lost):
        self.calls.append("connect")

    def abort(self):
        self.calls.append("abort")


class Executor:
    name, is_stuck = "gradients", False

    def __init__(self):
        self.wait, self.connection, self.unfinished, self.error = Wait(), Connection(self), 0, None
        self.queue = SimpleNamespace(unfinished=[1])
        self.launched, self.broken, self.counted = [], [], []
        self.count_anew = self.counted.append
        self.connecting = contextlib.nullcontext

    def has_unfinished(self, checks=True):
        if self.error is not None and checks:
            raise self.error
        self.unfinished -= self.unfinished > 0
        return self.unfinished > 0

    def start(self, description, function):
        self.launched.append(description)
        function()
        return recovery.Finished(description, None)

    def break_down(self, error):
        self.broken.append(error)


class Job:
    def __init__(self):
        self.view, self.dead, self.pending = 0, set(), None
        self.host, self.executor = Host(self), Executor()
        self.host.others = [""]
        mesh = SimpleNamespace(
            dead=lambda: frozenset(self.dead), interrupts=lambda dead, absent: bool(dead), pending=self.pending
        )
        self.recovery = GpuRecovery(self.executor, self.host, lambda: mesh, lambda: self.view)
        self.members = []
        self.recovery.follow = lambda: self.members.append(self.host.ranks)

    def a_pass(self):
        self.recovery.wait_for([self.recovery.start("bucket 0", lambda: None)])


@pytest.fixture
def job(monkeypatch):
    monkeypatch.setattr(recovery, "_LOOK", -1.0)
    return Job()


def test_a_pass_is_taken_when_the_gpus_of_all_are_done(job):
    job.executor.unfinished = 5
    job.a_pass()
    assert job.executor.unfinished == 0 and job.host.wholes == ["bucket 0"]
    assert job.executor.connection.calls == []


def test_a_loss_before_the_other_rank_told_connects_those_left_and_takes_nothing(job):
    job.executor.unfinished, job.dead, job.host.dies = 10**9, {1}, "exchange"
    with pytest.raises(MembersLost):
        job.a_pass()
    assert job.members == [(0,)] and job.recovery.trouble == "" and job.executor.counted == [0, 1]
    job.a_pass()


def test_kernels_that_do_not_end_are_not_written_over(job, monkeypatch):
    monkeypatch.setattr(recovery, "_ENDING", -1.0)
    job.executor.unfinished, job.executor.is_stuck, job.dead, job.host.dies = 10**9, True, {1}, "exchange"
    with pytest.raises(DeviceError, match="kernels that waited for a lost rank have not ended"):
        job.a_pass()


def test_all_ranks_hear_of_one_whose_kernels_do_not_end(job):
    job.view, job.host.others = 1, ["stuck"]
    with pytest.raises(DeviceError, match="have not ended in 10 s on rank 1"):
        job.recovery.connect()
    assert job.executor.connection.calls == ["shrink"]


def test_nobody_takes_what_one_gpu_could_not_finish(job):
    """The other rank's GPU was done when a third one died; this rank's was not."""
    job.host.others, job.host.dies = ["a rank is lost"], "barrier"
    with pytest.raises(MembersLost):
        job.a_pass()
    assert job.executor.connection.calls == ["shrink"]


def test_an_error_of_nccl_without_a_loss_is_raised_on_all_and_breaks_the_communicator(job):
    job.executor.error = DeviceError("NCCL reports: unhandled cuda error")
    job.host.others = [""]
    with pytest.raises(DeviceError, match="bucket 0 failed on rank 0: NCCL reports: unhandled cuda error"):
        job.a_pass()
    assert len(job.executor.broken) == 1


def test_where_ranks_have_changed_a_pass_launches_nothing_before_they_are_connected(job):
    job.view, job.executor.connection.shrinks = 1, False
    work = job.recovery.start("bucket 0", lambda: pytest.fail("launched"))
    assert work.done()
    with pytest.raises(MembersLost, match="was not launched"):
        job.recovery.wait_for([work])
    assert job.executor.connection.calls == ["shrink", "connect"]
    job.a_pass()
    assert job.executor.launched == ["bucket 0"]


def test_an_operation_of_its_own_is_repeated_if_it_can_be(job):
    runs = []
    job.host.dies = "exchange"
    assert job.recovery.run("broadcast", lambda: runs.append(job.host.ranks) or "done", lambda: True) == "done"
    assert runs == [(0, 1), (0,)]
    job.host.dies = "exchange"
    with pytest.raises(MembersLost):
        job.recovery.run("all_gather", lambda: None)


def test_the_monitor_ends_kernels_that_have_waited_for_a_dead_rank_for_some_time(job, monkeypatch):
    job.recovery.look()
    job.dead = {1}
    job.recovery.look()
    assert job.executor.connection.calls == []
    monkeypatch.setattr(recovery, "_PATIENCE", -1.0)
    job.recovery.look()
    assert job.executor.connection.calls == ["abort"] and job.recovery.trouble


def test_capturing_a_graph_is_rejected_with_the_reason(job):
    with pytest.raises(ArgumentError, match="A graph holds the communicator of all ranks"):
        job.recovery.reject_capture("all_reduce")
