"""Waits that end by an exception which the script catches. Run by test_interruption.py on three ranks.

In every check, rank 0 is interrupted while rank 1 takes part in the same operation and rank 2 is late. Nobody may get a
result; all get an error that says what happened, in this call and in the next.
"""

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable

import numpy as np

import ring_plugins as ring
from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.arrays.memory import HostMemory
from ring_plugins.core.base.errors import PeerFailed, RingError
from ring_plugins.core.world import current
from tests.checks import run

ring.init(ranks=int(os.environ["TEST_RANKS"]))
RANK = ring.rank()
SMALL, LARGE = 8, 3_000_000
CHECKS: list[Callable[[], None]] = []


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS.append(function)
    return function


class TimeIsUp(Exception):
    pass


#: Kept alive: Python swallows an exception that a signal handler raises while a finalizer closes connections.
KEPT = []


def tested():
    KEPT.append(current().new_communicator("tested"))
    return KEPT[-1]


def tested_by_all():
    """A communicator whose first operation no rank is in any more."""
    communicator = tested()
    communicator.barrier()
    ring.barrier()
    return communicator


def once_it_waits(communicator, raises: Callable[[int], object]) -> None:
    """Call `raises(this thread)` from another one, once this one waits in an operation that has begun."""
    executor, caller = communicator._executor, threading.get_ident()
    wait = executor.wait
    wait.begun = False

    def watch() -> None:
        while not wait.begun or (executor._thread is not None and not wait.caller_blocked_since):
            time.sleep(0.001)
        raises(caller)

    threading.Thread(target=watch, daemon=True).start()


def raise_in_main_thread(communicator) -> None:
    """By a signal, as Ctrl-C or a time limit does."""
    signal.signal(signal.SIGALRM, lambda number, frame: (_ for _ in ()).throw(TimeIsUp))
    once_it_waits(communicator, lambda caller: signal.pthread_kill(caller, signal.SIGALRM))


def raise_asynchronously(communicator) -> None:
    """As debuggers and some notebooks do it."""
    raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
    once_it_waits(communicator, lambda caller: raise_in(ctypes.c_ulong(caller), ctypes.py_object(TimeIsUp)))


def memory(count: int, value: float = 0.0) -> HostMemory:
    return HostMemory(np.full(count, value or RANK + 1.0, np.float32), "float32")


def interrupted(operation: Callable[..., object], interrupt: Callable[..., None] = raise_in_main_thread) -> None:
    """Check one operation on a communicator of its own; the script's other communicator stays whole."""
    communicator = tested_by_all()
    if RANK == 0:
        interrupt(communicator)
        try:
            operation(communicator)
        except TimeIsUp:
            pass
        else:
            raise AssertionError("not interrupted")
        ring.barrier()
    elif RANK == 1:
        rejected(lambda: operation(communicator))
        ring.barrier()
    else:
        while communicator._executor.failure.error is None:  # late, and nobody waits for it in vain meanwhile
            time.sleep(0.001)
        ring.barrier()
        rejected(lambda: operation(communicator))
    rejected(lambda: communicator.all_reduce(memory(SMALL), Op.SUM))
    assert ring.all_reduce(np.ones(2), ring.SUM).tolist() == [3.0, 3.0]


def rejected(call: Callable[[], object]) -> None:
    try:
        call()
    except RingError as error:
        assert "tested" in str(error) and "was interrupted in" in str(error), error
        assert "by TimeIsUp and is out of step with the other ranks; to continue, all ranks must recreate" in str(
            error
        ), error
        assert isinstance(error, PeerFailed) == (RANK != 0)
        assert RANK == 0 or error.rank == 0
    else:
        raise AssertionError(f"rank {RANK} got a result")


@check
def a_small_blocking_all_reduce() -> None:
    interrupted(lambda communicator: communicator.all_reduce(memory(SMALL), Op.SUM))


@check
def a_large_blocking_all_reduce() -> None:
    interrupted(lambda communicator: communicator.all_reduce(memory(LARGE), Op.SUM))


