"""Base of the strategies for Trainer and Fabric: ranks, devices and collectives, everything but gradients."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, ClassVar, Literal, TypeVar, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from ring_plugins.core import world
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.collectives.fingerprint import purpose
from ring_plugins.core.groups import Group, communicator_of
from ring_plugins.lightning.environment import RingEnvironment, set_rank_zero, warn_about_launcher
from ring_plugins.lightning.launcher import RingLauncher, has_failed, join_world
from ring_plugins.lightning.process_group import (
    all_gather,
    all_reduce,
    broadcast_object,
    ensure_process_group,
    leave_process_group,
    reduced_if_all_had,
)
from ring_plugins.observe.averaging_check import averages_seldom
from ring_plugins.torch.sharded_optimizer import Shard, shard_optimizer

T = TypeVar("T")
StartMethod = Literal["popen", "fork", "forkserver", "spawn"]
_ARGUMENTS_OF_LIGHTNING = ("accelerator", "parallel_devices", "checkpoint_io", "precision", "precision_plugin")
_AVERAGER_ARGUMENTS = ("bucket_bytes", "sparse", "autotune", "compression", "error_feedback", "overlap", "group")

#: Arguments of other data-parallel strategies, with what to do instead.
_ARGUMENTS_OF_OTHERS = {
    "find_unused_parameters": "leave it out: parameters without gradients need no option",
    "static_graph": "leave it out: nothing depends on the graph",
    "gradient_as_bucket_view": "leave it out: small gradients always are views of their bucket",
    "bucket_cap_mb": "pass bucket_bytes=25 * 2**20 for 25 MiB",
    "ddp_comm_hook": "pass compression='fp16' or 'bf16' to send gradients in 16 bits; other hooks are not supported",
    "process_group_backend": "leave it out: GPUs use NCCL, and CPUs shared memory and sockets",
    "model_averaging_period": "gradients are averaged in every step; RingStrategy(sync_every=64) averages weights",
    "num_nodes": "pass it to the Trainer or Fabric, and start one process a rank by mpirun, torchrun or srun",
    "sync_batchnorm": "pass it to the Trainer: Trainer(sync_batchnorm=True), on CPUs too",
    **dict.fromkeys(
        ("devices", "ranks", "num_ranks", "num_processes", "world_size"),
        "the number of ranks is the launcher's, or that of Trainer(devices=2) or Fabric(devices=2)",
    ),
}
_ARGUMENTS_OF_OTHERS["on_failure"] = _ARGUMENTS_OF_OTHERS["min_ranks"] = _ARGUMENTS_OF_OTHERS["max_ranks"] = (
    "leave it out: jobs of Fabric end with the first rank that is lost. Those of a Trainer with RingStrategy, and of "
    "plain PyTorch loops with ring_plugins.torch, can go on"
)
_ARGUMENTS_OF_OTHERS["global_batch_size"] = _ARGUMENTS_OF_OTHERS["exact"] = (
    "the loop is yours in Fabric: iterate over fabric.strategy.global_batches(loader, model, global_batch_size=64), "
    "with a loader that setup_dataloaders has not seen"
)
_ARGUMENTS_OF_OTHERS["ddp_comm_state"] = _ARGUMENTS_OF_OTHERS["ddp_comm_wrapper"] = _ARGUMENTS_OF_OTHERS[
    "ddp_comm_hook"
]

#: The GPU of this process in a job that goes on when ranks are lost: its local rank changes, its GPU does not.
_kept: list[torch.device] = []

#: Stands for Lightning's ``ParallelStrategy``, which `packages` puts after our logic in the order of base classes. To a
#: type checker it is Any, since there are two such classes.
ParallelStrategy: Any = object


class RingParallelLogic(ParallelStrategy):  # type: ignore[misc]  # see `ParallelStrategy`
    """Ranks, devices and collectives of one process."""

    package: ClassVar[str]  # what a user imports, "lightning" or "pytorch_lightning"
    is_interactive: ClassVar[bool]  # whether Lightning believes it runs in a notebook or at a prompt
    reset_seed: ClassVar[Any]  # seeds this process again, as `seed_everything` did here or in its parent
    accelerator_type: ClassVar[type]
    ring_launcher: ClassVar[type[RingLauncher]] = RingLauncher
    lightnings_launcher: ClassVar[Callable[..., Any]]  # starts workers by fork or spawn, as notebooks need it
    recovers: ClassVar[bool] = False  # whether it supports on_failure="continue" and "replace"

    cluster_environment: RingEnvironment
    parallel_devices: list[torch.device] | None
    world_size: int
    global_rank: int
    local_rank: int
    arguments: Mapping[str, Any]  # the user's, to construct the other package's strategy from (see `packages`)
    _averager_arguments: dict[str, Any]
    _start_method: StartMethod | None
    _timeout: timedelta | None
    _shard: Shard
    _num_nodes = 1
    _device: torch.device | None = None
    _is_catching_up = False

    def _construct(self, arguments: Mapping[str, Any]) -> None:
        """Keep the constructor's arguments, and construct Lightning's strategy from those that it has itself.

        Raises:
            ArgumentError: there are some in `unknown`, or one has a type that fails only once the ranks are started.
        """
        strategy = f"Ring{'Fabric' if 'precision' in arguments else ''}Strategy"
        self.arguments = {
            name: value for name, value in arguments.items() if name not in ("self", "__class__", "unknown")
        }
        for name, value in arguments["unknown"].items():
            similar = difflib.get_close_matches(name, self.arguments, 1) or [f"one of {', '.join(self.arguments)}"]
            remedy = _ARGUMENTS_OF_OTHERS.get(name, f"did you mean {similar[0]}?")
            raise ArgumentError(f"{strategy} has no argument {name} (given: {value!r}): {remedy}")
        environment, timeout = arguments["cluster_environment"], arguments["timeout"]
        slurm = environment if hasattr(environment, "auto_requeue") else None
        environment = RingEnvironment() if slurm is not None else environment
        if not isinstance(environment, RingEnvironment | None):
            raise ArgumentError(
                f"{strategy}(cluster_environment={type(environment).__name__}()) has to be a RingEnvironment. Leave it "
                "out: RingEnvironment finds mpirun, torchrun, SLURM or a plain start by itself."
            )
        if isinstance(accelerator := arguments["accelerator"], int | str):
            raise ArgumentError(
                f"{strategy}(accelerator={accelerator!r}) has to be an Accelerator. Leave it out, and give the Trainer "
                'or Fabric accelerator="cpu" or "gpu", and devices=2 for two ranks.'
            )
        if arguments["start_method"] not in (None, *get_args(StartMethod)):
            raise ArgumentError(
                f"{strategy}(start_method={arguments['start_method']!r}) has to be one of "
                f"{', '.join(map(repr, get_args(StartMethod)))}, or left out."
            )
        if not isinstance(timeout, timedelta | None):
            raise ArgumentError(f"{strategy}(timeout={timeout!r}) has to be a timedelta, such as timedelta(minutes=5).")
        self._averager_arguments = {name: arguments[name] for name in _AVERAGER_ARGUMENTS}
        self._shard = arguments["shard_optimizer"]
        self._timeout, self._start_method = arguments["timeout"], arguments["start_method"]
        self.group: Group | None = arguments["group"]
        own = communicator_of(self.group) if self.group is not None else None  # raises on a rank outside
        lightnings = {name: arguments[name] for name in _ARGUMENTS_OF_LIGHTNING if name in arguments}
        super().__init__(**lightnings, cluster_environment=environment or RingEnvironment())
        self.cluster_environment.slurm = slurm
        if self.group is not None and own is not None:
            self.cluster_environment.set_group(self.group)

    @property
    def num_nodes(self) -> int:
        """The launcher's number of nodes, or what the user asked for while nothing is started."""
        started = self.cluster_environment.creates_processes_externally
        return self.cluster_environment.num_nodes() if started else self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def process_group_backend(self) -> str | None:
        """The backend of torch.distributed, None while there is no process group, as with ``DDPStrategy``."""
        return str(dist.get_backend()) if dist.is_initialized() else None

    @property
    def first_rank(self) -> int:
        """The rank of the job whose weights and buffers the others get."""
        return 0 if self.group is None else self.group.ranks[0]

    @property
    def num_processes(self) -> int:
        """Ranks on this node."""
        return len(self.parallel_devices or ())

    @property
    @override
    def root_device(self) -> torch.device:
        if self._device is not None:  # ranks that are renumbered after a loss stay on their GPUs
            return self._device
        devices = self.parallel_devices
        if not devices or devices[0].type == "cpu":
            return torch.device("cpu")
        if _kept and world.is_initialized() and world.current().elastic.view:  # of an earlier Trainer
            return _kept[0]
        # Not the place in a group: others of this node have GPUs, too.
        return devices[self.local_rank if self.group is None else world.current().topology.local_rank]

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        if world.is_initialized() and world.current().replaces:
            shard, shards = world.current().shard
            return {"num_replicas": shards, "rank": shard}
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @property
    @override
    def is_global_zero(self) -> bool:
        """Whether this is rank 0; not in a process that has yet to join the others, of which one acts as rank 0."""
        return self.global_rank == 0 and not world.is_joining()

    @property
    def _is_alone(self) -> bool:
        """Whether no other rank is to take part in what this process does, since it has yet to catch up with them."""
        return world.is_joining() or self._is_catching_up

    @contextmanager
    def as_if_alone(self) -> Iterator[None]:
        """Take part in no collective of Lightning's inside the context: each returns what it would if all had it."""
        self._is_catching_up = True
        try:
            yield
        finally:
            self._is_catching_up = False

    @override
    @purpose("strategy.all_gather")
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Any:
        """Stack the tensors of all ranks along a new first dimension; at world size 1 return `tensor` itself.

        If their sizes differ, it is a list of them, in rank order, each with its own size.
        """
        if self.world_size == 1:
            return tensor
        if self._is_alone:
            return torch.stack([tensor] * self.world_size)
        return all_gather(tensor, self.group if group is None else group, sync_grads)

    @override
    @purpose("strategy.barrier")
    def barrier(self, name: str | None = None) -> None:
        """Wait until every rank has called; return at once if a failure made that impossible."""
        if world.is_initialized() and not has_failed() and not self._is_alone:
            communicator_of(self.group).barrier()
            _tell_losses()

    @override
    def broadcast(self, obj: T, src: int = 0) -> T:
        """Return the object of rank `src`, pickled, on every rank."""
        if not world.is_initialized() or self.world_size == 1 or has_failed() or self._is_alone:
            return obj
        item = broadcast_object(obj, src, self.group)
        _tell_losses()
        return item

    @override
    @purpose("strategy.reduce")
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over all ranks; anything else is returned as it is. See `process_group.all_reduce`."""
        # As Lightning's own strategies do, before the processes are launched: a callback may log in ``setup``.
        is_single = self.world_size == 1 or has_failed() or not (self._recovers or dist.is_initialized())
        if is_single or not isinstance(tensor, Tensor):
            return tensor
        if self._is_alone:
            return reduced_if_all_had(tensor, reduce_op, self.world_size)
        return all_reduce(tensor, self.group if group is None else group, reduce_op)

    all_reduce = reduce  # Fabric's name for it

    @property
    def _recovers(self) -> bool:
        """Whether the job goes on when ranks are lost."""
        return world.is_initialized() and world.current().recovers

    def _sharded(self, optimizers: Sequence[Any], named_parameters: Iterable[tuple[str, Tensor]] = ()) -> list[Any]:
        """The optimizers, sharded if the user wants that; collective then."""
        if not self._shard:
            return list(optimizers)
        named = list(named_parameters)
        return [shard_optimizer(optimizer, self._shard, named, self.group) for optimizer in optimizers]

    def set_world_ranks(self) -> None:
        """Determine ranks and devices; Lightning has set devices and number of nodes, and nothing is started yet.

        Called by name: by the Trainer's constructor (accelerator_connector.py:530) and Fabric's (connector.py:518).
        """
        devices = self.parallel_devices or [torch.device("cpu")]
        environment = self.cluster_environment
        environment.set_world_size(len(devices))
        if self.group is not None:
            self.parallel_devices = devices_of_node(devices, world.current().topology.local_size)
        elif environment.creates_processes_externally:
            warn_about_launcher(environment, len(devices), self._num_nodes)
            self.parallel_devices = devices_of_node(devices, environment.local_world_size())
        elif self._num_nodes > 1:
            raise ArgumentError(
                f"You set `num_nodes={self._num_nodes}`, but this process was started alone, and RingStrategy starts"
                " processes on its own host only. Start the job with mpirun, torchrun or srun, which reach other hosts."
            )
        set_rank_zero(self.global_rank)

    _set_world_ranks = set_world_ranks

    @override
    def _configure_launcher(self) -> None:
        """None for one rank; Lightning's own launcher in a notebook, which has no script to run again; else ours."""
        self._launcher: Any = None
        if self.world_size == 1:
            return
        start_method = self._start_method or ("fork" if self.is_interactive else "popen")
        if start_method == "popen" or self.cluster_environment.creates_processes_externally:
            self._launcher = self.ring_launcher(self.cluster_environment)
        else:
            self._launcher = self.lightnings_launcher(self, start_method=start_method)

    @override
    def setup_environment(self) -> None:
        """Bring up the world and the process group; a process has one of each, however many Trainers it runs."""
        super().setup_environment()
        environment = self.cluster_environment
        if not environment.creates_processes_externally and self.world_size > 1:
            environment.become_worker()
        own_world = join_world(environment)
        self._device = self.root_device
        _kept[:] = [self._device] if own_world.recovers and self._device.type != "cpu" else _kept
        if self.world_size == 1:
            if self.group is not None:
                leave_process_group(self.group)  # of an earlier Trainer, in which torchmetrics would synchronize
                averages_seldom()  # this rank trains alone, as it was told to
            return
        if self.root_device.type not in ("cpu", "cuda"):
            raise ArgumentError(
                f"The accelerator chose {self.root_device}, but ring_plugins averages gradients only in the memory of"
                " CPUs and CUDA GPUs. Pass `accelerator='cpu'` or `accelerator='gpu'`."
            )
        if own_world.recovers and not self.recovers:
            own_world.refuse_to_recover("RingFabricStrategy")
        if not own_world.recovers:  # a process group would keep its number of ranks
            ensure_process_group(self._timeout, self.group)


def _tell_losses() -> None:
    if world.current().elastic.changes.untold:
        world.current().elastic.tell_changes()


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
        # The launcher made one GPU visible to each rank, where it has index 0; or all ranks share one on purpose.
        return devices[:1] * local_world_size
    if visible < local_world_size:
        raise ArgumentError(
            f"The launcher started {local_world_size} processes on this node, which has {visible} {kind} devices."
            f" Start {visible}, or pass `accelerator='cpu'`."
        )
    return [torch.device(kind, index) for index in range(local_world_size)]
