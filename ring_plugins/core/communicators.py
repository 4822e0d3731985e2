"""The communicators of a job: how they are made, which of them are in use, and what this rank has done in them."""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import ArgumentError, name_ranks
from ring_plugins.core.base.log import logger
from ring_plugins.core.base.member import Members, Topology
from ring_plugins.core.collectives.api import Activity, Communicator, Statistics
from ring_plugins.core.collectives.host import Gather, HostCommunicator
from ring_plugins.core.collectives.pair_executor import PairExecutor
from ring_plugins.core.collectives.recovery import HostRecovery, JobRecovery
from ring_plugins.core.collectives.single import SingleCommunicator
from ring_plugins.core.collectives.validation import on_all_or_none
from ring_plugins.core.control.failure_detector import FailureDetector
from ring_plugins.core.control.mesh import Mesh
from ring_plugins.core.control.wait import Wait
from ring_plugins.core.gpu import load_driver, load_nccl
from ring_plugins.core.gpu.communicator import DeviceCommunicator
from ring_plugins.core.gpu.executor import DeviceExecutor
from ring_plugins.core.gpu.peers import choose_interface
from ring_plugins.core.gpu.recovery import GpuRecovery
from ring_plugins.core.gpu.stream import Streams
from ring_plugins.core.members.policy import FailurePolicy
from ring_plugins.core.net.transport import Transport

_NOTHING = contextlib.nullcontext()