@check
def a_blocking_all_reduce_interrupted_by_another_thread() -> None:
    interrupted(lambda communicator: communicator.all_reduce(memory(SMALL), Op.SUM), raise_asynchronously)


@check
def a_synchronous_bucket() -> None:
    def reduce(communicator) -> None:
        communicator.run_synchronously("bucket 0 of 2", lambda: communicator.all_reduce(memory(LARGE), Op.SUM))
        communicator.run_synchronously("bucket 1 of 2", lambda: communicator.all_reduce(memory(SMALL), Op.SUM))

    interrupted(reduce)


@check
def a_barrier() -> None:
    interrupted(lambda communicator: communicator.barrier())


@check
def objects() -> None:
    interrupted(lambda communicator: communicator.all_gather_object("x" * 100))


@check
def the_wait_for_a_work() -> None:
    def operation(communicator):
        array = memory(LARGE)
        work = communicator.start("work", lambda: communicator.all_reduce(array, Op.SUM))
        try:
            work.wait()
        except TimeIsUp:
            assert not any(
                thread.name == "ring:tested" and communicator._executor._thread.unfinished
                for thread in threading.enumerate()
            ), "the reduction goes on in the background"
            raise

    interrupted(operation)


@check
def a_blocking_call_behind_a_work() -> None:
    """The call waits behind a work that is under way: it is taken back, and nothing is broken."""
    communicator = tested()
    array = memory(SMALL)
    if RANK == 0:
        work = communicator.start("work", lambda: communicator.all_reduce(array, Op.SUM))
        raise_in_main_thread(communicator)
        try:
            communicator.barrier()
        except TimeIsUp:
            pass
        else:
            raise AssertionError("not interrupted")
        ring.barrier()
        work.wait()
    else:
        ring.barrier()
        communicator.all_reduce(array, Op.SUM)
    assert array.array.tolist() == [6.0] * SMALL
    communicator.barrier()


@check
def an_interruption_before_anything_is_sent() -> None:
    """The communicator stays whole: the call may be made again."""
    communicator = tested()

    class Interrupts:
        def __reduce__(self):
            raise TimeIsUp

    for _ in range(2):
        if RANK == 0:
            try:
                communicator.all_gather_object(Interrupts())
            except TimeIsUp:
                pass
            else:
                raise AssertionError("not interrupted")
        assert communicator.all_gather_object(RANK) == [0, 1, 2]
        array = memory(SMALL)
        communicator.all_reduce(array, Op.SUM)
        assert array.array.tolist() == [6.0] * SMALL


@check
def one_rank_gives_up() -> None:
    """RING_TIMEOUT ends a wait on one rank: its script may go on too."""
    communicator = tested_by_all()
    if RANK == 0:
        communicator._executor.wait._timeout = 0.1
        try:
            communicator.barrier()
        except ring.TimeoutExceeded as error:
            text = str(error)
        ring.barrier()
    else:
        ring.barrier()
        try:
            communicator.barrier()
        except PeerFailed as error:
            text = str(error)
            assert "rank 0 gave up barrier() (" in text, text
    assert "timed out after waiting" in text


def the_job_goes_on_after_shutdown_and_init() -> None:
    if RANK == 0:
        raise_in_main_thread(current().communicator)
        with contextlib.suppress(TimeIsUp):
            ring.all_reduce(np.ones(3))
    else:
        time.sleep(0.3 * (RANK == 2))
        try:
            ring.all_reduce(np.ones(3))
        except PeerFailed as error:
            assert "rank 0 was interrupted in all_reduce(3 x float64, average) by TimeIsUp" in str(error), error
        else:
            raise AssertionError("no error")
    ring.shutdown()
    ring.init(ranks=int(os.environ["TEST_RANKS"]))
    assert ring.all_reduce(np.ones(3), ring.SUM).tolist() == [3.0] * 3


if str(current().launcher) != "spawned":  # whose ranks cannot meet again
    check(the_job_goes_on_after_shutdown_and_init)
run(CHECKS)
