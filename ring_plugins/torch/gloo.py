"""Bytes between hosts without MPI: the host plane over the gloo that ships inside torch.

Only gloo's point-to-point messages are used, in a process group of our own that torch.distributed never
hears of, so the script's own `init_process_group` finds everything untouched.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import pickle
import sys
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, cast

import numpy as np
import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, Store  # type: ignore[attr-defined]  # torch re-exports these unmarked

from ring_plugins.core.errors import ArgumentError, LaunchError, PeerFailed, RingError
from ring_plugins.torch.gloo_pending import GlooPending, Waiters
from ring_plugins.torch.network import choose_devices, first_line
from ring_plugins.torch.rendezvous import rendezvous_store

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

#: No single message is larger, so that nothing between us and the socket can overflow a 32-bit count.
PIECE_BYTES = 1 << 30
#: How long a wait may take is for the core to say, which watches the peers meanwhile; gloo must not give up first,
#: because its time-out closes every connection.
_PATIENCE = timedelta(days=365)

_NEVER_SENT = (1 << 31) - 1


class GlooPlane:
    """A `core.plane.Plane` over gloo.

    Args:
        store: where the ranks find each other; used during construction only, under keys of its own.
        rank: world rank of this process.
        size: world size.
        address: local IP address that the peers reach. Default: chosen by `choose_devices`.
        timeout: how long all ranks together may take to connect.

    Raises:
        LaunchError: the ranks could not connect to each other.
    """

    name = "gloo"

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        address: str | None = None,
        timeout: timedelta = timedelta(seconds=300),
    ) -> None:
        self.rank = rank
        self.size = size
        self._waiters = Waiters()
        self._group: Any = None
        if size == 1:
            return
        options: Any = cast(Any, ProcessGroupGloo)._Options()  # torch's stub leaves the underscore out
        options._timeout = timeout
        options._devices = choose_devices(store, rank, size, address)
        try:
            self._group = ProcessGroupGloo(PrefixStore("gloo", store), rank, size, options)
        except RuntimeError as error:
            raise LaunchError(
                f"rank {rank} of {size} could not connect to the other ranks over TCP ({first_line(error)}). "
                "Are all ranks running, and does a firewall close ports between the hosts? Name the network interface "
                "that reaches the other hosts with GLOO_SOCKET_IFNAME, for example GLOO_SOCKET_IFNAME=eth0."
            ) from error

    def all_gather_object(self, item: Any) -> list[Any]:
        """One picklable item from every rank, in rank order; all ranks call it.

        Raises:
            LaunchError: a rank went away.
        """
        if self.size == 1:
            return [pickle.loads(pickle.dumps(item))]
        mine = torch.frombuffer(bytearray(pickle.dumps(item)), dtype=torch.uint8)
        sizes = self._all_gather(torch.tensor([mine.numel()]))
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: mine.numel()] = mine
        parts = self._all_gather(padded)
        return [pickle.loads(part[: int(size)].numpy().tobytes()) for part, size in zip(parts, sizes, strict=True)]

    def exchange(
        self, outgoing: Sequence[tuple[int, Bytes]], incoming: Sequence[tuple[int, Bytes]], tag: int
    ) -> GlooPending:
        """Start sending and receiving; returns at once.

        Args:
            outgoing: (world rank, bytes to send); must stay unchanged until the exchange is done.
            incoming: (world rank, memory to fill), of the size that the peer sends.
            tag: 0 to 2**31 - 2. Messages of one (peer, tag) arrive in the order in which they were sent.

        Raises:
            ArgumentError: a tag or a rank out of range.
            PeerFailed: a peer's connection is closed already.
            RingError: the plane is closed.
        """
        self._check(tag, [peer for peer, _ in (*outgoing, *incoming)])
        _copy_to_self(self.rank, outgoing, incoming)
        works: dict[int, list[Any]] = {}
        keep: list[torch.Tensor] = []
        try:
            # Receives first, so that gloo writes an early message straight to its place.
            for verb, messages in (("recv", incoming), ("send", outgoing)):
                for peer, array in messages:
                    for piece in _pieces(array) if peer != self.rank else ():
                        keep.append(piece)
                        works.setdefault(peer, []).append(self._start(verb, piece, peer, tag))
        finally:  # what was started before an error runs on, and needs its memory
            pending = GlooPending(len(works), (keep, outgoing, incoming))
            for peer, of_peer in works.items():
                self._waiters.submit(functools.partial(self._finish, pending, peer, of_peer))
        return pending

    def abort(self, code: int) -> None:
        """End this process at once, with status `code`.

        gloo has no launcher to tell. torchrun ends the other ranks when one fails; and wherever a peer waits for
        this one, the closed connection tells it.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def close(self) -> None:
        """Close all connections; call after the last exchange is done on all ranks.

        An exchange that was given up (the ranks disagreed, a peer failed) ends with an error.
        """
        group, self._group = self._group, None
        if group is not None and self._waiters.busy:
            _break_connections(group, peer=(self.rank + 1) % self.size)
        self._waiters.close()

    def _all_gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        try:
            self._group.allgather([parts], [mine]).wait(_PATIENCE)
        except RuntimeError as error:
            raise LaunchError(
                f"rank {self.rank} lost another rank while starting up ({first_line(error)}); "
                "look for the error that it printed."
            ) from error
        return parts

    def _check(self, tag: int, peers: Sequence[int]) -> None:
        if not 0 <= tag < _NEVER_SENT:
            raise ArgumentError(f"tag={tag} on rank {self.rank} is not in 0..{_NEVER_SENT - 1}.")
        for peer in peers:
            if not 0 <= peer < self.size:
                raise ArgumentError(f"rank {self.rank} was asked to exchange with rank {peer} of {self.size}.")
        if self._group is None and any(peer != self.rank for peer in peers):
            raise RingError(f"the gloo plane of rank {self.rank} has been closed.")

    def _start(self, verb: str, piece: torch.Tensor, peer: int, tag: int) -> Any:
        try:
            return getattr(self._group, verb)([piece], peer, tag)
        except RuntimeError as error:
            raise self._broken(peer, error) from error

    def _finish(self, pending: GlooPending, peer: int, works: Sequence[Any]) -> None:
        try:
            for work in works:
                work.wait(_PATIENCE)
        except RuntimeError as error:
            pending.finish_one(self._broken(peer, error))
        else:
            pending.finish_one(None)

    def _broken(self, peer: int, error: RuntimeError) -> PeerFailed:
        return PeerFailed(
            f"rank {self.rank} lost its connection to rank {peer}, which ended or became unreachable "
            f"({first_line(error)}). Look for the error that rank {peer} printed.",
            peer,
        )


