"""How a communicator between GPUs goes on when members are lost or join: `on_failure="continue"` and `"replace"`.

The rules are those of the host (core/collectives/recovery.py): a pass of gradients, or an operation that the script
calls, is a *whole*, which happens for all survivors or for none, and who is left is agreed on there. NCCL knows nothing
of that: a kernel that waits for a dead rank never ends, and another rank's kernel of the same operation may have ended.
So a whole ends on the host. Each rank waits until its GPU is done, or a member is dead, or NCCL reports an error, and
tells the others which over the host's communicator. If a member died before it told, none of the others gets past that
exchange; if it died later, all others know of each other how it ended. Either way all take the results, or none does.

**Afterwards** the survivors need another communicator of NCCL's. Where all have `ncclCommShrink` (2.27), it makes one
from the old one, and ends the kernels that wait (NCCL_SHRINK_ABORT). Where it does not exist or fails, or others have
joined, the old one is aborted, and all connect anew. `ncclCommGrow` (2.29) would save a second there, but needs an old
communicator that is whole, and numbers new members behind the old ones (init.cc, 2.30), while a process that joins here
gets the place of the rank that was lost: roots, parts and the order of sums go by places. Nothing is launched anew
before all kernels of the old one have ended, since they write to the same memory. What a reduction has overwritten is
restored by its owner (core/gradients/reducer.py).

**When.** Ranks connect where all of them come: at the end of a pass, or before an operation of the script's own. A pass
whose ranks have changed since the last one launches nothing until then. The monitor thread ends kernels that wait for
a dead rank after two seconds, for a script may wait for the whole device in the middle of a pass.

The host waits for the GPU once a pass, which jobs that end with their first lost rank never do. CUDA graphs cannot be
repeated so, since they hold the communicator that they captured: capturing is rejected.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from ring_plugins.core.base.errors import ArgumentError, DeviceError, MembersLost, TimeoutExceeded, name_ranks
from ring_plugins.core.collectives.api import Work
from ring_plugins.core.collectives.host import HostCommunicator
from ring_plugins.core.control.mesh import Mesh
from ring_plugins.core.gpu.executor import DeviceExecutor

T = TypeVar("T")
#: Seconds after which the monitor thread ends kernels that wait for a dead rank, and for which they may take to end.
_PATIENCE, _ENDING = 2.0, 10.0
#: Seconds between two looks at who is dead.
_LOOK = 0.02


class Finished(Generic[T]):
    """A `Work` that is done."""

    def __init__(self, description: str, result: T) -> None:
        self.description, self._result = description, result

    def done(self) -> bool:
        return True

    def wait(self) -> T:
        return self._result


class NotLaunched:
    """A `Work` that was not launched, because its communicator has to connect anew first."""

    def __init__(self, description: str) -> None:
        self.description = description

    def done(self) -> bool:
        return True

    def wait(self) -> Any:
        raise MembersLost(f"{self.description} was not launched, since ranks were lost or have joined.", -1)


class GpuRecovery:
    """How one communicator goes on.

    Args:
        executor: of the communicator.
        host: a communicator of the same ranks, which goes on, too.
        mesh: returns who is known to be dead; None before the job can go on.
        view: returns how often the ranks of the job have changed.

    Attributes:
        follow: called when the members have changed.
        trouble: an error of NCCL or CUDA since the ranks connected last, "" if there was none.
        recoveries: how often they have connected anew.
    """

    def __init__(
        self, executor: DeviceExecutor, host: HostCommunicator, mesh: Callable[[], Mesh | None], view: Callable[[], int]
    ) -> None:
        self._executor, self._host, self._mesh, self._view = executor, host, mesh, view
        executor.recovery = self
        self._connected_in = view()
        executor.count_anew(self._connected_in)
        self.follow: Callable[[], object] = lambda: None
        self.trouble, self.recoveries = "", 0
        self._inside = False
        self._looked_at = self._lost_since = 0.0
        self._saw_lost = False

    @property
    def is_stale(self) -> bool:
        """Whether the ranks have changed since they connected; the same on all."""
        return self._connected_in != self._view()

    @property
    def is_outside(self) -> bool:
        """Whether an operation that is called now is a whole of its own."""
        return not self._inside

    def is_lost(self) -> bool:
        """Whether a member is lost, as far as is known."""
        now, mesh = time.monotonic(), self._mesh()
        if mesh is not None and now - self._looked_at > _LOOK:
            dead = mesh.dead()
            self._saw_lost = mesh.pending is not None or mesh.interrupts(dead, dead)
            self._looked_at = now
        return self._saw_lost

    # Wholes -----------------------------------------------------------------------------------------

    def start(self, description: str, function: Callable[[], T]) -> Work[T]:
        """Launch what `function` does; errors are found in `wait_for`."""
        if self.is_stale or self.trouble:
            return NotLaunched(description)
        before, self._inside = self._inside, True
        try:
            return self._executor.start(description, function)
        except DeviceError as error:
            self.trouble = self.trouble or str(error)
            return NotLaunched(description)
        finally:
            self._inside = before

    def start_whole(self, description: str, function: Callable[[], T]) -> Work[T]:
        """Run at once what its caller does not repeat, as a whole of its own."""
        return Finished(description, self.run(description, function))

    def wait_for(self, works: Sequence[Work[Any]]) -> None:
        """See `Communicator.wait_for`."""
        if self.is_stale:
            self.connect()
            NotLaunched(works[0].description).wait()
        self._whole(works[0].description, lambda: None)
        works[-1].wait()

    def run(self, operation: str, function: Callable[[], T], is_possible: Callable[[], bool] = lambda: False) -> T:
        """The result of a function that calls operations, once all members have theirs.

        Args:
            operation: for an error's text.
            function: launches; called again after a loss where that is possible.
            is_possible: whether it is.

        Raises:
            MembersLost: members are lost, the others go on, and none has the result.
        """
        while True:
            if self.is_stale:
                self.connect()
            try:
                return self._whole(operation, function)
            except MembersLost:
                if not is_possible():
                    raise

    def _whole(self, operation: str, function: Callable[[], T]) -> T:
        results: list[T] = []

        def all_or_none() -> T:
            try:
                results.append(function())
            except DeviceError as error:
                self.trouble = self.trouble or str(error)
            self._settle(operation)
            return results[0]

        before, self._inside = self._inside, True
        try:
            return self._host.whole(operation, all_or_none)
        except MembersLost:
            self.connect()
            raise
        except (DeviceError, TimeoutExceeded) as error:
            self._executor.break_down(error)
            raise
        finally:
            self._inside = before

    def _settle(self, operation: str) -> None:
        """Wait until the GPUs of all members are done.

        Raises:
            MembersLost: a member is lost, and the others go on.
            DeviceError: NCCL or CUDA failed on a member.
        """
        outcomes = self._host.all_gather_object(self._await_gpu(operation), operation)
        if any(outcomes):
            self._raise_lost()
            ranks = [rank for rank, outcome in zip(self._host.ranks, outcomes, strict=True) if outcome]
            raise DeviceError(f"{self._host.name}: {operation} failed on {name_ranks(ranks)}: {max(outcomes)}")

    def _raise_lost(self) -> None:
        """Raise `MembersLost` if a member is lost, on all others: it does not come to this barrier."""
        self._host.barrier()

    def _await_gpu(self, operation: str) -> str:
        """Wait until this rank's GPU is done, or it is useless to wait any longer; returns why, "" if it is done."""
        executor, unfinished = self._executor, True

        def over() -> bool:
            nonlocal unfinished
            unfinished = executor.has_unfinished()
            return not unfinished or bool(self.trouble) or self.is_lost()

        try:
            executor.wait.until(over, list, lambda: f"{executor.name}: {operation} on the GPU")
        except MembersLost:
            return "a rank is lost"
        except DeviceError as error:
            self.trouble = self.trouble or str(error)
        return self.trouble or ("a rank is lost" if unfinished else "")

    # Connecting anew ----------------------------------------------------------------------------------

    def connect(self) -> None:
        """Connect the members that there are now, until they are; collective."""
        before, self._inside = self._inside, True
        try:
            while self.is_stale or not self._executor.connection.is_open:
                try:
                    self._host.whole("connecting by NCCL", self._connect)
                except MembersLost:
                    continue
        finally:
            self._inside = before

    def _connect(self) -> None:
        executor, view = self._executor, self._view()
        self._looked_at, self._saw_lost = 0.0, False  # who was lost before has been agreed on
        try:
            with executor.connecting():
                shrinks = executor.connection.shrink(self.is_lost)
                self._await_end()
                if not shrinks:
                    executor.connection.connect(self.is_lost)
        except (DeviceError, TimeoutExceeded):
            self._raise_lost()
            raise
        executor.peers = [rank for rank in self._host.ranks if rank != self._host.ranks[self._host.rank]]
        self.trouble, self._lost_since, self._saw_lost = "", 0.0, False
        self._connected_in, self.recoveries = view, self.recoveries + 1
        executor.count_anew(view)
        self.follow()

    def _await_end(self) -> None:
        """Wait until no kernel of the old communicator can write to any rank's memory any more; collective."""
        executor, end = self._executor, time.monotonic() + _ENDING

        def over() -> bool:
            return not executor.has_unfinished(checks=False) or time.monotonic() > end

        executor.wait.until(over, list, lambda: f"{executor.name}: the end of NCCL's kernels")
        stuck = self._host.all_gather_object(executor.has_unfinished(checks=False), "the end of NCCL's kernels")
        if any(stuck):
            ranks = [rank for rank, is_stuck in zip(self._host.ranks, stuck, strict=True) if is_stuck]
            raise DeviceError(
                f"{executor.name}: NCCL's kernels that waited for a lost rank have not ended in 10 s on "
                f"{name_ranks(ranks)}. Those that are left cannot go on: start the job again from a checkpoint."
            )

    # For the monitor thread ---------------------------------------------------------------------------

    def look(self) -> None:
        """End kernels that have waited for a dead rank for some time: the script may wait for the whole GPU."""
        if not self.is_lost():
            self._lost_since = 0.0
        elif not self._lost_since:
            self._lost_since = time.monotonic()
        elif time.monotonic() - self._lost_since > _PATIENCE and self._executor.queue.unfinished:
            self.trouble = self.trouble or "a rank is lost"
            self._executor.connection.abort()

    def reject_capture(self, operation: str) -> None:
        """Reject to capture a CUDA graph.

        Raises:
            ArgumentError: always.
        """
        raise ArgumentError(
            f"{self._executor.name}: {operation} was called while a CUDA graph is being captured, in a job that goes "
            "on when ranks are lost. A graph holds the communicator of all ranks, and cannot be repeated without one: "
            'capture no graph with collectives in it, or leave out on_failure="continue" or "replace".'
        )
