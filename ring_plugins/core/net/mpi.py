"""The plane over MPI, by mpi4py: the only file that calls MPI."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, ClassVar

from ring_plugins.core.base.errors import MissingDependency, PeerFailed, RingError, name_ranks
from ring_plugins.core.base.types import Bytes

#: MPI counts are 32-bit before MPI 4.
_LARGEST = 1 << 30

#: Seconds that MPI may take to end after an error left transfers unfinished.
_END = 10
_INSTALL = 'pip install "ring_plugins[mpi]"'


def load() -> Any:
    """mpi4py's MPI module, initialising MPI on first use.

    Raises:
        MissingDependency: mpi4py or libmpi is missing; the text says which pip command adds it.
    """
    os.environ.setdefault("OMPI_MCA_osc", "^ucx")  # prints a harmless error otherwise; we use no windows
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise MissingDependency(
            f"the job was started by an MPI launcher, but mpi4py is not installed ({error}): {_INSTALL}"
        ) from error
    except RuntimeError as error:  # what mpi4py raises when it finds no libmpi
        raise MissingDependency(
            f"mpi4py is installed, but finds no MPI library ({str(error).splitlines()[0]}). Load your site's MPI, "
            f"or add one by pip: {_INSTALL}"
        ) from error
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    atexit.unregister(_bound_the_end)
    atexit.register(_bound_the_end)
    return MPI


def _bound_the_end() -> None:
    """MPI ends after Python, and may wait for ever for transfers that an error left unfinished: SIGALRM ends that."""
    if _Transfers.some_were_left or any(transfers.is_under_way for transfers in _Transfers.all):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_END)


def world_size_if_initialized() -> int:
    """Size of MPI's world if this process has initialised MPI by itself, else 0; never starts MPI."""
    module = sys.modules.get("mpi4py.MPI")
    if module is None or not module.Is_initialized() or module.Is_finalized():
        return 0
    size: int = module.COMM_WORLD.Get_size()
    return size


class _Transfers:
    """Requests of one exchange.

    MPI may read what it was given to send, and write to where it receives, until the process is over, which is after
    Python has freed all else (mpi4py finalises MPI last). So memory of transfers that an error left unfinished is never
    given back.
    """

    all: ClassVar[weakref.WeakSet[_Transfers]] = weakref.WeakSet()
    some_were_left: ClassVar[bool] = False

    def __init__(self, transport: MpiTransport, peers: Sequence[int], keep: Any) -> None:
        self._transport, self._peers, self._keep = transport, peers, keep
        self._requests: list[Any] = []
        self._failure: PeerFailed | None = None

    def start(self, begin: Iterable[Callable[[], Any]]) -> None:
        """Begin transfers; a failure is told by `done`, to whoever waits."""
        self.all.add(self)
        try:
            with self._transport.exclusive:
                self._requests.extend(one() for one in begin)
        except self._transport.mpi.Exception as error:
            self._fail(error)

    def done(self) -> bool:
        if self._failure is not None:
            raise self._failure
        if not self._requests:
            return True
        finished: bool
        try:
            with self._transport.exclusive:
                finished = self._transport.mpi.Request.Testall(self._requests)
        except self._transport.mpi.Exception as error:
            raise self._fail(error) from error
        if finished:
            self._requests, self._keep = [], None
            self.all.discard(self)
        return finished

    @property
    def is_under_way(self) -> bool:
        """Whether MPI still has something to move, as far as anyone asked."""
        return bool(self._requests)

    def _fail(self, error: Exception) -> PeerFailed:
        transport, them = self._transport, sorted(set(self._peers))
        self._failure = PeerFailed(
            f"MPI on rank {transport.rank} can exchange nothing with {name_ranks(them)} "
            f"any more ({error}). It ended, or its host did; look for the error that it "
            "printed.",
            them[0],
        )
        return self._failure

    def nap(self, seconds: float) -> None:
        time.sleep(seconds)

    def __del__(self) -> None:
        if self._requests:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object((self._requests, self._keep)))
            _Transfers.some_were_left = True


class MpiTransport:
    """A `Plane` over a duplicate of MPI's world communicator."""

    name = "mpi"

    def __init__(self) -> None:
        self.mpi = load()
        self._comm = self.mpi.COMM_WORLD.Dup()
        self._comm.Set_errhandler(self.mpi.ERRORS_RETURN)
        self.rank: int = self._comm.Get_rank()
        self.size: int = self._comm.Get_size()
        # A script that initialised MPI without full thread support gets its calls from us one at a time.
        together = self.mpi.Query_thread() == self.mpi.THREAD_MULTIPLE
        self.exclusive: Any = contextlib.nullcontext() if together else threading.Lock()

    @contextlib.contextmanager
    def errors(self) -> Any:
        try:
            yield
        except self.mpi.Exception as error:
            raise RingError(f"MPI on rank {self.rank}: {error}") from error

    def all_gather_object(self, item: Any) -> list[Any]:
        with self.exclusive, self.errors():
            items: list[Any] = self._comm.allgather(item)
        return items

    def connect(self, ranks: Sequence[int], tag: int) -> _Transfers:
        """MPI connects by itself."""
        return _Transfers(self, ranks, None)

    def disconnect(self, tag: int) -> None:
        """And keeps its connections for whoever comes next."""

    def exchange(
        self, outgoing: Sequence[tuple[int, Bytes]], incoming: Sequence[tuple[int, Bytes]], tag: int
    ) -> _Transfers:
        transfers = _Transfers(self, [rank for rank, _ in (*outgoing, *incoming)], (outgoing, incoming))
        ways = (self._comm.Irecv, incoming), (self._comm.Isend, outgoing)
        transfers.start(
            partial(move, [piece, self.mpi.BYTE], rank, tag)
            for move, messages in ways
            for rank, data in messages
            for piece in _pieces(data)
        )
        return transfers

    def progress(self, tag: int) -> None:
        """MPI moves what it can whenever it is asked something."""
        with self.exclusive, self.errors():
            self._comm.Iprobe(self.mpi.ANY_SOURCE, tag)

    def abort(self, code: int) -> None:
        """End every process of the job."""
        self.mpi.COMM_WORLD.Abort(code)

    def close(self) -> None:
        if not self.mpi.Is_finalized():
            self._comm.Free()


def _pieces(data: Bytes) -> list[Bytes]:
    if data.size <= _LARGEST:
        return [data]
    return [data[start : start + _LARGEST] for start in range(0, data.size, _LARGEST)]
