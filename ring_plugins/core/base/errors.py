"""All public errors. Their messages say what happened, on which rank, and what to do about it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pickle import PicklingError
from typing import Any


class RingError(RuntimeError):
    """Base of all errors raised by ring_plugins."""


class NotInitialized(RingError):
    """A function that needs the other ranks was called before `ring_plugins.init()`."""


class LaunchError(RingError):
    """The processes of a job could not find each other."""


class MissingDependency(RingError, ImportError):
    """An optional package is needed but not installed; the text names the pip command."""


class ArgumentError(RingError, ValueError):
    """An argument has an invalid value; the text names argument, value and remedy."""


class SharedMemoryError(RingError):
    """Processes on one host could not share memory."""


class MismatchError(RingError):
    """Ranks called different operations, or the same operation with different sizes or types.

    Attributes:
        is_known: whether all ranks know it of all, and may go on.
    """

    is_known = False


class PeerFailed(RingError):
    """Another rank failed, so this operation can never complete.

    Attributes:
        rank: world rank of the process that failed.
    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank

    def __reduce__(self) -> tuple[type[PeerFailed], tuple[str, int]]:
        return type(self), (self.args[0], self.rank)


class RankFailed(RingError):
    """A function called by `ring_plugins.run`, or by its variants for Ray and Spark, failed on a rank.

    `__cause__` is the exception itself, if it can be pickled.

    Attributes:
        rank: the first rank that failed.
        host: where it ran.
        traceback: as printed on that rank, "" if the process was killed.
    """

    def __init__(self, message: str, rank: int, host: str, traceback: str = "") -> None:
        super().__init__(message)
        self.rank, self.host, self.traceback = rank, host, traceback

    def __reduce__(self) -> tuple[type[RankFailed], tuple[str, int, str, str]]:
        return type(self), (self.args[0], self.rank, self.host, self.traceback)


class MembersLost(PeerFailed):
    """Members died before they arrived at an operation that the others are in: it has not happened.

    If the job goes on without them, it is raised once the survivors have agreed on that, and whoever has the inputs of
    the operation repeats it. Nobody else can, so otherwise it ends the job, as the failure of any peer does.
    """


class PeerLeft(PeerFailed):
    """Another rank ended normally while this one still waits for it."""


class DeviceError(RingError):
    """NCCL or the CUDA driver reported an error, is too old, or finds no GPU that this rank can use."""


class DeadlockError(RingError):
    """Ranks wait for each other, in a circle, in different operations."""


class StepSkipped(RingError):
    """All ranks skip this step, because one of them could not compute its gradients.

    `skip_step_on` of torch's averager and optimizer raises it on the ranks that could, and catches it.
    """


class DriftError(RingError):
    """The ranks' weights are no longer equal."""


class TimeoutExceeded(RingError, TimeoutError):
    """An operation waited longer than RING_TIMEOUT."""


def is_rejection(error: BaseException) -> bool:
    """Whether an exception that came before anything was sent is about this call: its arguments, or lack of memory.

    Others may be a signal handler's. A script that catches one of these may call again, and nothing is broken.
    """
    if isinstance(error, RingError):
        return isinstance(error, ArgumentError)
    kinds = TypeError, ValueError, AttributeError, LookupError, MemoryError, OSError, RuntimeError, PicklingError
    return isinstance(error, kinds) and not isinstance(error, (TimeoutError, InterruptedError))


def is_first_report(error: BaseException, to: str) -> bool:
    """Whether an error is reported there for the first time: several layers that it passes through would report it."""
    told: set[str] = vars(error).setdefault("_ring_told", set())
    is_first = to not in told
    told.add(to)
    return is_first


def fresh(error: BaseException) -> BaseException:
    """A copy of an error that is to be raised again and again: type, text, fields and cause, but no traceback.

    Each raise of one object adds to its traceback, which keeps the frames of all callers and their tensors alive.
    """
    try:
        again = copy.copy(error)
    except Exception:  # its class cannot be copied
        return error.with_traceback(None)
    vars(again).update(vars(error))
    again.__cause__, again.__suppress_context__ = error.__cause__, error.__suppress_context__
    return again


def quoted(text: object, most: int = 200) -> str:
    """Text of another process as an error or a log line may show it: one line, without control characters.

    Terminals obey control characters, and what follows a line break would look like a line of ours.

    Args:
        text: anything.
        most: characters after which it is cut.
    """
    shown = str(text)
    cut = "..." if len(shown) > most else ""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown[:most]) + cut


def printable(value: Any) -> Any:
    """A value of JSON with all of its texts `quoted`, and none of them cut."""
    if isinstance(value, str):
        return value if value.isprintable() else quoted(value, len(value))
    if isinstance(value, list):
        return [printable(one) for one in value]
    if isinstance(value, dict):
        return {printable(key): printable(one) for key, one in value.items()}
    return value


def name_ranks(ranks: Sequence[int], most: int = 20) -> str:
    """How errors and reports name ranks: "rank 3", "ranks 0, 1", "ranks 0, 1 and 40 more".

    Args:
        ranks: to name; without any, "the other ranks", since whoever waits then waits for nobody in particular.
        most: how many to list.
    """
    if not ranks:
        return "the other ranks"
    listed = ", ".join(map(str, ranks[:most])) + (f" and {len(ranks) - most} more" if len(ranks) > most else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}"
