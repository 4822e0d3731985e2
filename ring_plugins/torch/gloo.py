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
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, cast

import numpy as np
import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, Store  # type: ignore[attr-defined]  # torch re-exports these unmarked

from ring_plugins.core.errors import ArgumentError, LaunchError, PeerFailed, RingError
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
        self._waiters = _Waiters()
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
        """One picklable item from every rank, in rank order; all ranks call it."""
        if self.size == 1:
            return [pickle.loads(pickle.dumps(item))]
        mine = torch.frombuffer(bytearray(pickle.dumps(item)), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        self._group.allgather([sizes], [torch.tensor([mine.numel()])]).wait(_PATIENCE)
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: mine.numel()] = mine
        parts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        self._group.allgather([parts], [padded]).wait(_PATIENCE)
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
        """
        if not 0 <= tag < _NEVER_SENT:
            raise ArgumentError(f"tag={tag} on rank {self.rank} is not in 0..{_NEVER_SENT - 1}.")
        _copy_to_self(self.rank, outgoing, incoming)
        works: dict[int, list[Any]] = {}
        keep: list[torch.Tensor] = []
        # Receives first, so that gloo writes an early message straight to its place.
        for start, messages in ((self._receive, incoming), (self._send, outgoing)):
            for peer, array in messages:
                if peer == self.rank:
                    continue
                for piece in _pieces(array):
                    keep.append(piece)
                    works.setdefault(peer, []).append(start(piece, peer, tag))
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

    def _send(self, piece: torch.Tensor, peer: int, tag: int) -> Any:
        return self._start(self._group.send, piece, peer, tag)

    def _receive(self, piece: torch.Tensor, peer: int, tag: int) -> Any:
        return self._start(self._group.recv, piece, peer, tag)

    def _start(self, operation: Callable[..., Any], piece: torch.Tensor, peer: int, tag: int) -> Any:
        if not 0 <= peer < self.size:
            raise ArgumentError(f"rank {self.rank} was asked to exchange with rank {peer} of {self.size}.")
        try:
            return operation([piece], peer, tag)
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


class GlooPending:
    """Transfers under way. `done()` is a plain look at memory.

    torch's point-to-point works report completion only from a blocking `wait` (2.13,
    ProcessGroupGloo.hpp, SendWork and RecvWork), so waiting threads do that and count here.

    Args:
        peers: how many peers are still to be heard of.
        keep: what must stay alive until then.
    """

    def __init__(self, peers: int, keep: Any) -> None:
        self._left = peers
        self._keep = keep
        self._error: RingError | None = None
        self._lock = threading.Lock()

    def done(self) -> bool:
        """Whether all transfers are complete.

        Raises:
            PeerFailed: a peer's connection broke; others may still be under way.
        """
        if self._error is not None:
            raise self._error
        return self._left == 0

    def finish_one(self, error: RingError | None) -> None:
        """One peer's transfers ended, with an error or without."""
        with self._lock:
            self._error = self._error or error
            self._left -= 1
            if self._left == 0:
                self._keep = None


class _Waiters:
    """Threads that block on behalf of those who may only look; as many as there are waits at one time.

    Fewer would not do: a wait that finishes late must never hide one that finished early, or two ranks could wait
    for each other. Daemons, so that a wait that never ends cannot keep the process alive.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        self._threads: list[threading.Thread] = []

    @property
    def busy(self) -> bool:
        """Whether some thread still waits for a transfer."""
        with self._lock:
            return self._idle < len(self._threads)

    def submit(self, job: Callable[[], None]) -> None:
        with self._lock:
            if self._idle > 0:
                self._idle -= 1
            else:
                thread = threading.Thread(target=self._serve, name=f"ring:gloo-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
        self._jobs.put(job)

    def close(self) -> None:
        """End the threads. One that returned from gloo while Python ends would crash the process."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(timeout=2.0)

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            with self._lock:
                self._idle += 1


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
