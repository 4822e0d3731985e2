"""This process's rank and node, as a Lightning ``ClusterEnvironment``."""

import multiprocessing.util
import os
import socket
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_only, rank_zero_warn

from ring_plugins.core import world
from ring_plugins.core.base import config
from ring_plugins.core.base.member import Topology
from ring_plugins.core.groups import Group
from ring_plugins.core.linux.interfaces import reserve_port
from ring_plugins.core.rendezvous import LaunchRecord, detect, record


class RingEnvironment:
    """A ``ClusterEnvironment`` (of `lightning` and of `pytorch_lightning`) that follows whatever started the process.

    Under mpirun, torchrun or SLURM, or in a process that another process of the job started, ranks come from there;
    once `ring_plugins.init()` has run, they come from the `World`. A process that was started alone is rank 0 of as
    many ranks as the Trainer asks for, and `RingLauncher` starts the others.

    Unlike Lightning's own environments it neither needs nor starts MPI.
    """

    def __init__(self) -> None:
        self._record = detect()
        self._wanted_world_size = 1
        #: The strategy's `on_failure`, `min_ranks` and `max_ranks`, for `ring_plugins.init()`.
        self.failure_policy: dict[str, Any] = {}
        #: The user's ``SLURMEnvironment``, if given, whose ``auto_requeue`` and ``requeue_signal`` count.
        self.slurm: Any = None
        #: The ranks that the strategy trains with, if not all; and this process's place among them.
        self.group: Group | None = None
        self._place: Topology | None = None
        self._main_port: int | None = None
        self._reserved: socket.socket | None = None

    def __getstate__(self) -> dict[str, Any]:
        """The state for a spawned worker: the port stays reserved in this process."""
        return {**vars(self), "_reserved": None, "_record": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _record=detect())

    def set_group(self, group: Group) -> None:
        """Follow a group instead of the job. Collective among its members."""
        here = world.current().topology
        nodes: list[int] = group.communicator.all_gather_object(here.node_rank, "RingStrategy(group=)")
        own, numbers = group.communicator.rank, list(dict.fromkeys(nodes))
        before, on_node = nodes[:own].count(here.node_rank), nodes.count(here.node_rank)
        self.group = group
        self._place = Topology(own, group.size, before, on_node, numbers.index(here.node_rank), len(numbers))

    @property
    def creates_processes_externally(self) -> bool:
        """Whether all ranks are running already, so that there is nothing to start."""
        return self.group is not None or _is_connected() or not self._record.launcher.is_none

    @property
    def main_address(self) -> str:
        """The address for the rendezvous of forked or spawned workers."""
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        """A port for the rendezvous of forked or spawned workers; other launches do not need it."""
        if self._main_port is None:
            if "MASTER_PORT" in os.environ:
                self._main_port = int(os.environ["MASTER_PORT"])
            else:
                self._reserved = reserve_port()  # until rank 0 listens, which may take as long as importing torch
                self._main_port = int(self._reserved.getsockname()[1])
        return self._main_port

    @staticmethod
    def detect() -> bool:
        """Whether it can be used: always."""
        return True

    def world_size(self) -> int:
        """The number of ranks, started or wanted."""
        return topology.size if (topology := self._topology()) else self._wanted_world_size

    def set_world_size(self, size: int) -> None:
        """Set how many ranks are wanted; ignored where a launcher has decided already."""
        self._wanted_world_size = size

    def global_rank(self) -> int:
        """The rank of this process."""
        return topology.rank if (topology := self._topology()) else 0

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the launcher assigns ranks."""

    def local_rank(self) -> int:
        """The rank of this process within its node."""
        return topology.local_rank if (topology := self._topology()) else 0

    def local_world_size(self) -> int:
        """The number of ranks on this node."""
        return topology.local_size if (topology := self._topology()) else self._wanted_world_size

    def node_rank(self) -> int:
        """The number of this node, from 0."""
        return topology.node_rank if (topology := self._topology()) else 0

    def num_nodes(self) -> int:
        """The number of nodes."""
        return topology.num_nodes if (topology := self._topology()) else 1

    def _topology(self) -> Topology | None:
        """This process's place in its job or group; None if it was started alone and has not started others yet."""
        if self._place is not None:
            return self._place
        if _is_connected():
            return world.current().topology
        if self._record.launcher.is_none:
            return None
        # Where a launcher's variables say too little, the ranks must connect to learn the rest.
        return _recorded_topology(self._record) or world.init(**self.failure_policy).topology

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Accept everything: `warn_about_launcher` handles settings that contradict the launcher."""

    def teardown(self) -> None:
        """Do nothing: the `World` outlives a Trainer."""

    def become_worker(self) -> None:
        """Tell `ring_plugins.init()` which rank this process is, which Lightning forked or spawned.

        Lightning gives such a process its number in LOCAL_RANK, and nothing else.
        """
        os.environ.update(
            RANK=os.environ["LOCAL_RANK"],
            WORLD_SIZE=str(self._wanted_world_size),
            LOCAL_WORLD_SIZE=str(self._wanted_world_size),
            MASTER_ADDR=self.main_address,
            MASTER_PORT=str(self.main_port),
        )
        os.environ.pop(config.EXPORTED.name, None)  # by a rank that has started this script
        record.caller = "Lightning"
        self._record = detect()
        # Such a process ends without running `atexit` functions, and must not look as if it had crashed.
        multiprocessing.util.Finalize(None, world.shutdown, exitpriority=0)


def _is_connected() -> bool:
    """Whether this process has connected to others. A world of size 1, made by an earlier Trainer, does not count."""
    return world.is_initialized() and not world.current().launcher.is_none


def _recorded_topology(found: LaunchRecord) -> Topology | None:
    """The topology that the launcher's variables give before the ranks have connected, without the hosts' names."""
    rank, size, local_rank, local_size = found.rank, found.size, found.local_rank, found.local_size
    if rank is None or size is None or local_rank is None or not local_size:
        return None
    # The node numbers are right if all nodes have the same number of ranks; only a warning and a log line use them.
    return Topology(rank, size, local_rank, local_size, rank // local_size, -(-size // local_size))


_warned: set[tuple[Any, ...]] = set()


def warn_about_launcher(environment: RingEnvironment, devices: int, num_nodes: int) -> None:
    """Warn, once, where ``Trainer(devices=..., num_nodes=...)`` contradicts the launcher, which wins.

    ``devices=1`` contradicts nothing: a script written for a launcher that starts every process means one device for
    each of them, and ``devices="auto"`` means 1 on the CPU. ``num_nodes=1`` is the Trainer's default.
    """
    asked = (devices, num_nodes)
    got = (environment.local_world_size(), environment.num_nodes())
    units = (("process", " on this node"), ("node", ""))
    for name, (unit, where), wanted, started in zip(("devices", "num_nodes"), units, asked, got, strict=True):
        if wanted in (1, started) or (name, wanted, started) in _warned:
            continue
        _warned.add((name, wanted, started))
        rank_zero_warn(
            f"You set `{name}={wanted}`, but the job was started with {count(started, unit)}{where}. RingStrategy"
            f" follows the launcher and trains on {count(environment.world_size(), 'rank')} in all. Set"
            f" `{name}={started}`, or start the job with a different number, to silence this warning."
        )


def count(number: int, noun: str) -> str:
    """``1 rank`` or ``2 ranks``."""
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


def set_rank_zero(rank: int | None = None) -> None:
    """Tell Lightning's ``rank_zero_only`` which rank this is, so that prints, warnings and loggers come from rank 0.

    Called at import, as early as possible. lightning_utilities 0.15.3, core/rank_zero.py:28, reads an attribute
    of the function itself; left alone, Lightning 2.6.6 fills it from RANK, LOCAL_RANK, SLURM_PROCID
    (fabric/utilities/rank_zero.py:35), which mpirun does not set and which inside a SLURM allocation say 0 on every
    rank.
    """
    if world.is_joining() or (config.JOINS.is_set() and not world.is_initialized()):
        rank = config.JOINS.get()  # one of the others acts as rank 0, and writes
    elif rank is None:
        rank = world.current().topology.rank if world.is_initialized() else detect().rank
    if rank is not None:
        rank_zero_only.rank = rank  # type: ignore[attr-defined]


set_rank_zero()
