"""Who this process is among the others, and the life of the job."""

from __future__ import annotations

import atexit
import contextlib
import io
import itertools
import os
import socket
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol

from ring_plugins.core import nccl
from ring_plugins.core.collectives.alone import AloneCommunicator
from ring_plugins.core.collectives.device import DeviceCommunicator, Streams
from ring_plugins.core.collectives.host import Gather, HostCommunicator
from ring_plugins.core.collectives.protocol import Communicator
from ring_plugins.core.errors import ArgumentError, LaunchError, NotInitialised, PeerFailed
from ring_plugins.core.launch import Connection, connect, detect, grow, rendezvous
from ring_plugins.core.place import find_place, virtual_nodes
from ring_plugins.core.presence import FAILED, Neighbourhood, Presence
from ring_plugins.core.shared_memory import domain, is_available
from ring_plugins.core.waiting import Wait

#: Seconds that a script has to notice a failed peer by itself before its process is ended.
_GRACE = 5.0


class Closable(Protocol):
    """What the world keeps of a communicator."""

    def close(self) -> None: ...


class World:
    """A connected job. Made by `init`; there is one a process at a time.

    Attributes:
        place: who this process is.
        communicator: all ranks, for the public functions.
        launcher: "mpi", "rendezvous", "grown" or "alone".
    """

    def __init__(self, connection: Connection, launcher: str) -> None:
        self._connection = connection
        self._pid = os.getpid()
        self.launcher = launcher
        rank = connection.rank
        own = Presence.create(rank) if connection.size > 1 and is_available() else None
        told = connection.gather([domain(), socket.gethostname(), list(own.address) if own else None])
        domains = [str(item[0]) for item in told]
        self._nodes = virtual_nodes(domains, os.environ.get("RING_VIRTUAL_NODES", ""))
        if len(set(self._nodes)) > 1 and connection.plane is None:
            raise LaunchError(
                "RING_VIRTUAL_NODES needs a launcher that carries data between hosts: mpirun or torchrun."
            )
        self.place = find_place(rank, self._nodes, [str(item[1]) for item in told])
        self._neighbourhood: Neighbourhood | None = None
        if own is not None:
            others = [
                Presence.open(tuple(item[2]), other)
                for other, item in enumerate(told)
                if other != rank and domains[other] == domains[rank]
            ]
            connection.gather(None)  # everyone has opened what it needs before anyone may leave
            self._neighbourhood = Neighbourhood(own, others)
        self._tags = itertools.count(rank, connection.size)  # no two ranks ever offer the same
        #: Those that somebody still uses, by the order in which they were made, which is the same on all ranks.
        self._communicators: weakref.WeakValueDictionary[int, Closable] = weakref.WeakValueDictionary()
        self._made = itertools.count()
        self._closed = threading.Event()
        self.communicator = self.new_communicator("ring", gather=connection.gather)
        if self.place.size > 1:
            threading.Thread(target=self._guard, name="ring:guard", daemon=True).start()

    def new_communicator(
        self, name: str, ranks: Sequence[int] | None = None, gather: Gather | None = None
    ) -> Communicator:
        """A communicator of its own, with its own order of operations; called by all members.

        Args:
            name: for texts.
            ranks: world ranks of the members, all by default.
            gather: how the members meet; by default over `communicator`, which needs all ranks.

        Raises:
            ArgumentError: `ranks` are not distinct ranks of this job.
        """
        size = self.place.size
        members = tuple(range(size)) if ranks is None else tuple(ranks)
        if len(set(members)) != len(members) or not all(0 <= rank < size for rank in members):
            raise ArgumentError(f"ranks={list(members)} are not distinct ranks of a job of {size}.")
        if gather is None:
            if len(members) != size:
                raise ArgumentError(
                    f"ranks={list(members)} is a part of the job; pass gather, so that its members can meet."
                )
            gather = self.communicator.all_gather_object
        if len(members) == 1:
            communicator: Communicator = AloneCommunicator(name, members[0])
        else:
            host = HostCommunicator(
                name,
                self.place.rank,
                self._nodes[self.place.rank],
                2 * next(self._tags),
                gather,
                self._neighbourhood,
                self._connection.plane,
            )
            communicator = host
        self._communicators[next(self._made)] = communicator
        return communicator

    def new_device_communicator(
        self,
        name: str,
        device: int,
        streams: Streams,
        ranks: Sequence[int] | None = None,
        gather: Gather | None = None,
    ) -> DeviceCommunicator:
        """As `new_communicator`, for the memory of one GPU a rank, by NCCL.

        Args:
            name, ranks, gather: as there.
            device: this rank's GPU, as the process numbers them.
            streams: the framework's.

        Raises:
            MissingDependency: there is no NCCL.
            DeviceError: there is no CUDA driver or no such GPU, or ranks would share one.
            MismatchError: the ranks have different releases of NCCL.
        """
        host = self.new_communicator(name, ranks, gather)
        wait = Wait(name, self._neighbourhood)
        communicator = DeviceCommunicator(name, device, host, streams, wait, nccl.load_nccl(), nccl.load_driver())
        self._communicators[next(self._made)] = communicator
        return communicator

    def _device_communicators(self) -> list[DeviceCommunicator]:
        return [one for one in self._communicators.copy().values() if isinstance(one, DeviceCommunicator)]

    # Failure --------------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this one failed, so that they stop waiting. The first call counts."""
        if self._neighbourhood is None or os.getpid() != self._pid:
            return
        if isinstance(error, PeerFailed):
            root, cause = error.rank, str(error).split(" failed: ", 1)[-1]
        else:
            root, cause = self.place.rank, _summary(error)
        self._neighbourhood.own.fail(root, cause)

    def abort(self) -> None:
        """End the whole job where the launcher offers that."""
        if self._connection.plane is not None:
            self._connection.plane.abort(1)

    def _guard(self) -> None:
        """End this process where its script cannot notice that the job is over.

        That is when a peer failed while the script computes or waits elsewhere, and when the launcher that
        should end all ranks was killed itself.
        """
        parent = os.getppid()
        launched = self.launcher in ("mpi", "grown") or "TORCHELASTIC_RUN_ID" in os.environ
        neighbourhood = self._neighbourhood
        while not self._closed.wait(0.25):
            if launched and parent != 1 and os.getppid() != parent:
                _say(f"rank {self.place.rank} ends because the launcher (process {parent}) is gone")
                os._exit(1)
            failure = neighbourhood.failure() if neighbourhood is not None else None
            for communicator in self._device_communicators():
                if failure is None:
                    communicator.watch()
                else:
                    communicator.abort(failure)  # a kernel that waits for a dead peer would never end
            if failure is None or neighbourhood is None or neighbourhood.told:
                continue
            if neighbourhood.own.state == FAILED and not neighbourhood.has_lost_a_process():
                continue  # ranks failed alike, and their scripts may be about to try again
            if not self._closed.wait(_GRACE) and not neighbourhood.told:
                self.fail(failure)
                _say(f"rank {self.place.rank} ends because {failure}")
                aborting = threading.Thread(target=self.abort, daemon=True)  # may block where MPI is broken too
                aborting.start()
                aborting.join(2.0)
                os._exit(1)

    def close(self) -> None:
        """Leave the job; peers that still wait for this rank are told."""
        if self._closed.is_set() or os.getpid() != self._pid:
            return
        self._closed.set()
        if self._neighbourhood is not None:
            self._neighbourhood.own.leave()
        for communicator in self._communicators.copy().values():
            communicator.close()


