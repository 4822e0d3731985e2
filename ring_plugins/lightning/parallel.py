"""What the strategies for Trainer and Fabric have in common: ranks, devices, and everything but gradients."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from ring_plugins.core import world
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.lightning.adoption import move_to_spelling_of
from ring_plugins.lightning.environment import RingEnvironment, announce_rank, follow_launcher
from ring_plugins.lightning.failure import peers_were_told
from ring_plugins.lightning.launcher import join_world
from ring_plugins.lightning.process_group import ensure_process_group
from ring_plugins.lightning.reduction import all_gather, all_reduce
from ring_plugins.lightning.tree import ParallelStrategy, Tree

T = TypeVar("T")
StartMethod = Literal["popen", "fork", "forkserver", "spawn"]


class RingParallelLogic(ParallelStrategy):  # type: ignore[misc]  # see `tree.ParallelStrategy`
    """Ranks, devices and collectives of one process."""

    tree: ClassVar[Tree]
    accelerator_type: ClassVar[type]

    cluster_environment: RingEnvironment
    parallel_devices: list[torch.device] | None
    world_size: int
    global_rank: int
    local_rank: int
    arguments: Mapping[str, Any]  # what the user gave, for the twin of the other spelling (see `adoption`)
    _start_method: StartMethod | None
    _timeout: timedelta | None
    _num_nodes = 1

    @property
    def accelerator(self) -> Any:
        """What Lightning hands over first; see `adoption`."""
        return self._accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Any) -> None:
        move_to_spelling_of(accelerator, self)
        self._accelerator = accelerator

    @property
    def num_nodes(self) -> int:
        """The launcher's number of nodes, or what the user asked for while nothing is started."""
        started = self.cluster_environment.creates_processes_externally
        return self.cluster_environment.num_nodes() if started else self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        """Ranks on this node."""
        return len(self.parallel_devices or ())

    @property
    @override
    def root_device(self) -> torch.device:
        devices = self.parallel_devices
        if not devices or devices[0].type == "cpu":
            return torch.device("cpu")
        return devices[self.local_rank]

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Stack the tensors of all ranks along a new first dimension; at world size 1 return `tensor` itself."""
        return tensor if self.world_size == 1 else all_gather(tensor, group, sync_grads)

    @override
    def barrier(self, name: str | None = None) -> None:
        """Wait until every rank has come here; return at once when a failure made that impossible."""
        if world.is_initialized() and not peers_were_told():
            world.current().communicator.barrier()

    @override
    def broadcast(self, obj: T, src: int = 0) -> T:
        """The object (pickled) of rank `src` on every rank."""
        if not world.is_initialized() or self.world_size == 1 or peers_were_told():
            return obj
        result: T = world.current().communicator.broadcast_object(obj, root=src)
        return result

    def _reduce(self, tensor: Any, group: Any | None, reduce_op: Any) -> Any:
        is_alone = self.world_size == 1 or peers_were_told()
        return tensor if is_alone or not isinstance(tensor, Tensor) else all_reduce(tensor, group, reduce_op)

    def _learn_ranks(self) -> None:
        """Called by Lightning when it has handed over devices and number of nodes, before anything is started."""
        devices = self.parallel_devices or [torch.device("cpu")]
        environment = self.cluster_environment
        environment.set_world_size(len(devices))
        if environment.creates_processes_externally:
            follow_launcher(environment, len(devices), self._num_nodes)
            self.parallel_devices = devices_of_node(devices, environment.local_world_size())
        elif self._num_nodes > 1:
            raise ArgumentError(
                f"You set `num_nodes={self._num_nodes}`, but this process was started alone, and RingStrategy starts"
                " processes on its own host only. Start the job with mpirun, torchrun or srun, which reach the others."
            )
        announce_rank(self.global_rank)

    def _choose_launcher(self, launcher: type, multiprocessing_launcher: Any) -> Any:
        """None where this is the only rank; workers are forked in a notebook, where there is no script to run again."""
        if self.world_size == 1:
            return None
        start_method = self._start_method or ("fork" if self.tree.is_interactive else "popen")
        if start_method == "popen" or self.cluster_environment.creates_processes_externally:
            return launcher(self.cluster_environment)
        return multiprocessing_launcher(self, start_method=start_method)

    def _join(self) -> None:
        """Bring up what the ranks need to talk; everything here exists once in a process, whatever it runs later."""
        environment = self.cluster_environment
        if not environment.creates_processes_externally and self.world_size > 1:
            environment.become_worker()
        own_world = join_world(environment)
        if own_world.topology.size == 1:
            return
        if self.root_device.type not in ("cpu", "cuda"):
            raise ArgumentError(
                f"The accelerator chose {self.root_device}, but ring_plugins averages gradients in the memory of CPUs"
                " and CUDA GPUs only. Pass `accelerator='cpu'` or `accelerator='gpu'`."
            )
        ensure_process_group(own_world, self._timeout)


def devices_of_node(devices: list[torch.device], local_world_size: int) -> list[torch.device]:
    """One device for each rank of this node, by local rank.

    Args:
        devices: What the Trainer made of its `devices` argument.
        local_world_size: How many ranks there are on this node.

    Raises:
        ArgumentError: If there are fewer GPUs than ranks.
    """
    if len(devices) == local_world_size:
        return devices
    kind = devices[0].type
    if kind == "cpu":
        return devices[:1] * local_world_size
    visible = getattr(torch, kind).device_count()
    if visible == 1:
        # Each rank was given its own by the launcher, which makes it the first of each; or all share it on purpose.
        return devices[:1] * local_world_size
    if visible < local_world_size:
        raise ArgumentError(
            f"The launcher started {local_world_size} processes on this node, which has {visible} {kind} devices."
            f" Start {visible}, or pass `accelerator='cpu'`."
        )
    return [torch.device(kind, index) for index in range(local_world_size)]