class Communicators:
    """What of a `World` makes and keeps communicators.

    Args:
        policy: what the user chose for the loss of a rank.
        size: of the job at its start.
        transport: between hosts.

    Attributes:
        recovers: whether the job goes on when ranks are lost.
        replaces: whether other processes take the places of those.
        members: who all ranks are, and where.
        communicator: of all ranks, for the public functions.
        failure_detector: watches the other ranks; None in a job of one rank.
        made: how many communicators there have been.
    """

    members: Members
    communicator: Communicator[Any]
    #: Numbers that no other rank ever offers, for the tags of communicators; and how these recover.
    _tags: itertools.count[int]
    _recovery: JobRecovery | None

    def __init__(self, policy: FailurePolicy, size: int, transport: Transport | None) -> None:
        self._policy, self._transport = policy, transport
        self.recovers = policy.recovers and size > 1
        self.replaces = policy.replaces and self.recovers
        self.failure_detector: FailureDetector | None = None
        #: Those still in use, by creation order, which is the same on all ranks.
        self._communicators: weakref.WeakValueDictionary[int, Communicator[Any]] = weakref.WeakValueDictionary()
        self._recovering: weakref.WeakValueDictionary[int, HostCommunicator] = weakref.WeakValueDictionary()
        #: Of all ever made, so that work is not forgotten when its communicator is discarded.
        self._statistics: list[Statistics] = []
        self.made, self._keeping = 0, threading.Lock()
        self._of_devices: dict[int, DeviceCommunicator] = {}

    @property
    def topology(self) -> Topology:
        """Rank, host and counts of this process; new when ranks are lost."""
        return self.members.topology

    @property
    def world_ranks(self) -> tuple[int, ...]:
        """World ranks of the surviving members, in rank order."""
        return self.members.ranks

    def new_communicator(
        self,
        name: str,
        ranks: Sequence[int] | None = None,
        gather: Gather | None = None,
        check_gather: Callable[[], object] = lambda: None,
        executor: PairExecutor | None = None,
        within: Communicator[Any] | None = None,
        within_host: HostRecovery | None = None,
    ) -> Communicator:
        """A new communicator, whose operations have an order of their own; all members call this.

        Args:
            name: for messages.
            ranks: world ranks of the members, by default those of `within`.
            gather: returns every member's payload, in the order of `ranks`; by default over `within`.
            check_gather: raises if a member has been interrupted in `gather`, and does not come.
            executor: on whose thread the members meet; by default a new one.
            within: a communicator of the members, by default that of all ranks.
            within_host: how the members, of one host, go on without asking others; by default as those of `within`.

        Raises:
            ArgumentError: `ranks` are not distinct ranks of this job.
        """
        size = len(self.members.ranks)
        ranks = within.ranks if ranks is None and within is not None else ranks
        members = self.members.ranks if ranks is None else tuple(ranks)
        if len(set(members)) != len(members) or not set(members) <= set(self.members.ranks):
            raise ArgumentError(f"ranks={list(members)} are not distinct ranks of a job of {size}.")
        if within_host is None and isinstance(within, HostCommunicator):
            within_host = within.within_host
        is_refused = within_host is None and (within is None or members != within.ranks)
        if len(members) != size and is_refused:  # else `within` was not
            self.refuse_to_recover(f"{name}, a group of some ranks,")
        if gather is None and within is None and len(members) != size:
            raise ArgumentError(
                f"ranks={list(members)} are only some of the job's {size}; pass gather, which exchanges "
                "payloads among them."
            )
        if len(members) == 1 and (isinstance(within, SingleCommunicator) or not self.replaces):
            communicator: Communicator = SingleCommunicator(name, members[0])
        else:
            if gather is None:
                within = within or self.communicator
                gather, check_gather = within.all_gather_object, within.check
            with on_all_or_none(within, f"the construction of {name}") if within is not None else _NOTHING:
                communicator = made = HostCommunicator(
                    name,
                    self.members.own,
                    self.members.here.node,
                    2 * next(self._tags),
                    gather,
                    self.failure_detector,
                    self._transport,
                    check_gather,
                    executor,
                    within_host or self._recovery,
                )
            if made.recovers:
                self._recovering[self.made] = made
        self._keep(communicator)
        return communicator

    def _keep(self, communicator: Communicator[Any]) -> None:
        with self._keeping:  # messages between two ranks make theirs on threads
            self._communicators[self.made] = communicator
            self._statistics.append(communicator.statistics)
            self.made += 1

    def recovery_within_host(self) -> HostRecovery:
        """How communicators of some ranks of this host go on, which are made with this, or within those that are."""
        assert self._recovery is not None
        recovery, mesh = self._recovery, self._mesh()
        assert mesh is not None
        return HostRecovery(recovery, lambda: self.members.view, mesh.dead, self._keep_within_host)

    def _keep_within_host(self, recovery: HostRecovery, lost: Sequence[int], view: int, losses: int) -> None:
        left: tuple[int, ...] = ()
        for communicator in self.recovering_communicators().values():
            if communicator.within_host is recovery:
                communicator.keep(left := tuple(sorted({*communicator.ranks} - {*lost})), view, losses)
        mesh = self._mesh()
        if lost and mesh is not None and self.members.own == left[0]:
            found = mesh.members_lost(lost)
            logger.warning(f"{found} Its host goes on with {name_ranks(left)}, and tells the others later.")

    def refuse_to_recover(self, what: str) -> None:
        """Reject what would not survive the loss of a rank, in a job that is to go on after one.

        Args:
            what: begins the error's text, "Keras" for example.

        Raises:
            ArgumentError: on_failure is "continue".
        """
        if self.recovers:
            raise ArgumentError(
                f'{what} does not support on_failure="{self._policy.on_failure}" yet: leave it out, and unset '
                f"{config.ON_FAILURE.name}. The first rank that fails then ends the job."
            )

    def new_device_communicator(
        self,
        name: str,
        device: int,
        streams: Streams,
        ranks: Sequence[int] | None = None,
        gather: Gather | None = None,
        own_stream: bool = False,
        within: Communicator[Any] | None = None,
    ) -> DeviceCommunicator:
        """A new NCCL communicator for GPU memory, one GPU for each rank; all members call this.

        Args:
            name, ranks, gather, within: as for `new_communicator`.
            device: this rank's GPU, as the process numbers them.
            streams: the framework's.
            own_stream: whether operations of other communicators may overtake its own.

        Raises:
            ArgumentError: the job goes on when ranks are lost, and NCCL_COMM_BLOCKING=1.
            MissingDependency: there is no NCCL.
            DeviceError: there is no CUDA driver or no such GPU, or ranks would share one.
            MismatchError: the ranks have different releases of NCCL.
        """
        host = self.new_communicator(name, ranks, gather, within=within)
        if isinstance(host, HostCommunicator) and host.within_host is not None:
            self.refuse_to_recover(f"{name} on several GPUs of a host, while hosts exchange weights,")
        wait = Wait(name, self.failure_detector)
        choose_interface()
        recovers = isinstance(host, HostCommunicator) and host.recovers
        with on_all_or_none(host, f"{name}: loading NCCL and the CUDA driver", is_alone=True):
            if recovers:
                self._policy.check_nccl()
            nccl, driver = load_nccl(), load_driver()
        executor = DeviceExecutor(name, device, host, streams, wait, nccl, driver, own_stream, blocks=not recovers)
        recovery = None
        if isinstance(host, HostCommunicator) and recovers:
            recovery = GpuRecovery(executor, host, self._mesh, lambda: self.members.view)
        communicator = DeviceCommunicator(executor, recovery)
        self._keep(communicator)
        return communicator

    def _mesh(self) -> Mesh | None:
        return self.failure_detector.mesh if self.failure_detector is not None else None

    def device_communicator(self, device: int, streams: Streams) -> DeviceCommunicator:
        """A communicator of all ranks for the public functions; the first call, which all ranks make, creates it."""
        if device not in self._of_devices:
            self._of_devices[device] = self.new_device_communicator("ring on GPUs", device, streams)
        return self._of_devices[device]

    def in_use(self) -> list[Communicator[Any]]:
        """The communicators still in use, for any thread."""
        while True:
            try:
                return list(self._communicators.values())
            except RuntimeError:  # another thread has just added one
                pass

    def device_executors(self) -> list[DeviceExecutor]:
        """Those of the GPU communicators still in use."""
        return [one.executor for one in self.in_use() if isinstance(one, DeviceCommunicator)]

    def activities(self) -> list[Activity]:
        """The last operation of this rank in each of its communicators."""
        activities = [communicator.activity() for communicator in self.in_use()]
        return [activity for activity in activities if activity is not None]

    def recovering_communicators(self) -> dict[int, HostCommunicator]:
        """Those in use that go on when members are lost, by creation order."""
        return {key: one for key, one in sorted(self._recovering.items()) if one.groups.node is not None}

    def operations(self) -> int:
        """How many operations this rank has finished, also with communicators that are gone."""
        return sum(statistics.operations for statistics in self._statistics)

    def has_communicated(self) -> bool:
        """Whether this rank has begun any operation; any thread may call it."""
        return bool(self.activities()) or self.operations() > 0
