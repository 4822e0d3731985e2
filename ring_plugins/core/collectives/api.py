"""The interface of communicators, and the types that their implementations share.

`host.HostCommunicator`, `single.SingleCommunicator` and, for GPUs, `core.gpu.communicator.DeviceCommunicator` implement
`Communicator`. They share `Work` for operations under way, `Statistics` and `Activity` for reports, and `FailureState`
for communicators that can no longer be used. `ByteCollectives` and `Reducer` are the interfaces of groups that
move bytes and combine numbers.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import numpy as np

from ring_plugins.core.arrays.arithmetic import reduce_into
from ring_plugins.core.arrays.codec import Codec
from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.arrays.memory import HostMemory
from ring_plugins.core.base.errors import RingError, fresh
from ring_plugins.core.base.types import Array, Bytes
from ring_plugins.core.collectives.fingerprint import Fingerprint
from ring_plugins.core.linux.shared_memory import SharedBuffer

if TYPE_CHECKING:
    import typing_extensions

    #: The memory it works on. `Communicator` alone means host memory, `Communicator[DeviceMemory]` that of a GPU.
    M_contra = typing_extensions.TypeVar("M_contra", contravariant=True, default=HostMemory)
else:
    M_contra = TypeVar("M_contra", contravariant=True)

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Communicator(Protocol[M_contra]):
    """A group of ranks that make the same calls in the same order; what waits for nobody does nothing by default.

    A call blocks the calling thread until its result is there, and runs after everything given to `start` before it. On
    a GPU it blocks the calling thread's stream instead: work queued there later runs after it. After an error that
    leaves the members out of step, every further call raises that error again; build a new communicator to continue.

    Attributes:
        name: for error texts and reports.
        rank, size: within the group.
        ranks: the members' world ranks.
        statistics: what it has done so far.
        recovers: whether it goes on without members that are lost, which shows in `rank`, `size` and `ranks`. Then a
            call that does not repeat itself raises `MembersLost`, and so does `run_synchronously`: nobody has the
            result, and the caller may repeat it (recovery.py).

    All methods raise `PeerFailed` if a member is gone, `MismatchError` if members make different calls, and
    `DeadlockError` and `TimeoutExceeded` as their names say.
    """

    name: str
    rank: int
    size: int
    ranks: tuple[int, ...]
    statistics: Statistics
    recovers: bool = False

    def all_reduce(self, memory: M_contra, op: Op, codec: Codec | None = None) -> None:
        """Combine the memory of all members in place; all get the same bits.

        `codec` says how numbers are encoded between hosts; by default they are sent as they are.
        """

    def all_reduce_coalesced(
        self, memories: Sequence[M_contra], op: Op, codecs: Sequence[Codec | None] | None = None
    ) -> None:
        """As `all_reduce` of one after the other, to the last bit, but faster; one codec for each, or none."""
        with self.group():
            for memory, codec in zip(memories, codecs or [None] * len(memories), strict=True):
                self.all_reduce(memory, op, codec)

    def broadcast(self, memory: M_contra, root: int) -> None:
        """Overwrite the memory of all members with the root's."""

    def all_gather(self, mine: M_contra, out: M_contra, counts: Sequence[int]) -> None:
        """Fill `out` with the memory of all members in rank order.

        `counts[i]` is the number of elements of member i; `counts` is equal on all ranks.
        """

    def reduce_scatter(self, full: M_contra, out: M_contra, counts: Sequence[int], op: Op) -> None:
        """Combine the `full` of all members and leave `counts[rank]` elements of it in `out`; `full` is only read."""

    def all_to_all(self, send: M_contra, send_counts: Sequence[int], out: M_contra, out_counts: Sequence[int]) -> None:
        """Send `send_counts[i]` elements to member i and receive `out_counts[i]` from it, in rank order."""

    def barrier(self) -> None:
        """Return when all members have called."""

    def broadcast_object(self, item: Any, root: int = 0, purpose: str = "") -> Any:
        """Return the root's object (pickled) on every member.

        `purpose` is what needs it, if that is not the user's call of this name, as for `fingerprint.purpose`.
        """

    def all_gather_object(self, item: Any, purpose: str = "") -> list[Any]:
        """Return the objects (pickled) of all members in rank order; `purpose` as above."""

    def start(self, description: str, function: Callable[[], T], repeats: bool = False) -> Work[T]:
        """Run `function`, which calls the methods above, in the background, after everything started before.

        Where members may be lost, it is run at once, in this thread, unless the caller `repeats` it, see `wait_for`.
        """

    def wait_for(self, works: Sequence[Work[Any]]) -> None:
        """Wait for works that were started with `repeats`, all since the last call, to use their results.

        Raises:
            MembersLost: no member has any of these results; the caller starts all of the works anew.
        """
        for work in works:
            work.wait()

    def run_synchronously(self, description: str, function: Callable[[], T]) -> T:
        """Run `function` in this thread, after everything started before. Any exception breaks the communicator."""
        return self.start(description, function).wait()

    def group(self) -> AbstractContextManager[None]:
        """Batch the operations called inside, as `ncclGroupStart` does; results are there when the block ends.

        By default every operation starts as soon as it is called.
        """
        return contextlib.nullcontext()

    def allocate(self, nbytes: int) -> SharedBuffer:
        """Allocate memory in which `all_reduce` is fastest; all ranks call with the same size."""

    def buffers_belong_to(self, owner: BufferOwner) -> None:
        """Let processes join that have other buffers, since their owner can make them anew; it is not kept alive."""
        return

    def release(self, buffer: SharedBuffer) -> None:
        """Give back memory from `allocate`; views of it stay valid."""
        return

    def activity(self) -> Activity | None:
        """Return this rank's current or last operation; any thread may call it."""
        return None

    def reject(self, operation: str, error: BaseException) -> None:
        """Tell the other members that this one takes no part in an operation, because of its arguments or of memory.

        Does nothing for an error that they raise too, and for one that they have been told.
        """
        return

    def check(self) -> None:
        """Raise the error after which this communicator can no longer be used, if there is one."""
        return

    def interrupt(self, operation: str, cause: BaseException) -> None:
        """Make every further call raise on all members, because an exception keeps this one from finishing `operation`.

        Returns once the communicator no longer writes to memory of this process, after 5 s at the latest.
        """
        return

    def close(self) -> None:
        """End the communication thread and release the memory; further calls raise."""
        return

    def discard(self) -> None:
        """Release what it can without waiting; further calls raise. Finalizers call it at any moment, in any thread."""
        return

    def detach_after_fork(self) -> None:
        """Make every call raise; for a forked child, whose calls would disturb the parent and its peers."""
        return


