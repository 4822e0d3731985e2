"""Moves bytes between hosts by MPI, through mpi4py. Only this file calls MPI."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import MissingDependency, PeerFailed, RingError
from ring_plugins.core.base.install import pip_command
from ring_plugins.core.base.types import Bytes
from ring_plugins.core.linux.process import loaded_libraries

#: Most bytes of a message: counts are 32-bit before MPI 4.
_LARGEST = 1 << 30
#: Seconds that MPI may take to finalize after an error left transfers unfinished.
_FINALIZE = 10

#: The process that finalizes MPI when it ends; 0 for none.
_finalizing_process = 0


def load() -> Any:
    """mpi4py's MPI module, initializing MPI on first use.

    Raises:
        MissingDependency: mpi4py or libmpi is missing; the text says which pip command adds it.
    """
    os.environ.setdefault("OMPI_MCA_osc", "^ucx")  # we use no windows, and its UCX variant prints a harmless error
    try:
        module = mpi_init_waits_for_every_rank()
    except ImportError as error:
        raise MissingDependency(
            f"the job was started by an MPI launcher, but mpi4py is not installed ({error}): {pip_command('mpi')}"
        ) from error
    except RuntimeError as error:  # what mpi4py raises when it finds no libmpi
        raise MissingDependency(
            f"mpi4py is installed, but finds no MPI library ({str(error).splitlines()[0]}). Load your site's MPI, "
            f"or add one by pip: {pip_command('mpi')}"
        ) from error
    if not module.Is_initialized():
        module.Init_thread(module.THREAD_MULTIPLE)
    atexit.unregister(_limit_finalize)
    atexit.register(_limit_finalize)
    return module


def mpi_init_waits_for_every_rank() -> Any:
    """mpi4py's MPI; importing it calls MPI_Init. The name explains a stack that is printed after a time-out."""
    global _finalizing_process
    if "mpi4py.MPI" not in sys.modules:
        import mpi4py

        if mpi4py.rc.initialize and mpi4py.rc.finalize is None:  # else the script finalizes MPI itself
            mpi4py.rc.finalize = False
            _finalizing_process = os.getpid()
    from mpi4py import MPI

    return MPI


def finalize() -> None:
    """Finalize MPI in place of mpi4py, which does so in a forked child, too, where it never returns."""
    module = sys.modules.get("mpi4py.MPI")
    if module is not None and os.getpid() == _finalizing_process and not module.Is_finalized():
        module.Finalize()


# On import, so that it is called after everything else that is registered to leave the job.
atexit.register(finalize)


def _limit_finalize() -> None:
    """Limit the time MPI takes to finalize: it may wait for ever for transfers that an error left unfinished."""
    if MpiRequest.some_were_dropped or any(request.missing() for request in MpiRequest.under_way):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_FINALIZE)


@contextlib.contextmanager
def every_rank_must_come_in_time() -> Iterator[None]:
    """End this process with its stack if the block takes longer than RING_START_TIMEOUT.

    MPI waits without a bound for ranks that have not called MPI_Init, and mpi4py holds the interpreter's lock.
    Only faulthandler's thread, which is written in C, can act then.
    """
    with contextlib.ExitStack() as stack:
        file = sys.stderr if sys.stderr is not None else stack.enter_context(open(os.devnull, "w"))
        try:
            faulthandler.dump_traceback_later(config.START_TIMEOUT.get(), exit=True, file=file)
        except (OSError, ValueError):  # a notebook's stderr has no descriptor
            file = stack.enter_context(open(os.devnull, "w"))
            faulthandler.dump_traceback_later(config.START_TIMEOUT.get(), exit=True, file=file)
        stack.callback(faulthandler.cancel_dump_traceback_later)
        yield


def world_size_if_initialized() -> int:
    """Size of MPI's world if the script has initialized MPI itself, else 0; never starts MPI."""
    module = sys.modules.get("mpi4py.MPI")
    if module is None or not module.Is_initialized() or module.Is_finalized():
        return 0
    size: int = module.COMM_WORLD.Get_size()
    return size