def open_plane(generation: int = 0) -> GlooPlane:
    """The plane of a process that was started the torchrun way.

    Reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT from the environment.

    Args:
        generation: how many planes this job opened before, the same on all ranks; keeps their keys apart.

    Raises:
        LaunchError: the environment is incomplete, or the ranks could not find each other.
    """
    store, rank, size = rendezvous_store(generation)
    return GlooPlane(store, rank, size)


def _break_connections(group: Any, peer: int) -> None:
    """End all transfers that are under way, with errors.

    torch offers no way to abort a gloo group (2.13: ProcessGroupGloo.hpp overrides `abort` for single works only, and
    those are not exposed to Python). But gloo closes all connections of a group in which a wait timed out
    (gloo/transport/tcp/unbound_buffer.cc, waitRecv), so wait a moment for a message that nobody sends.
    """
    with contextlib.suppress(RuntimeError):
        group.recv([torch.empty(1, dtype=torch.uint8)], peer, _NEVER_SENT).wait(timedelta(milliseconds=1))


def _pieces(array: Bytes) -> Iterator[torch.Tensor]:
    """Tensors over the array's memory, none larger than PIECE_BYTES; none at all for an empty array."""
    for start in range(0, array.size, PIECE_BYTES):
        part = array[start : start + PIECE_BYTES]
        if not part.flags.writeable:  # torch warns about read-only arrays, although sending only reads
            part = np.ctypeslib.as_array((ctypes.c_uint8 * part.size).from_address(part.ctypes.data))
        yield torch.from_numpy(part)


def _copy_to_self(rank: int, outgoing: Sequence[tuple[int, Bytes]], incoming: Sequence[tuple[int, Bytes]]) -> None:
    sent = [array for peer, array in outgoing if peer == rank]
    received = [array for peer, array in incoming if peer == rank]
    for source, target in zip(sent, received, strict=True):
        np.copyto(target, source)
