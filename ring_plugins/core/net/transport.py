"""What carries bytes between hosts: MPI, or plain sockets where there is no MPI."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ring_plugins.core.base.types import Bytes


class Request(Protocol):
    """Transfers under way. Who drops one unfinished need not care: the memory stays untouched, or alive."""

    def done(self) -> bool:
        """Whether all have finished; polls, never blocks.

        Raises:
            PeerFailed: a transfer failed, which also tells failures of its beginning.
        """

    def nap(self, seconds: float) -> None:
        """Sleep until it is worth asking again.

        Args:
            seconds: how long, where nothing tells; a plane that is woken by what arrives may sleep longer.
        """


class Transport(Protocol):
    """Point-to-point transfers among all ranks of the job. Arithmetic is never done here."""

    name: str
    rank: int
    size: int

    def connect(self, ranks: Sequence[int], tag: int) -> Request:
        """Get ready to exchange with ranks that call this too.

        Raises:
            LaunchError: a rank cannot be reached; from `done` as well.
        """

    def disconnect(self, tag: int) -> None:
        """Nobody will exchange with this tag any more."""

    def exchange(
        self, outgoing: Sequence[tuple[int, Bytes]], incoming: Sequence[tuple[int, Bytes]], tag: int
    ) -> Request:
        """Start sending to and receiving from world ranks.

        Args:
            outgoing: (rank, 1-d uint8 contiguous array) to send; must not change until done.
            incoming: (rank, array) to fill; of the size that was sent.
            tag: messages of equal rank and tag arrive in order.
        """

    def progress(self, tag: int) -> None:
        """Move what can be moved at once of transfers that were begun with this tag.

        Raises:
            PeerFailed: a transfer failed.
        """

    def close(self) -> None:
        """Release what the plane holds."""