class MpiRequest:
    """Transfers of one exchange.

    MPI may access the buffers of a transfer until the process ends, which is after Python has freed everything else
    (mpi4py finalizes MPI last). So the buffers of transfers that an error left unfinished are never released.
    """

    under_way: ClassVar[weakref.WeakSet[MpiRequest]] = weakref.WeakSet()
    some_were_dropped: ClassVar[bool] = False

    def __init__(self, transport: MpiTransport, keep: Any) -> None:
        self._transport, self._keep = transport, keep
        #: By transfer, the peer and MPI's request.
        self._requests: list[tuple[int, Any]] = []
        self._failure: PeerFailed | None = None

    def start(self, transfers: Iterable[tuple[int, Callable[[], Any]]]) -> None:
        """Start transfers with peers; `done` raises if one fails here."""
        self.under_way.add(self)
        for peer, start in transfers:
            try:
                with self._transport.exclusive:
                    self._requests.append((peer, start()))
            except self._transport.mpi.Exception as error:
                self._fail(peer, error)
                return

    def done(self) -> bool:
        if self._failure is not None:
            raise self._failure
        left = []
        for peer, request in self._requests:  # one by one: an error of MPI_Testall does not say whose it is
            try:
                with self._transport.exclusive:
                    finished = request.Test()
            except self._transport.mpi.Exception as error:
                raise self._fail(peer, error) from error
            if not finished:
                left.append((peer, request))
        self._requests = left
        if not left:
            self._keep = None
            self.under_way.discard(self)
        return not left

    def missing(self) -> list[int]:
        return sorted({peer for peer, _ in self._requests})

    def nap(self, seconds: float) -> None:
        time.sleep(seconds)

    def _fail(self, peer: int, error: Exception) -> PeerFailed:
        self._failure = PeerFailed(
            f"MPI communication of rank {self._transport.rank} with rank {peer} failed ({error}). The rank or its "
            "host has probably ended; look for the error that it printed.",
            peer,
        )
        return self._failure

    def __del__(self) -> None:
        if self._requests:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object((self._requests, self._keep)))
            MpiRequest.some_were_dropped = True


class MpiTransport:
    """A `Transport` over a duplicate of MPI's world communicator."""

    name = "mpi"

    def __init__(self) -> None:
        self.mpi = load()
        self._comm = self.mpi.COMM_WORLD.Dup()
        self._comm.Set_errhandler(self.mpi.ERRORS_RETURN)
        self.rank: int = self._comm.Get_rank()
        self.size: int = self._comm.Get_size()
        # A script that initialized MPI without full thread support gets our calls one at a time.
        concurrent = self.mpi.Query_thread() == self.mpi.THREAD_MULTIPLE
        self.exclusive: Any = contextlib.nullcontext() if concurrent else threading.Lock()

    def all_gather_object(self, item: Any) -> list[Any]:
        """Every rank's picklable item in rank order."""
        with self.exclusive, self._errors():
            items: list[Any] = self._comm.allgather(item)
        return items

    def connect(self, ranks: Sequence[int], tag: int) -> MpiRequest:
        """Do nothing: MPI connects on demand."""
        return MpiRequest(self, None)

    def disconnect(self, tag: int) -> None:
        """Do nothing: MPI keeps its connections for other tags."""

    def abandon(self, tag: int) -> None:
        """Raise: jobs that would need it are rejected, see core/members/policy.py."""
        raise RingError("MPI cannot give up transfers that are under way.")

    def exchange(
        self, outgoing: Sequence[tuple[int, Bytes]], incoming: Sequence[tuple[int, Bytes]], tag: int
    ) -> MpiRequest:
        request = MpiRequest(self, (outgoing, incoming))
        directions = (self._comm.Irecv, incoming), (self._comm.Isend, outgoing)
        request.start(
            (rank, partial(start, [piece, self.mpi.BYTE], rank, tag))
            for start, messages in directions
            for rank, data in messages
            if data.size
            for piece in _pieces(data)
        )
        return request

    def is_receiving(self, rank: int, tag: int) -> bool:
        """False: MPI does not tell."""
        return False

    def progress(self, tag: int) -> None:
        """Probe for a message: MPI makes progress in any call."""
        with self.exclusive, self._errors():
            self._comm.Iprobe(self.mpi.ANY_SOURCE, tag)

    def abort(self, code: int) -> None:
        """End every process of the job."""
        _abort_without_banner(self.mpi, code)
        self.mpi.COMM_WORLD.Abort(code)

    def close(self) -> None:
        if not self.mpi.Is_finalized():
            self._comm.Free()

    @contextlib.contextmanager
    def _errors(self) -> Any:
        try:
            yield
        except self.mpi.Exception as error:
            raise RingError(f"MPI on rank {self.rank}: {error}") from error


def _abort_without_banner(module: Any, code: int) -> None:
    """End the job as Open MPI 5's MPI_Abort does, without the ten lines that it prints below the cause first.

    MPI_Abort prints its banner and then calls PMIx_Abort, a public function of the library by which ranks talk to
    mpirun. mpirun's own banner, which it prints once no rank is left, remains. Returns where MPI_Abort has to do it:
    under another MPI, if libpmix is not a library of its own, or if the user asked MPI_Abort for a stack or a delay.
    """
    name, version = module.get_vendor()
    if (
        name != "Open MPI"
        or version[0] < 5
        or any(variable.startswith("OMPI_MCA_mpi_abort") for variable in os.environ)
    ):
        return
    for path in loaded_libraries():
        if Path(path).name.startswith("libpmix.so"):
            pmix = ctypes.CDLL(path)
            if pmix.PMIx_Initialized() and pmix.PMIx_Abort(code, None, None, ctypes.c_size_t(0)) == 0:
                os._exit(code)  # as MPI_Abort does; what was printed has been flushed


def _pieces(data: Bytes) -> list[Bytes]:
    if data.size <= _LARGEST:
        return [data]
    return [data[start : start + _LARGEST] for start in range(0, data.size, _LARGEST)]