def _say(text: str) -> None:
    """Print for the user, where there is still somewhere to print to: the launcher's end of the pipe may be gone."""
    with contextlib.suppress(OSError, ValueError):
        print(f"ring_plugins: {text}", file=sys.stderr, flush=True)


def _summary(error: BaseException) -> str:
    """An error in a line, with the place in the user's code where it happened."""
    frames = traceback.extract_tb(error.__traceback__)
    text = "".join(traceback.format_exception_only(type(error), error)).strip()
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{text}{where}"


# The one world of this process ------------------------------------------------------------------------

_world: World | None = None
_generation = 0
_failed = False
_hooks_installed = False


def init(ranks: int | None = None) -> World:
    """Join the other processes of the job; calling it again changes nothing.

    Started by mpirun, torchrun, srun or another launcher it finds the ranks that were started. Started
    alone, the process stays alone, or starts itself `ranks - 1` times more.

    Args:
        ranks: how many processes a script that was started alone becomes.

    Returns:
        The world, which most users need not keep.

    Raises:
        ArgumentError: `ranks` is not a positive integer.
        LaunchError: the processes cannot find each other, or this one is a rank's forked child.
        MissingDependency: the launcher needs a package that is missing.
    """
    global _world, _generation
    if ranks is not None and (isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1):
        raise ArgumentError(f"ranks={ranks!r} is not a positive number of processes.")
    if _world is not None and _world._pid == os.getpid():
        return _world
    if _world is not None and _world.place.size > 1:
        raise LaunchError(
            f"this process was forked from rank {_world.place.rank} (a data loader's worker?); ring_plugins.init() "
            "belongs into the ranks themselves."
        )
    _install_hooks()
    connection = connect(ranks, _generation)
    _generation += 1
    kind = detect().kind
    launcher = "alone" if connection.size == 1 else "grown" if kind == "alone" else kind
    _world = World(connection, launcher)
    if launcher == "rendezvous" and connection.rank == 0:
        rendezvous.say_what_is_lost(_world.place.num_nodes)
    return _world


