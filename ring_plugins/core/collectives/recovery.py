"""How communicators go on when members die: `on_failure="continue"`.

**When.** On one host, a member that died leaves the others stuck at the first barrier that it did not reach, in the
same operation (core/control/mesh.py says why). They agree on who is left, and every communicator of the job drops
the dead one (host_groups.py).

**On several hosts** one barrier does not do: the survivors of one host may have what those of another still wait for.
So each *whole*, an operation that the script calls or a pass of gradients, ends with a *confirmation*, a barrier of all
members, which costs one small exchange between hosts. A member that passes it knows that all had their results. When a
member is lost, all others give up wherever they are, and agree (core/control/consensus.py): if any of them has passed
the confirmation, all have the result and take it, even if they saw the loss while they waited there; else all repeat.
Those that have passed find the loss in their next operation. So do the others: they keep it to themselves until then,
since scripts may do something else after a loss, and all must do it at the same place. A rank that has been left out
sees the number of the new view at every barrier, and so waits at none: before each operation it asks whether it has
been.

**What is repeated.** The operation has happened for nobody, but it may have overwritten memory that it works on in
place. A whole that is one operation is called again where it can be: an all-reduce from a copy of its input, others
from arguments that nothing overwrites. A pass of gradients is repeated by its reducer, which has the inputs (see
core/gradients/reducer.py). In other collectives the shapes depend on the number of ranks; callers that can make new
ones use `repeated`, and for the rest `MembersLost` ends the job.

**In the background** a pass averages its first buckets while backward computes the others. Their thread may find a loss
at any moment, and then it only notes it: all must take the loss over at the same place, so the script's thread does,
where it waits for the pass (`wait_for`), or before that in an operation of its own. There it first lets the threads of
all communicators give up. They have nothing to lose, since the pass has happened for nobody: its end is that wait,
which all survivors come to, or none. So a pass whose first buckets were averaged before the loss is repeated as a
whole. Ranks may have given up at different places, so none writes to memory that others read until all have: nothing is
agreed on before all have arrived in the agreement.

**Inside a host.** Ranks of one host that average every step, while hosts exchange weights every so many
(core/gradients/local_updates.py), have communicators of their own (`HostRecovery`), whose operations are no wholes of
the job: no other host takes part in them, or is to wait. So their members agree among themselves, in shared memory
(shm_barrier.py), and repeat the operation. To the job the lost rank is a member until its next whole, before which all
agree as ever. Considered and rejected: that all hosts agree at once, for they are at different steps, and would wait
for each other's next one.

**All at once.** When one communicator finds a loss, all are told, and none may be in the middle of an operation. So
only gradients are averaged in the background. Other works run in the thread that starts them, and a second thread that
calls an operation meanwhile is rejected. All survivors then stand at the same place.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple, Protocol, TypeVar

from ring_plugins.core.base.errors import ArgumentError, MembersLost, PeerFailed, RingError, fresh
from ring_plugins.core.collectives.api import Work
from ring_plugins.core.collectives.executor import SerialExecutor
from ring_plugins.core.collectives.fingerprint import fingerprint
from ring_plugins.core.control.wait import Wait

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

_CONFIRMATION = fingerprint("confirmation")


def repeated(function: Callable[[], T]) -> T:
    """Call a function whose inputs nothing overwrites, and again whenever members are lost in it."""
    while True:
        try:
            return function()
        except MembersLost:  # each time there is at least one member less
            pass


class Confirmations(Protocol):
    """Counts the wholes that all ranks of a job on several hosts have confirmed.

    Attributes:
        committed: how many; an agreement may raise it by one.
        pending: ranks of which the next operation is to find that they are lost; None if there are none.
    """

    committed: int
    pending: list[int] | None

    def must_agree(self) -> bool:
        """Whether ranks are lost, or the others have gone on without this one, as far as is known without a look."""

    def members_lost(self) -> MembersLost:
        """The error that says so."""


class JobRecovery:
    """How the communicators of one job go on.

    Args:
        agree: has the survivors agree on behalf of a wait, and calls `keep` of all their communicators; raises
            `PeerFailed` if they cannot go on.
        replaces: whether other processes may join.

    Attributes:
        agree, replaces: as given.
        confirmations: of a job on several hosts; None on one.
        recoveries: number of losses after which the survivors have gone on.
        recovering: the `Recovery` of each communicator, by its executor.
    """

    def __init__(self, agree: Callable[[Wait], None], replaces: bool = False) -> None:
        self.agree, self.replaces = agree, replaces
        self.confirmations: Confirmations | None = None
        self._counted = [0]
        self.in_use = threading.RLock()  # held during every whole
        self.recovering: weakref.WeakKeyDictionary[SerialExecutor, Recovery] = weakref.WeakKeyDictionary()

    @property
    def recoveries(self) -> int:
        """As above."""
        return self._counted[0]

    def go_on(self, executor: SerialExecutor) -> None:
        """Go on without ranks whose loss a communicator has found; raises as `agree`."""
        self.agree(executor.wait)
        self._counted[0] += 1

    def add(self, executor: SerialExecutor, recovery: Recovery) -> None:
        """Note how a communicator goes on."""
        self.recovering[executor] = recovery


class HostRecovery(JobRecovery):
    """How communicators of some ranks of one host go on, for which no other host waits.

    Args:
        job: of all communicators.
        view: returns the number of the job's view.
        dead: returns the ranks that are proven to be dead.
        keep: called with lost ranks, the view and the number of losses in it: these communicators drop them.

    Attributes:
        losses: how many agreements there have been, in all views.
    """

    def __init__(
        self,
        job: JobRecovery,
        view: Callable[[], int],
        dead: Callable[[], AbstractSet[int]],
        keep: Callable[[HostRecovery, Sequence[int], int, int], None],
    ) -> None:
        super().__init__(job.agree)
        self._job, self.in_use, self._counted = job, job.in_use, job._counted
        self._view, self._dead, self._keep, self.losses = view, dead, keep, 0
        self._since: tuple[int, int] = (0, 0)  # the view, and the losses before it

    def go_on(self, executor: SerialExecutor) -> None:
        """As above, without the other hosts."""
        if (view := self._view()) != self._since[0]:
            self._since = view, self.losses
        self.losses += 1
        number = self.losses - self._since[1]
        assert executor.members is not None
        lost = executor.members.agree_on_lost(view, number, self._dead)
        self._keep(self, lost, view, number)
        self._counted[0] += 1

    def add(self, executor: SerialExecutor, recovery: Recovery) -> None:
        """As above; a loss that the job finds interrupts these communicators, too."""
        super().add(executor, recovery)
        self._job.add(executor, recovery)


class Loss(NamedTuple):
    """A loss for which works that were started have no results.

    Attributes:
        error: says what was found.
        recoveries: of the job, before it went on.
    """

    error: BaseException
    recoveries: int


class Recovery:
    """How one communicator goes on: the `Recovery` of its executor, which its methods get.

    Args:
        job: of all communicators of the job.
        name: of the communicator, for error texts.

    Attributes:
        name: as given.
        has_started: whether works have been started for which nobody has waited.
        loss: for which those have no results, None if there is none.
    """

    def __init__(self, job: JobRecovery, name: str) -> None:
        self._job, self.name = job, name
        self._thread = 0  # which is in a whole, 0 for none
        self.has_started = False
        self.loss: Loss | None = None

    # For the executor -----------------------------------------------------------------------------

    def allowed(self, executor: SerialExecutor, operation: F) -> F:
        """See the protocol. An operation whose members have all arrived would not wait, and so find no loss."""
        loss, confirmations = self.loss, self._job.confirmations
        if loss is not None and (executor.is_on_thread() or loss.recoveries == self._job.recoveries):
            raise fresh(loss.error)
        if confirmations is None:
            return operation
        if confirmations.pending is not None:
            raise MembersLost("It is repeated without ranks that were lost in the operation before.", -1)
        if confirmations.must_agree():
            raise confirmations.members_lost()
        return operation

    def follow(self, executor: SerialExecutor, error: MembersLost) -> None:
        """See the protocol. The executor's own thread leaves it to the script's."""
        job = self._job
        if executor.is_on_thread():
            self.loss = self.loss or Loss(fresh(error), job.recoveries)
            return
        started = [(one, recovery) for one, recovery in job.recovering.items() if recovery.has_started]
        for one, recovery in started:  # their threads finish nothing of that
            recovery.loss = recovery.loss or Loss(fresh(error), job.recoveries)
            one.wait.given_up = recovery.loss.error
        for one, recovery in started:
            if not one.let_go():
                raise RingError(f"{recovery.name}: its thread has not stopped after a rank was lost.")
            one.wait.given_up = None
        job.go_on(executor)

    def may_start(self, repeats: bool) -> bool:
        """See the protocol."""
        self.has_started |= repeats
        return repeats

    # Wholes: what has happened for all members, or for none ---------------------------------------

    def is_outside(self, executor: SerialExecutor) -> bool:
        """Whether an operation that is called now is a whole of its own."""
        return self._thread != threading.get_ident() and not executor.is_on_thread()

    def whole(self, executor: SerialExecutor, operation: str, function: Callable[[], T]) -> T:
        """The result of a function, once all members have theirs.

        Args:
            executor: of this communicator.
            operation: for an error's text.
            function: calls this communicator's operations.

        Raises:
            MembersLost: members are lost, the others go on, and none has the result.
            ArgumentError: another thread is in an operation.
        """
        if not self._job.in_use.acquire(blocking=False):
            error = ArgumentError(
                f"{self.name}: {operation} was called while another thread was in a collective. "
                'on_failure="continue" needs all collectives in one thread: a loss would interrupt both.'
            )
            executor.reject(operation, error)
            raise error
        before, self._thread = self._thread, threading.get_ident()
        try:
            return self._confirmed(executor, operation, function)
        finally:
            self._thread = before
            self._job.in_use.release()

    def _confirmed(self, executor: SerialExecutor, operation: str, function: Callable[[], T]) -> T:
        confirmations = self._job.confirmations
        number = confirmations.committed + 1 if confirmations is not None else 0
        try:
            result = function()
        except MembersLost as error:
            if self.loss is not None and self.loss.recoveries == self._job.recoveries:
                executor.fail_or_recover(error, operation)
            if confirmations is not None and confirmations.committed >= number:
                raise PeerFailed(
                    f"{self.name}: the other ranks have finished what this one has not.", error.rank
                ) from error
            raise
        if confirmations is not None and executor.members is not None:
            try:
                executor.run(_CONFIRMATION, executor.members.barrier)
                confirmations.committed = number
            except MembersLost:
                if confirmations.committed < number:
                    raise
        return result

    def repeat(
        self,
        executor: SerialExecutor,
        operation: str,
        function: Callable[[], T],
        is_possible: Callable[[], bool] = lambda: True,
    ) -> T:
        """As `whole`, and again whenever members are lost in it, as long as that is possible."""
        while True:
            try:
                return self.whole(executor, operation, function)
            except MembersLost:
                if not is_possible():
                    raise

    def wait_for(self, executor: SerialExecutor, works: Sequence[Work[Any]]) -> None:
        """See `Communicator.wait_for`."""

        def wait() -> None:
            found: MembersLost | None = None
            for work in works:
                try:
                    work.wait()
                except MembersLost as error:  # those behind it end in this way, too, and soon
                    found = error
            if found is not None:
                raise found
            if self.loss is not None:  # of another communicator, after the last of these was done
                raise fresh(self.loss.error)

        try:
            self.whole(executor, works[0].description, wait)
        finally:
            self.has_started, self.loss = False, None