class BufferOwner(Protocol):
    """Has all shared buffers of a communicator, and can make them anew.

    Attributes:
        layout: two texts. Where the first is equal, they will be made alike; where both are, they are alike already.
    """

    @property
    def layout(self) -> tuple[str, str]: ...

    def drop_all(self) -> None:
        """Release all buffers."""


class Work(Protocol[T_co]):
    """An operation under way.

    Attributes:
        description: what it is, for error texts and reports.
    """

    @property
    def description(self) -> str: ...

    def done(self) -> bool:
        """Whether `wait` would return (or raise) at once."""

    def wait(self) -> T_co:
        """Wait for the operation and return its result.

        Raises:
            Exception: whatever the operation raised, with its own traceback.
        """


@dataclass
class Statistics:
    """Counters of a communicator's work so far.

    Attributes:
        operations: number of collectives finished.
        working: seconds that the communication thread, or a blocked caller, spent in them.
    """

    operations: int = 0
    working: float = 0.0


class Activity(NamedTuple):
    """A rank's current or last operation in a communicator.

    Attributes:
        communicator: its name.
        operation: text of the operation's fingerprint.
        part_of: the work it belongs to, such as a bucket; "" for a call made by the script itself.
        began, ended: times of `time.monotonic`; `ended` is 0 while the operation is under way.
        number: operations finished with this communicator.
    """

    communicator: str
    operation: str
    part_of: str
    began: float
    ended: float
    number: int


