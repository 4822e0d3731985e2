"""`ring_plugins.spark.run`: a function on several executors, with the results on the driver."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from ring_plugins.core.base.errors import ArgumentError, LaunchError, MissingDependency
from ring_plugins.launcher.control import Driver
from ring_plugins.launcher.outcomes import pack_call, results
from ring_plugins.spark.task import Task

if TYPE_CHECKING:
    from pyspark import SparkContext

T = TypeVar("T")


def run(
    function: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    *,
    env: Mapping[str, str] | None = None,
    start_timeout: float = 300.0,
    timeout: float | None = None,
) -> list[T]:
    """Call `function(*args, **kwargs)` on several executors of the active Spark session, all at once.

    One Spark task in barrier mode is one rank. Each runs the function in a process of its own, in which
    `ring_plugins.init()` finds the others; it ends when another rank fails, when Spark ends the task, and when the
    driver is gone. A rank that fails is not tried again.

    Args:
        function: also one from a notebook or a closure.
        args, kwargs: for the function, the same on every rank.
        num_proc: number of ranks; by default as many tasks as Spark can run at the same time.
        env: variables to set for the ranks.
        start_timeout: seconds to wait until Spark has slots for all ranks.
        timeout: seconds for everything, without limit by default.

    Returns:
        The results in rank order. They pass through the driver's memory: let rank 0 write a model to storage.

    Raises:
        RankFailed: the function raised on a rank, or its task was lost; the text names rank and host.
        ArgumentError: a function, argument or number that cannot be used.
        LaunchError: Spark has no slots for all ranks, or they cannot reach the driver.
        TimeoutExceeded: `timeout` passed; all ranks have been ended.
        MissingDependency: pyspark is not installed.
    """
    context = _context()
    if num_proc is not None and (isinstance(num_proc, bool) or not isinstance(num_proc, int) or num_proc < 1):
        raise ArgumentError(f"num_proc={num_proc!r} is not a positive number of ranks.")
    packed = pack_call(function, args, kwargs)
    ranks = _wait_for_slots(context, num_proc, start_timeout)
    with Driver() as driver:
        host = context.getConf().get("spark.driver.host") or "127.0.0.1"
        job = _Job(context, ranks, Task(host, driver.port, driver.key, dict(env or {})))
        try:
            return results(driver.outcomes(packed, ranks, job.trouble, timeout))
        finally:
            job.cancel()


class _Job:
    """The Spark job whose tasks are the ranks, in a thread of its own."""

    def __init__(self, context: SparkContext, ranks: int, task: Task) -> None:
        from pyspark import InheritableThread

        self._context, self._group = context, f"ring_plugins-{uuid.uuid4().hex[:8]}"
        self._error: BaseException | None = None
        self._tasks = context.parallelize(range(ranks), ranks).barrier().mapPartitions(task)
        self._thread: threading.Thread = InheritableThread(target=self._run, name="ring:spark", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._context.setJobGroup(self._group, "ring_plugins.spark.run", interruptOnCancel=True)
            self._tasks.collect()
        except BaseException as error:  # told to the thread that waits
            self._error = error

    def trouble(self) -> str | None:
        """Why no further task will call, once that is so."""
        if self._thread.is_alive():
            return None
        if self._error is None:
            return "Spark has run all tasks"
        # Python's error inside Java's inside Python's: the last line with a name of an error says what happened.
        lines = [line.strip() for line in str(self._error).splitlines() if "Error: " in line]
        return lines[0] if lines else str(self._error)

    def cancel(self) -> None:
        """End what still runs of it."""
        if self._thread.is_alive():
            self._thread.join(1.0)  # its tasks have reported, and are on their way out
        if self._thread.is_alive():
            self._context.cancelJobGroup(self._group)
            self._thread.join(10.0)


def _context() -> SparkContext:
    try:
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise MissingDependency(f'pyspark is not installed ({error}): pip install "ring_plugins[spark]"') from error
    session = SparkSession.getActiveSession()
    if session is None:
        raise LaunchError(
            "there is no active Spark session: make one first, SparkSession.builder.getOrCreate(), with as many task "
            "slots as there are to be ranks."
        )
    return session.sparkContext


def _wait_for_slots(context: SparkContext, wanted: int | None, patience: float) -> int:
    """How many ranks to start. Spark itself would ask again and again for ten minutes without saying so."""
    scala: Any = context._jsc.sc()  # pyspark 3.5 to 4.3 have no other way to ask
    profile = scala.resourceProfileManager().defaultResourceProfile()
    end = time.monotonic() + patience
    while True:
        slots = int(scala.maxNumConcurrentTasks(profile))
        if slots >= (wanted or 1):
            return wanted or slots
        if time.monotonic() > end:
            raise LaunchError(
                f"num_proc={wanted}, but after {patience:g} s Spark can run {slots} tasks at the same time, and a "
                "barrier needs a slot for each rank. Ask Spark for more executors or cores, or start fewer ranks."
            )
        time.sleep(0.2)
