"""What a communicator promises, said once for all implementations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ring_plugins.core.collectives.work import Work
from ring_plugins.core.compression import HalfWire
from ring_plugins.core.memory import HostMemory
from ring_plugins.core.operations import Op
from ring_plugins.core.shared_memory import SharedBuffer

T = TypeVar("T")

if TYPE_CHECKING:
    import typing_extensions

    #: The memory it works on. `Communicator` alone means host memory, `Communicator[DeviceMemory]` that of a GPU.
    M_contra = typing_extensions.TypeVar("M_contra", contravariant=True, default=HostMemory)
else:
    M_contra = TypeVar("M_contra", contravariant=True)


@dataclass
class Statistics:
    """What a communicator has done so far.

    Attributes:
        operations: collectives finished.
        nbytes: bytes given to them.
        waited: seconds in which callers waited for them.
        working: seconds in which the communication thread, or a blocked caller, ran them.
    """

    operations: int = 0
    nbytes: int = 0
    waited: float = 0.0
    working: float = 0.0


class Communicator(Protocol[M_contra]):
    """A group of ranks that make the same calls in the same order.

    Calls block the calling thread, but work given to `start` before comes first. On a GPU they block the calling
    thread's stream instead: what it is given next comes after them. After an error that
    leaves members out of step every further call raises it again; build a new communicator to go on.

    Attributes:
        name: for texts.
        rank, size: within the group.
        ranks: the members' world ranks.
        statistics: what was done so far.

    All methods raise `PeerFailed` if a member is gone, `MismatchError` if members call different things,
    `DeadlockError` and `TimeoutExceeded` as their names say.
    """

    name: str
    rank: int
    size: int
    ranks: tuple[int, ...]
    statistics: Statistics

    def all_reduce(self, memory: M_contra, op: Op, wire: HalfWire | None = None) -> None:
        """Combine everyone's memory, in place, to the same bits on all ranks.

        `wire` says how numbers travel between hosts, where they do: in full by default.
        """

    def broadcast(self, memory: M_contra, root: int) -> None:
        """Overwrite everyone's memory with the root's."""

    def all_gather(self, mine: M_contra, out: M_contra, counts: Sequence[int]) -> None:
        """Fill `out` with everyone's memory in rank order; `counts` elements each, equal on all ranks."""

    def reduce_scatter(self, full: M_contra, out: M_contra, counts: Sequence[int], op: Op) -> None:
        """Combine everyone's `full` and leave `counts[rank]` elements of it in `out`; `full` is only read."""

    def all_to_all(self, send: M_contra, send_counts: Sequence[int], out: M_contra, out_counts: Sequence[int]) -> None:
        """Send `send_counts[i]` elements to rank i, receive `out_counts[i]` from it, in rank order."""

    def barrier(self) -> None:
        """Return when all ranks have called."""

    def broadcast_object(self, item: Any, root: int = 0) -> Any:
        """The root's object (pickled) on every rank."""

    def all_gather_object(self, item: Any) -> list[Any]:
        """Everyone's object (pickled) in rank order."""

    def start(self, description: str, function: Callable[[], T]) -> Work[T]:
        """Run `function`, which calls the methods above, after all started before, while the caller goes on."""

    def group(self) -> AbstractContextManager[None]:
        """The operations called inside may travel together; their results are there when it ends."""

    def allocate(self, nbytes: int) -> SharedBuffer:
        """Memory in which `all_reduce` is fastest; all ranks call with the same size."""

    def release(self, buffer: SharedBuffer) -> None:
        """Give back memory from `allocate`; views of it stay valid."""

    def close(self) -> None:
        """End the communication thread and forget the memory."""
