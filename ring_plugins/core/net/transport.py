"""The protocol of a transport: point-to-point transfers between hosts, over sockets (tcp.py) or MPI (mpi.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ring_plugins.core.base.types import Bytes


class Request(Protocol):
    """Transfers under way. It may be dropped before completion: buffers stay alive or untouched."""

    def done(self) -> bool:
        """Whether all transfers have finished; makes progress, never blocks.

        Raises:
            PeerFailed: a transfer failed, possibly when it was started.
        """

    def missing(self) -> Sequence[int]:
        """World ranks whose transfers had not finished at the last call of `done`, for messages."""

    def nap(self, seconds: float) -> None:
        """Sleep until `done` may have changed.

        Args:
            seconds: how long; a transport that wakes when data arrives may sleep longer.
        """


class Transport(Protocol):
    """Point-to-point transfers among all ranks of the job. It never does arithmetic."""

    name: str
    rank: int
    size: int

    def connect(self, ranks: Sequence[int], tag: int) -> Request:
        """Prepare to exchange with ranks that call this too.

        Raises:
            LaunchError: a rank cannot be reached; `done` of the request raises it too.
        """

    def disconnect(self, tag: int) -> None:
        """Release the resources of a tag, which is not used any more."""

    def abandon(self, tag: int) -> None:
        """Release the resources of a tag in the middle of transfers, whose memory is left alone from now on."""

    def exchange(
        self, outgoing: Sequence[tuple[int, Bytes]], incoming: Sequence[tuple[int, Bytes]], tag: int
    ) -> Request:
        """Start sending to and receiving from world ranks.

        Args:
            outgoing: (rank, 1-d contiguous uint8 array) to send; must not change until done.
            incoming: (rank, array) to fill, of the size that was sent.
            tag: messages of equal rank and tag arrive in order.
        """

    def is_receiving(self, rank: int, tag: int) -> bool:
        """Whether more bytes from a rank may be on their way, since some arrived a moment ago."""

    def progress(self, tag: int) -> None:
        """Make progress on transfers with this tag; never blocks.

        Raises:
            PeerFailed: a transfer failed.
        """

    def close(self) -> None:
        """Release everything the transport holds."""