def shutdown() -> None:
    """Leave the job. `init` may be called again afterwards, by all ranks."""
    global _world
    world, _world = _world, None
    if world is not None and world._pid == os.getpid():
        world.close()
        world._connection.close()


def is_initialised() -> bool:
    """Whether `init` has been called in this process, and `shutdown` not since."""
    return _world is not None


def current() -> World:
    """The world that `init` made.

    Raises:
        NotInitialised: it has not been called.
    """
    if _world is None:
        raise NotInitialised("call ring_plugins.init() before this.")
    return _world


def consequence(world: World, error: BaseException) -> PeerFailed | None:
    """The failure of a peer that made this rank raise `error`, or None if the cause is its own.

    Frameworks wrap errors: torch's C++ turns what a collective raised into a RuntimeError with its text.
    """
    if isinstance(error, PeerFailed):
        return error
    neighbourhood = world._neighbourhood
    if neighbourhood is None or not neighbourhood.told or PeerFailed.__name__ not in str(error):
        return None
    return neighbourhood.failure()


def _install_hooks() -> None:
    """See to it that the other ranks learn how this process ends."""
    global _hooks_installed
    if _hooks_installed:
        return
    _hooks_installed = True
    atexit.register(_at_exit)
    os.register_at_fork(after_in_child=_forked)
    previous = sys.excepthook

    def uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        global _failed
        _failed = True
        world = _world
        if isinstance(sys.stderr, io.StringIO) and sys.__stderr__ is not None:
            # torch.distributed's own hook collects what is printed, to show it when this one returns;
            # but ending the job may end this process.
            sys.stderr = sys.__stderr__
        if world is None or world.place.size == 1 or world._pid != os.getpid():
            previous(kind, error, trace)
            return
        cause = consequence(world, error)
        if cause is not None:
            _say(f"rank {world.place.rank} ends because {cause}")
        else:
            _say(f"rank {world.place.rank} failed:")
            previous(kind, error, trace)
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        world.fail(cause or error)
        if cause is not None:
            time.sleep(0.2)  # let the rank that failed first end the job
        world.abort()

    sys.excepthook = uncaught


def _forked() -> None:
    """A forked child can read who its parent is among the ranks; it is none itself."""
    if _world is not None:
        for communicator in _world._communicators.copy().values():
            if isinstance(communicator, HostCommunicator):
                communicator.leave_to_parent()


def _at_exit() -> None:
    world = _world
    if world is not None and world._pid != os.getpid():
        return
    shutdown()
    status = grow.wait_for_children(_failed)
    if status and not _failed:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)
