"""What counts as computing, waiting and moving in a step."""

import threading
import time

import pytest

from ring_plugins.core.collectives.executor import SerialExecutor
from ring_plugins.core.control.wait import Wait
from ring_plugins.core.trace.steps import StepClock, steps


def end(clock: StepClock, now: float) -> None:
    """What a reducer does."""
    clock.ended.append((now, clock.count, clock.waiting, clock.moving, clock.gpu_wait, 8))
    clock.count += 1


def test_a_step_lasts_from_one_end_to_the_next():
    clock = StepClock()
    clock.add_blocked_time(1.0, 0.5)
    end(clock, 1.0)  # nobody knows when this one began
    clock.add_blocked_time(seconds=0.004, waiting=0.003)
    clock.add_blocked_time(seconds=0.001, waiting=0.0)
    end(clock, 1.5)
    (step,) = clock.take()
    assert (step.number, step.nbytes) == (1, 8)
    assert step.waiting == pytest.approx(0.003)
    assert step.moving == pytest.approx(0.002)


def test_what_a_gpu_waited_in_the_timed_step_counts_in_the_steps_after_it():
    clock = StepClock()
    end(clock, 1.0)
    clock.add_gpu_wait(1, 0.2)
    clock.add_gpu_wait(1, 0.1)
    end(clock, 2.0)
    end(clock, 3.0)
    clock.add_gpu_wait(3, 5.0)  # more than a step cannot be
    end(clock, 4.0)
    assert [(round(step.computing, 6), round(step.moving, 6)) for step in clock.take()] == [
        (0.7, 0.3), (0.7, 0.3), (0.0, 1.0),
    ]  # fmt: skip
    assert clock.on_gpu


def test_waits_while_the_script_computes_are_not_counted():
    """The communication thread has waited for a member long before the script stands still for it."""
    wait = Wait("gradients", None)
    operations = SerialExecutor("gradients", wait)
    everyone = threading.Event()
    before = steps.waiting, steps.moving
    work = operations.start("bucket 0", lambda: wait.until(everyone.is_set, list, lambda: "", arrival=True))
    time.sleep(0.3)  # the script computes
    threading.Timer(0.1, everyone.set).start()
    began = time.monotonic()
    work.wait()
    stood_still = time.monotonic() - began
    operations.close()
    waiting, moving = steps.waiting - before[0], steps.moving - before[1]
    assert 0 < waiting <= stood_still
    assert wait.waited_for_arrival >= waiting + 0.2
    assert waiting + moving <= stood_still
