"""`ring_plugins.spark.run`: calls a function on several Spark executors and returns the results to the driver.

Each rank is a task in barrier mode, which Spark starts all at once or not at all. The task starts the rank as a
separate process, because Spark reuses its Python workers. It watches that process and keeps a connection to the
driver: when the driver ends, the connection closes and the task kills the rank.
"""

from __future__ import annotations

import hmac
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from ring_plugins.core.base.errors import ArgumentError, LaunchError, MissingDependency
from ring_plugins.core.base.install import pip_command, search_path
from ring_plugins.core.base.log import logger
from ring_plugins.core.base.progress_line import ProgressLine
from ring_plugins.core.linux.interfaces import address_towards, reserve_port
from ring_plugins.core.members.policy import FailurePolicy
from ring_plugins.launcher.calls import Driver, RankProcess, connect_to_driver
from ring_plugins.launcher.meeting import place_ranks
from ring_plugins.launcher.outcomes import (
    Outcome,
    RankResults,
    check_options,
    pack_call,
    results,
    search_path_of_user,
)

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
    on_failure: Literal["end", "continue"] | None = None,
    min_ranks: int | None = None,
    start_timeout: float = 300.0,
    timeout: float | None = None,
) -> RankResults[T]:
    """Call `function(*args, **kwargs)` on several executors of the active Spark session, all at once.

    Each rank is a Spark task in barrier mode. It runs the function in a separate process, in which
    `ring_plugins.init()` finds the others; the process ends when another rank fails, when Spark ends the task, and when
    the driver ends. A failed rank is not retried.

    With `on_failure="continue"` the others go on when a rank's process is killed or crashes in native code, as
    docs/fault_tolerance.md says, and the results of those that are left are returned. If Spark loses an executor or a
    task, it ends all tasks of the barrier stage, and so the call.

    Args:
        function: the function; it may come from a notebook or be a closure.
        args, kwargs: arguments of the function, the same on every rank.
        num_proc: number of ranks; by default the number of tasks that Spark can run at the same time when this is
            called, which is logged. With dynamic allocation Spark may be able to run more of them later.
        env: variables to set for the ranks.
        on_failure: as for `init`, in the ranks of this call; RING_ON_FAILURE or "end" by default. "replace" is
            rejected.
        min_ranks: as for `init`.
        start_timeout: seconds to wait until Spark has slots for all ranks.
        timeout: seconds for the whole call, None for no limit.

    Returns:
        The results in rank order, as `ring_plugins.run` returns them. They pass through the driver's memory: let rank 0
        write a model to storage.

    Raises:
        RankFailed: the function raised on a rank, or the rank's task was lost; the text names rank and host.
        ArgumentError: the function or an argument cannot be used.
        LaunchError: Spark has no slots for all ranks, or they cannot reach the driver.
        TimeoutExceeded: `timeout` has passed; all ranks have been ended.
        MissingDependency: pyspark is not installed.
    """
    context = _context()
    check_options("num_proc", num_proc, timeout, env)
    policy = FailurePolicy.chosen(on_failure, min_ranks)
    if policy.replaces:
        raise ArgumentError(
            'on_failure="replace" does not work on Spark, which starts the tasks of a barrier stage together and none '
            'later: use on_failure="continue", or ring_plugins.run or Ray, where another process takes the place.'
        )
    packed = pack_call(function, args, kwargs)
    ranks = _wait_for_slots(context, num_proc, start_timeout)
    policy.check_size(ranks)
    with Driver() as driver:
        host = context.getConf().get("spark.driver.host") or "127.0.0.1"
        variables = {**(env or {}), **policy.environment}
        job = _SparkJob(context, ranks, _RankTask(host, driver.port, driver.key, variables))
        try:
            outcomes = driver.outcomes(packed, ranks, job.trouble, timeout, recovers=policy.recovers)
            return results(outcomes, ranks if policy.recovers else 0)
        finally:
            job.cancel()


