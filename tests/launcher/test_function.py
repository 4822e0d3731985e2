"""`ring_plugins.run` on this host: results and errors come back, and no process stays behind."""

import os
import signal
import sys
import time

import numpy as np
import pytest

import ring_plugins as ring
from ring_plugins.core.world import current
from tests.launch import run_ranks, start_ranks


def test_a_closure_runs_on_every_rank_and_its_results_come_back():
    pytest.importorskip("cloudpickle")
    weights = np.arange(3.0)

    def average(scale, *, offset):
        ring.init()
        here = (ring.rank(), ring.size(), ring.local_rank(), os.environ["MINE"])
        assert ring.rank() or current().summary == "3 ranks on 1 host, started by ring_plugins.run"
        return here, ring.all_reduce(weights * scale + ring.rank() + offset)

    found = ring.run(average, (2.0,), {"offset": 1.0}, ranks=3, env={"MINE": "yes"})
    assert [here for here, _ in found] == [(rank, 3, rank, "yes") for rank in range(3)]
    assert all(np.array_equal(mean, weights * 2 + 2) for _, mean in found)


def divide(by):
    ring.init()
    ring.barrier()
    if ring.rank() == 1:
        return 1 / by
    return ring.all_reduce(1.0)


def test_an_error_comes_back_with_rank_and_traceback(capfd):
    with pytest.raises(ring.RankFailed, match=r"rank 1 on \S+ failed: ZeroDivisionError") as caught:
        ring.run(divide, (0,), ranks=2, tag_output=True)
    assert caught.value.rank == 1
    assert "return 1 / by" in caught.value.traceback
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def killed():
    ring.init()
    print("speaking before the end")
    sys.stdout.flush()
    if ring.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    ring.barrier()


def test_a_killed_rank_is_named_and_output_is_tagged(capsys):
    with pytest.raises(ring.RankFailed, match="rank 1 .* ended with signal SIGKILL"):
        ring.run(killed, ranks=2, tag_output=True)
    assert "[0] speaking before the end\n" in capsys.readouterr().out


def test_wrong_arguments_are_refused_at_once(monkeypatch):
    with pytest.raises(ring.ArgumentError, match="ranks=0"):
        ring.run(divide, ranks=0)
    with pytest.raises(ring.ArgumentError, match="function='divide' with its arguments cannot be sent"):
        ring.run(divide, (sys._getframe(),), ranks=1)
    with pytest.raises(ring.TimeoutExceeded, match=r"timeout=1: rank 0 of 1"):
        ring.run(time.sleep, (60,), ranks=1, timeout=1)
    monkeypatch.setenv("RING_LAUNCHER", "single")
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    monkeypatch.setattr(divide, "__module__", "__main__")
    with pytest.raises(ring.ArgumentError, match="script or notebook itself.*pip install cloudpickle"):
        ring.run(divide, (1,), ranks=1)


def test_a_rank_cannot_start_ranks():
    script = """
        import ring_plugins as ring
        ring.init(ranks=2)
        try:
            ring.run(print, ranks=2)
        except ring.LaunchError as error:
            assert "this process is itself a rank" in str(error)
        else:
            raise AssertionError("ranks of ranks")
    """
    run_ranks(script, 2, "spawned")


DRIVER = """
    import os, time
    import ring_plugins as ring
    from tests.worker import report

    def endless():
        ring.init()
        report("pid", os.getpid())
        while True:
            time.sleep(0.1)

    ring.run(endless, ranks=2)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_no_rank_survives_its_driver(number):
    pytest.importorskip("cloudpickle")
    with start_ranks(DRIVER, 2) as job:
        job.wait_for("pid")
        job.signal_parent(number)
        result = job.wait(10)
    assert result.returncode in (-number, 1)
    assert result.output.count("KeyboardInterrupt") <= 1, result  # of the driver, not of each rank
