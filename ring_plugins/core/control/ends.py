"""Why a connection has ended: whether the rank at its other end is dead, silent, or has left.

A rank of the same host is dead once the lock on its memory is free (liveness.py); who sees that tells all others. The
kernel ends a connection whose data or probes nobody has acknowledged for RING_NETWORK_TIMEOUT: that is silence.

Otherwise the process at the other end is usually dead. But a reset proves nothing: kernels also send one for a
connection that they have given up. The answer to another connection does, as a rank listens as long as it lives, so
this rank connects to its port once more:

- **Refused**: nobody listens there. It is dead.
- **Answered**: it lives, but has given up on this rank. Both sides take that for silence.
- **Nothing**: silence. Its host is down, or the network is cut.

A stopped process keeps its connections, so nobody asks. Whoever sends resets and refusals in the name of another host,
as a firewall may, is believed; docs/healing.md says so.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time

from ring_plugins.core.base import config
from ring_plugins.core.base.log import logger
from ring_plugins.core.base.member import Members
from ring_plugins.core.control.channel import EVERYONE, Channel
from ring_plugins.core.control.consensus import Consensus
from ring_plugins.core.control.liveness import LocalPeers
from ring_plugins.core.net.auth import Disconnected

#: Seconds between two looks at ranks of which it is not known yet why their connection has ended, and otherwise.
_LOOK, _IDLE = 0.01, 1.0
#: Errors by which the kernel says that another host does not react.
SILENT = frozenset((errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN))


class ListenProbe:
    """Finds out whether a process still listens, by connecting to it without waiting.

    Args:
        address, port: where it listened.
        patience: seconds after which it counts as silent.
    """

    def __init__(self, address: str, port: int, patience: float) -> None:
        self._where, self._end = (address, port), time.monotonic() + patience
        self._socket: socket.socket | None = None

    def advance(self) -> str:
        """ "dead", "silent", or "" while that is not known."""
        try:
            if self._socket is None:
                family = socket.AF_INET6 if ":" in self._where[0] else socket.AF_INET
                self._socket = socket.socket(family, socket.SOCK_STREAM)
                self._socket.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    self._socket.connect(self._where)
            elif self._socket.recv(1):  # the first byte of a handshake
                self.close()
                return "silent"
            else:
                self.close()  # it has taken the connection and ended, or is about to
        except BlockingIOError:
            pass
        except OSError as error:
            self.close()
            if error.errno == errno.ECONNREFUSED:
                return "dead"
            if error.errno in SILENT:
                return "silent"
            if error.errno not in (errno.ECONNRESET, errno.EPIPE, errno.ENOTCONN):
                logger.debug(f"{self._where}: {os.strerror(error.errno or 0)}")
        if time.monotonic() > self._end:
            self.close()
            return "silent"
        return ""

    def close(self) -> None:
        """Stop asking."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class Ends:
    """Tells the agreement who is dead or silent. It watches the channel, whose lock its callers hold.

    Args:
        members: of the job.
        channel: between them.
        local_peers: the ranks of this host, where they share memory.

    Attributes:
        consensus: this rank's part in the agreement, which is told.
    """

    def __init__(self, members: Members, channel: Channel, local_peers: LocalPeers | None) -> None:
        self._members, self._channel, self._local_peers = members, channel, local_peers
        self.consensus = Consensus(
            members.own,
            sorted(members.ranks),
            lambda rank, message: channel.tell(rank, "agree", message),
            self.hang_up,
            members.view,
        )
        self._dying: dict[int, float] = {}  # ranks of this host whose lock is not free yet, with the time to give up
        self._probes: dict[int, ListenProbe] = {}

    def note_end(self, rank: int, how: Disconnected) -> None:
        """The connection to a rank has ended; why, is still to be seen."""
        self.hang_up(rank)
        if rank in self.consensus.left or rank not in self.consensus.members:  # one that was to join is not missed
            return
        peer = self._members.known[rank]
        if how.is_invalid:
            logger.error(
                f"rank {self._members.own} has closed its connection to rank {rank} (process {peer.pid} on "
                f"{peer.host}): {how}. Memory or network are faulty, or this is a bug of ring_plugins.",
                exc_info=how.__cause__,
            )
        if how.code in SILENT:
            self.note_silent(rank)
        elif self._local_peers is not None and rank in self._local_peers.others:
            self._dying[rank] = time.monotonic() + config.NETWORK_TIMEOUT.get()
        else:
            self._probes[rank] = ListenProbe(peer.address, peer.port, config.NETWORK_TIMEOUT.get())

    def look(self) -> float:
        """Find out why connections have ended; returns in how many seconds to look again."""
        for rank, end in list(self._dying.items()):
            if rank not in self._dying:  # the death before it has begun a ballot, which hangs up on all that are dead
                continue
            local = self._local_peers.others.get(rank) if self._local_peers is not None else None
            if local is None or local.has_died():
                del self._dying[rank]
                if local is not None and local.is_lost():
                    self._note_dead(rank)
            elif time.monotonic() > end:
                self.note_silent(rank)
        for rank, probe in list(self._probes.items()):
            if self._probes.get(rank) is probe and (found := probe.advance()):
                del self._probes[rank]
                (self.consensus.note_dead if found == "dead" else self.note_silent)(rank)
        return _LOOK if self._probes or self._dying else _IDLE

    def _note_dead(self, rank: int) -> None:
        """The lock of a rank of this host is free, which no other host sees."""
        if rank not in self.consensus.dead and rank not in self.consensus.left:
            self._channel.tell(EVERYONE, "dead", {"rank": rank})
            self.consensus.note_dead(rank)

    def note_silent(self, rank: int) -> None:
        """A rank of another host cannot be reached any more: all of that host count as silent, at once.

        If only this one was left out, it might learn of it late, and write to memory that those share who go on.
        """
        known, domain = self._members.known, self._members.known[rank].domain
        is_here = self._members.is_near(rank)
        silent = [rank] if is_here else [other for other, peer in known.items() if peer.domain == domain]
        for other in silent:
            self.hang_up(other)
        self.consensus.note_silent(*silent)

    def look_at_locks(self) -> None:
        """See which ranks of this host are dead whose connections may not have ended yet."""
        for rank in self._local_peers.lost() if self._local_peers is not None else ():
            self._note_dead(rank)

    def hang_up(self, rank: int) -> None:
        """Close a connection, now: nothing more of that rank may count."""
        self._channel.hang_up(rank)
        self._dying.pop(rank, None)
        probe = self._probes.pop(rank, None)
        if probe is not None:
            probe.close()

    def close(self) -> None:
        """Stop asking."""
        for probe in self._probes.values():
            probe.close()