#: How to go on once a communicator is broken.
REMEDY = (
    "to continue, all ranks must recreate what uses it (optimizer, strategy, process group); for ring_plugins' own "
    "functions they must call ring_plugins.shutdown() and init(), which works if a launcher started them"
)


class FailureState:
    """Remembers why a communicator can no longer be used.

    Ranks match operations by their order alone. After an error that leaves this rank out of step with the others, every
    further call must raise that error again; the remedy is a new communicator.

    Args:
        name: name of the communicator, for error texts.

    Attributes:
        error: the first such error, None while the communicator works.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.error: BaseException | None = None

    def check(self) -> None:
        """Raise the error, if there is one."""
        if self.error is not None:
            raise fresh(self.error)

    def fail(self, error: BaseException) -> None:
        """Make every further call raise a copy of `error`, unless an earlier error is already recorded."""
        self.error = self.error or fresh(error)

    def interrupt(self, operation: str, cause: BaseException) -> None:
        """Record that an exception that is not a `RingError`, such as KeyboardInterrupt, ended an operation halfway."""
        self.fail(
            RingError(
                f"{self._name} was interrupted in {operation} by {type(cause).__name__} and is out of step with the "
                f"other ranks; {REMEDY}."
            )
        )

    def close(self) -> None:
        """Record that the communicator has been closed."""
        self.fail(RingError(f"{self._name} has been closed."))

    def detach_after_fork(self) -> None:
        """Record that this process was forked from the one that the communicator belongs to."""
        self.error = RingError(
            f"{self._name} belongs to process {os.getppid()}, which forked this one (a data loader's worker?). "
            "Collectives are for the ranks themselves."
        )


class ByteCollectives(Protocol):
    """Moves bytes among the members of a group, and knows of element types only in `reduce_scatter`.

    All other arrays are 1-d uint8 and may be empty. Every member calls the same method in the same order with an equal
    fingerprint.
    """

    def all_gather(self, mine: Bytes, parts: Sequence[Bytes], fingerprint: Fingerprint) -> None:
        """Fill `parts[i]` with member i's `mine`; sizes may differ and are known to all."""

    def all_to_all(self, outgoing: Sequence[Bytes], incoming: Sequence[Bytes], fingerprint: Fingerprint) -> None:
        """Fill `incoming[i]` with the part of member i's `outgoing` that is meant for this member."""

    def reduce_scatter(self, parts: Sequence[Array], out: Array, op: Op, dtype: str, fingerprint: Fingerprint) -> None:
        """Combine the `parts` of all members; member i gets the combination of everyone's `parts[i]`.

        Args:
            parts: 1-d storage arrays by receiver, of the same lengths on all members; only read.
            out: for the result; may overlap with them.
            op, dtype: as in `reduce_into`.
            fingerprint: of the operation.
        """
        terms = np.empty((len(parts), out.size), out.dtype)
        self.all_to_all([part.view(np.uint8) for part in parts], [term.view(np.uint8) for term in terms], fingerprint)
        reduce_into(out, list(terms), op, dtype, len(parts) if op is Op.AVERAGE else 1)

    def broadcast(self, data: Bytes, root: int, fingerprint: Fingerprint) -> None:
        """Overwrite `data` with the root's."""

    def barrier(self, fingerprint: Fingerprint) -> None:
        """Return when all members have called."""


class Reducer(Protocol):
    """Combines the numbers of a group's members."""

    def all_reduce(
        self, array: Array, source: Array, op: Op, dtype: str, codec: Codec | None, fingerprint: Fingerprint
    ) -> None:
        """Combine the `source` of all members into `array`; all get the same bits.

        Args:
            array: 1-d storage array for the result, the same length everywhere.
            source: this member's numbers; may be `array` itself.
            op, dtype: as in `reduce_into`.
            codec: encodes numbers between hosts; None sends them as they are.
            fingerprint: of the operation.

        Raises:
            MismatchError: members are in different operations; all raise it.
        """