def _context() -> SparkContext:
    try:
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise MissingDependency(f"pyspark is not installed ({error}): {pip_command('spark')}") from error
    session = SparkSession.getActiveSession()
    if session is None:
        raise LaunchError(
            "there is no active Spark session: create one first with SparkSession.builder.getOrCreate(), with a task "
            "slot for each rank."
        )
    return session.sparkContext


def _wait_for_slots(context: SparkContext, wanted: int | None, start_timeout: float) -> int:
    """The number of ranks to start. Spark itself would wait for slots for ten minutes without a message."""
    scala: Any = context._jsc.sc()  # pyspark 3.5 to 4.3 have no public way to ask
    profile = scala.resourceProfileManager().defaultResourceProfile()
    deadline, line = time.monotonic() + start_timeout, ProgressLine()
    while True:
        slots = int(scala.maxNumConcurrentTasks(profile))
        if slots >= (wanted or 1):
            line.remove()
            if wanted is None:
                logger.info(f"Spark can run {slots} tasks at the same time: starting {slots} ranks; num_proc= chooses")
            return wanted or slots
        text = f"Spark can run {slots} tasks at the same time, waiting for slots for {wanted or 1} ranks"
        line.show(lambda text=text: text)  # type: ignore[misc]
        if time.monotonic() > deadline:
            asked = "no number of ranks was asked for" if wanted is None else f"num_proc={wanted}"
            raise LaunchError(
                f"{asked}, but after {start_timeout:g} s Spark can run {slots} tasks at the same time, and a "
                "barrier needs a slot for each rank. Ask Spark for more executors or cores, or start fewer ranks."
            )
        time.sleep(0.2)


class _SparkJob:
    """The Spark job whose tasks are the ranks, run in its own thread."""

    def __init__(self, context: SparkContext, ranks: int, task: _RankTask) -> None:
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
        except BaseException as error:  # `trouble` hands it to the waiting thread
            self._error = error

    def trouble(self) -> str | None:
        """Why no further task will connect, None while one may."""
        if self._thread.is_alive():
            return None
        if self._error is None:
            return "Spark has run all tasks"
        # The text holds a Python error inside a Java error inside a Python error; the first line names the cause.
        lines = [line.strip() for line in str(self._error).splitlines() if "Error: " in line]
        return lines[0] if lines else str(self._error)

    def cancel(self) -> None:
        """End the tasks that still run."""
        if self._thread.is_alive():
            self._thread.join(1.0)  # the tasks have reported and are about to end
        if self._thread.is_alive():
            self._context.cancelJobGroup(self._group)
            self._thread.join(10.0)


@dataclass(frozen=True)
class _RankTask:
    """A barrier task that runs one rank; a callable for `mapPartitions`.

    Attributes:
        driver, port, key: where the driver listens, and its key.
        variables: to set for the rank.
    """

    driver: str
    port: int
    key: bytes = field(repr=False)
    variables: dict[str, str]

    def __call__(self, _: Iterable[int]) -> Iterator[int]:
        """Run the rank until it ends or the driver does."""
        from pyspark import BarrierTaskContext

        context = BarrierTaskContext.get()
        own_address = address_towards(self.driver) or socket.gethostname()
        with reserve_port() as reserved:  # until rank 0 has it, or the task ends
            own = json.dumps([socket.gethostname(), own_address, reserved.getsockname()[1]])
            tasks = [json.loads(text) for text in context.allGather(own)]
            secret = hmac.new(self.key, b"RING_SECRET", "sha256").hexdigest()
            rank, variables = place_ranks(tasks, secret)[context.partitionId()]
            driver = connect_to_driver(self.driver, self.port, self.key, rank)
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(search_path()), **variables, **self.variables}
            by, path = "ring_plugins.spark.run", search_path_of_user()
            process = RankProcess(rank, environment, driver.fileno(), by=by, path=path)
            try:
                # The rank itself reports how its call ended; then the driver does not read what the task says of it.
                while not driver.wait_for_end(0.05):
                    if process.has_ended():
                        driver.report(Outcome(rank, failure=process.failure()))
                        break
            finally:
                process.kill()
        return iter(())
