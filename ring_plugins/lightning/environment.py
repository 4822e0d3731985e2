"""Where this process stands, told in Lightning's words."""

import multiprocessing.util
import os
from typing import Any, NamedTuple

from lightning_utilities.core.rank_zero import rank_zero_only, rank_zero_warn

from ring_plugins.core import world
from ring_plugins.core.linux.interfaces import free_port
from ring_plugins.core.rendezvous import LaunchRecord, detect
from ring_plugins.core.rendezvous.topology import Topology


class RingEnvironment:
    """A ``ClusterEnvironment`` (of `lightning` and of `pytorch_lightning`) that follows whatever started the process.

    Under mpirun, torchrun, SLURM, or in a process that another one of the job has started, ranks come from there; once
    `ring_plugins.init()` has run, they come from the `World`. A process that was started alone is rank 0 of as many
    ranks as the Trainer asks for, and the launcher starts the others.

    Unlike Lightning's own environments this one neither needs nor starts MPI to know that.
    """

    def __init__(self) -> None:
        self._record = detect()
        self._wanted_world_size = 1
        self._main_port: int | None = None

    @property
    def creates_processes_externally(self) -> bool:
        """Whether all ranks run already, so that there is nothing to start."""
        return _is_connected() or self._record.kind != "single"

    @property
    def main_address(self) -> str:
        """Where forked or spawned workers meet."""
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        """A port for forked or spawned workers to meet at; other launches bring their own way."""
        if self._main_port is None:
            self._main_port = int(os.environ["MASTER_PORT"]) if "MASTER_PORT" in os.environ else free_port()
        return self._main_port

    @staticmethod
    def detect() -> bool:
        """Whether it can be used: always."""
        return True

    def world_size(self) -> int:
        """The number of ranks, or how many there shall be."""
        return place.size if (place := self._place()) else self._wanted_world_size

    def set_world_size(self, size: int) -> None:
        """Say how many ranks there shall be; ignored where a launcher has decided already."""
        self._wanted_world_size = size

    def global_rank(self) -> int:
        """This process among all."""
        return place.rank if (place := self._place()) else 0

    def set_global_rank(self, rank: int) -> None:
        """Ignored: the rank is the launcher's to give."""

    def local_rank(self) -> int:
        """This process among those of its node."""
        return place.local_rank if (place := self._place()) else 0

    def local_world_size(self) -> int:
        """The number of ranks on this node."""
        return place.local_size if (place := self._place()) else self._wanted_world_size

    def node_rank(self) -> int:
        """This node among all."""
        return place.node_rank if (place := self._place()) else 0

    def num_nodes(self) -> int:
        """The number of nodes."""
        return place.num_nodes if (place := self._place()) else 1

    def _place(self) -> "Topology | _Foretold | None":
        """Where this process stands in its job, or None for one that was started alone and has not grown yet."""
        if _is_connected():
            return world.current().topology
        if self._record.kind == "single":
            return None
        # Some launchers say too little in the environment: only meeting the other ranks tells the rest.
        return _Foretold.by(self._record) or world.init().topology

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Nothing to object: differences are followed and warned about by `follow_launcher`."""

    def teardown(self) -> None:
        """Nothing to clean: the `World` outlives a Trainer."""

    def become_worker(self) -> None:
        """In a process that Lightning forked or spawned: leave word for `ring_plugins.init()` who it is.

        Lightning tells such a process its number in LOCAL_RANK, and nothing else.
        """
        os.environ.update(
            RANK=os.environ["LOCAL_RANK"],
            WORLD_SIZE=str(self._wanted_world_size),
            LOCAL_WORLD_SIZE=str(self._wanted_world_size),
            MASTER_ADDR=self.main_address,
            MASTER_PORT=str(self.main_port),
        )
        self._record = detect()
        # Such processes end without running what `atexit` holds, and must not look as if they had crashed.
        multiprocessing.util.Finalize(None, world.shutdown, exitpriority=0)


def _is_connected() -> bool:
    """Whether this process has met others. A world of one, made by an earlier Trainer, does not bind the next."""
    return world.is_initialized() and world.current().launcher != "single"


class _Foretold(NamedTuple):
    """A `Topology`, as far as the launcher's variables tell it before the ranks have met."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    node_rank: int
    num_nodes: int

    @classmethod
    def by(cls, record: LaunchRecord) -> "_Foretold | None":
        rank, size, local_rank, local_size = record.rank, record.size, record.local_rank, record.local_size
        if rank is None or size is None or local_rank is None or not local_size:
            return None
        # Right where all nodes have the same number of ranks; nothing but a warning and a log line depends on it.
        return cls(rank, size, local_rank, local_size, rank // local_size, -(-size // local_size))


_warned: set[tuple[Any, ...]] = set()


def follow_launcher(environment: RingEnvironment, devices: int, num_nodes: int) -> None:
    """Warn, once, where ``Trainer(devices=..., num_nodes=...)`` contradicts the launcher, which wins.

    ``devices=1`` contradicts nothing: a script written for a launcher that starts every process reads it as "one
    device for each", and ``devices="auto"`` means 1 on the CPU. ``num_nodes=1`` is the Trainer's default.
    """
    asked = (devices, num_nodes)
    got = (environment.local_world_size(), environment.num_nodes())
    for name, unit, wanted, started in zip(
        ("devices", "num_nodes"), ("processes on this node", "nodes"), asked, got, strict=True
    ):
        if wanted in (1, started) or (name, wanted, started) in _warned:
            continue
        _warned.add((name, wanted, started))
        rank_zero_warn(
            f"You set `{name}={wanted}`, but the job was started with {started} {unit}. RingStrategy follows the"
            f" launcher and trains on {environment.world_size()} ranks in all. Set `{name}={started}`, or start the"
            " job with another number, to be rid of this warning."
        )


def announce_rank(rank: int | None = None) -> None:
    """Tell Lightning's ``rank_zero_only`` which rank this is, so that prints, warnings and loggers come from rank 0.

    Called as soon as anything is known, at import. lightning_utilities 0.15.3, core/rank_zero.py:28, reads an attribute
    of the function itself; left alone, Lightning 2.6.6 fills it from RANK, LOCAL_RANK, SLURM_PROCID
    (fabric/utilities/rank_zero.py:35), which mpirun does not set and which inside a SLURM allocation say 0 on every
    rank.
    """
    if rank is None:
        rank = world.current().topology.rank if world.is_initialized() else detect().rank
    if rank is not None:
        rank_zero_only.rank = rank  # type: ignore[attr-defined]


announce_rank()
