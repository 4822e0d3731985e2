"""What all ranks do about a step that some of them could not compute: skip it together, or give up together.

A rank whose forward or backward raised has no gradients, and the others have no averages without it. Ranks that went
different ways from there would drift apart in silence. So the rank that failed tells the others in the step's own
communication, all ranks exchange why, and all come to the same decision: the step is skipped if every rank that failed
is in a `skip_step_on` block; if not, averaging is broken on all of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import nn

from ring_plugins.core.base.errors import ArgumentError, RingError, StepSkipped, fresh, name_ranks
from ring_plugins.core.base.log import logger
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.gpu.communicator import DeviceCommunicator
from ring_plugins.core.world import current
from ring_plugins.torch import changes


class SkippableStep:
    """What became of a step in `skip_step_on`.

    Attributes:
        skipped: whether all ranks skipped it; known at the end of the block.
        reason: which ranks could not compute their gradients, and why.
    """

    skipped = False
    reason = ""


class Failure(NamedTuple):
    """Why a rank could not compute its gradients, and whether its script wants to skip such a step."""

    reason: str
    wants_to_skip: bool


class SkippedSteps:
    """The steps that the ranks of one averager skip, and the error that ended its use, if any.

    Args:
        communicator: the averager's.

    Attributes:
        step: of the `skip_step_on` block that is running.
        count: steps that all ranks skipped.
    """

    def __init__(self, communicator: Communicator[Any]) -> None:
        self._communicator = communicator
        self.step: SkippableStep | None = None
        self.count = 0
        self._broken: RingError | None = None

    @property
    def is_ordinary(self) -> bool:
        """Whether `check` passes, and no block runs."""
        return self._broken is None and self.step is None

    def check(self) -> None:
        """Raise if averaging is broken, or if the step that is running has been skipped."""
        if self._broken is not None:
            raise fresh(self._broken)
        if self.step is not None and self.step.skipped:
            raise StepSkipped(self.step.reason)

    def check_block(self, exceptions: tuple[type[BaseException], ...], synchronizes: bool) -> None:
        """Raise ArgumentError if a block that skips steps with these exceptions must not begin now.

        Args:
            exceptions: what the script wants to skip.
            synchronizes: whether the block is outside of `no_sync()`.
        """
        if not exceptions or not all(isinstance(kind, type) and issubclass(kind, BaseException) for kind in exceptions):
            raise ArgumentError(f"skip_step_on{exceptions!r} needs exceptions, such as torch.cuda.OutOfMemoryError.")
        if self.step is not None or not synchronizes:
            where = "no_sync()" if self.step is None else "another skip_step_on()"
            raise ArgumentError(f"skip_step_on() inside {where}: let its block hold one whole step.")

    def decide(self, share: float, failure: Failure | None, parameters: Iterable[nn.Parameter]) -> None:
        """Handle a pass that some ranks could not complete; all ranks call this.

        Args:
            share: of the ranks that could not.
            failure: why this rank could not; None if it could.
            parameters: whose gradients a skipped step sets to None.

        Raises:
            StepSkipped: all ranks skip the step.
            RingError: ranks would go different ways. Not if no rank has averages: then all went the same way.
        """
        if self.step is None and share > 1 - 0.5 / self._communicator.size:
            return
        if self.step is None and isinstance(self._communicator, DeviceCommunicator):
            # The others' hosts have gone on, and may wait for their GPUs, which wait for this rank.
            try:
                self.give_up(f"on rank {self._communicator.ranks[self._communicator.rank]}")
            except RingError as error:
                current().fail(error)
                raise
        failures = self._communicator.all_gather_object(failure, "skip_step_on")
        # From now on, `ranks` lacks those that died in it.
        failed = {r: found for r, found in zip(self._communicator.ranks, failures, strict=True) if found is not None}
        reasons = "; ".join(f"rank {rank}: {found.reason}" for rank, found in failed.items())
        reasons = reasons or "the rank that could not has died"
        if not all(found.wants_to_skip for found in failed.values()):
            self.give_up(f"on {name_ranks(list(failed))}")
        self._note(reasons, parameters)
        if failure is not None or self._communicator.rank == 0:
            logger.warning(f"{self._communicator.name}: all ranks skip a step. {reasons}")
        raise StepSkipped(
            f"all ranks skip this step, which some could not compute ({reasons}). Wrap the step in skip_step_on() on "
            "all ranks."
        )

    def skip_alone(self, reason: str, parameters: Iterable[nn.Parameter]) -> None:
        """Skip the step of a single rank."""
        self._note(reason, parameters)
        logger.warning(f"{self._communicator.name}: skips a step. {reason}")

    def _note(self, reason: str, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            parameter.grad = None
        self.count += 1
        if self.step is not None:
            self.step.skipped, self.step.reason = True, reason

    def give_up(self, where: str) -> None:
        """Raise RingError, now and at every `check` from now on.

        Args:
            where: on which ranks a backward raised.
        """
        self._broken = RingError(
            f"{self._communicator.name}: a backward raised an exception {where}, which the script caught. The other "
            "ranks have no averages for that step, and ranks that go on would drift apart. Let the exception end the "
            "job, or wrap each step in `with optimizer.skip_step_on(...)` on all ranks, so that all skip it. To go on, "
            "close() this averager and build a new one on all ranks."
        )
        changes.note()
        raise self._broken
