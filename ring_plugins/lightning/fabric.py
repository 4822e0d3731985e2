"""The strategy for Fabric; `packages` derives it from either package's base class."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Literal, TypeVar

from torch.nn import Module
from torch.utils.data import DataLoader, SequentialSampler
from typing_extensions import override

from ring_plugins.core.arrays.codec import CodecName
from ring_plugins.core.base.arguments import check_calls
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.groups import Group
from ring_plugins.lightning.environment import RingEnvironment
from ring_plugins.lightning.launcher import RingFabricLauncher
from ring_plugins.lightning.local_updates import LocalTraining, local_settings
from ring_plugins.lightning.parallel import RingParallelLogic, StartMethod
from ring_plugins.lightning.shares import with_every_nth
from ring_plugins.lightning.strategy import DEFAULT_BUCKET_BYTES
from ring_plugins.torch.broadcast import broadcast_parameters
from ring_plugins.torch.global_batch import GlobalBatches
from ring_plugins.torch.gradients import GradientAverager
from ring_plugins.torch.join import join
from ring_plugins.torch.order import is_permutation, is_torchdatas, makes_batches
from ring_plugins.torch.sharded_optimizer import Shard, ShardedOptimizer
from ring_plugins.torch.skipped_steps import SkippableStep

T = TypeVar("T")


class RingFabricLogic(RingParallelLogic):
    """Data parallelism over `ring_plugins` for Fabric: ``Fabric(strategy=RingFabricStrategy())`` or ``"ring"``.

    Modules given to ``fabric.setup`` are not wrapped: hooks average their gradients in backward. See
    `RingStrategy` for how ranks are started and for the arguments.

    ``fabric.setup`` broadcasts buffers from rank 0 once; there is no wrapped forward that could do it again. A model
    whose running statistics must agree at all times needs synchronized batch norm.

    """

    ring_launcher = RingFabricLauncher

    def __init__(
        self,
        accelerator: Any | None = None,
        parallel_devices: list[Any] | None = None,
        cluster_environment: RingEnvironment | None = None,
        checkpoint_io: Any | None = None,
        precision: Any | None = None,
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        sparse: Literal["gather", "densify"] = "gather",
        autotune: bool | None = None,
        compression: CodecName | None = None,
        error_feedback: bool | None = None,
        shard_optimizer: Shard = False,
        overlap: bool | Literal["auto"] = "auto",
        timeout: timedelta | None = None,
        start_method: StartMethod | None = None,
        sync_every: int | str | None = None,
        outer: Literal["average", "nesterov"] | tuple[float, float] = "average",
        fragments: int = 1,
        delay: int = 0,
        group: Group | None = None,
        **unknown: Any,
    ) -> None:
        self._construct(locals())
        local_settings(self.arguments, strategy="RingFabricStrategy")  # raises if one is invalid
        #: By identity, as a module may define equality: each module that is set up, and what averages its gradients.
        self._averagers: dict[int, tuple[Module, GradientAverager]] = {}
        #: On one rank, where nothing is averaged otherwise: by identity of what `fabric.setup` returned.
        self._alone: dict[int, tuple[Module, GradientAverager]] = {}
        self._optimizers: list[Any] = []
        self._local: dict[int, LocalTraining] = {}  # by identity of modules; none if they average every step
        self._backward_sync_control: BackwardSyncControl = BackwardSyncControl(self)

    @property
    def waited_seconds(self) -> float:
        """Seconds in which this process waited for the gradients of its modules to be averaged."""
        return sum(averager.waited_seconds for _, averager in self._averagers.values())

    @override
    def setup_module(self, module: Module) -> Module:
        """Average the gradients of `module` from now on."""
        if self.world_size > 1:
            broadcast_parameters(module, self.first_rank, group=self.group)
            own: dict[str, Any] = {}
            if self.arguments["sync_every"] is not None:
                local = LocalTraining(module, self.arguments, self.group)
                if earlier := self._local.pop(id(module), None):
                    earlier.close()
                self._local[id(module)], own = local, local.averager_arguments
            averager = GradientAverager(module, **{**self._averager_arguments, **own})
            if before := self._averagers.pop(id(module), None):  # a module that is set up twice keeps the second
                before[1].close()
            self._averagers[id(module)] = module, averager
        return module

    def averager_of(self, module: Module, caller: str) -> GradientAverager:
        """The averager of `module`; the error names `caller`."""
        if id(module) not in self._averagers:
            raise ArgumentError(
                f"{caller}() was given a {type(module).__name__} that has not been set up. Did you forget to call"
                " `model = fabric.setup(model)`?"
            )
        return self._averagers[id(module)][1]

    def skip_step_on(self, module: Module, *exceptions: type[BaseException]) -> AbstractContextManager[SkippableStep]:
        """Let all ranks skip a step of the loop in which some rank raises one of these exceptions.

            with fabric.strategy.skip_step_on(model, torch.cuda.OutOfMemoryError) as step:
                optimizer.zero_grad()
                fabric.backward(loss(model, batch))
                optimizer.step()

        The block holds the whole step; see `GradientAverager.skip_step_on`.

        Args:
            module: What ``fabric.setup`` returned.
            exceptions: What to skip.

        Raises:
            ArgumentError: `module` has not been set up, or something else than exceptions was given.
        """
        # Fabric 2.6.6, fabric/wrappers.py:119: `setup` returns a wrapper of what `setup_module` returned.
        own: Module = getattr(module, "_forward_module", module)
        if self.world_size == 1:
            return GradientAverager(own, **self._averager_arguments).skip_step_on(*exceptions)
        context = self.averager_of(own, "skip_step_on").skip_step_on(*exceptions)
        return self._counting_skipped(context, self._local[id(own)]) if self._local else context

    @contextmanager
    def _counting_skipped(
        self, context: AbstractContextManager[SkippableStep], local: LocalTraining
    ) -> Iterator[SkippableStep]:
        """Count a step that a host skips: the others have taken it."""
        with context as step:
            yield step
        if step.skipped:
            local.before_step()
            local.after_step()

    def exchange(self) -> None:
        """With `sync_every`: exchange the weights of all modules, once all ranks have called this.

        They are equal on all ranks then, to be validated or at the end; `fabric.save` does so itself.
        """
        for local in self._local.values():
            local.exchange()

    def global_batches(
        self, loader: DataLoader[T], *modules: Module, global_batch_size: int, exact: bool = False, seed: int = 0
    ) -> GlobalBatches[T]:
        """Steps that have the same samples on any number of ranks.

            steps = fabric.strategy.global_batches(loader, model, global_batch_size=64)
            for epoch in range(10):
                for step in steps:
                    for batch in step:
                        fabric.backward(loss(model, fabric.to_device(batch)))
                    optimizer.step()

        Called in each epoch instead, it goes on with the next one.

        Args:
            loader: Of the whole job's samples: ``setup_dataloaders`` would divide them.
            modules: What ``fabric.setup`` returned: all whose gradients a step computes.
            global_batch_size, exact, seed: See `ring_plugins.torch.GlobalBatches`.

        Raises:
            ArgumentError: A module has not been set up, or the loader cannot be divided, or there is `sync_every`.
        """
        self._refuse_with_exchanges("global_batches()", "hosts that train by themselves have batches of their own")
        averagers = [self._averager_in(one, "global_batches") for one in modules]
        own = getattr(loader, "_dataloader", loader)  # Fabric's wrapper of a loader that it has not divided
        return GlobalBatches(own, *averagers, global_batch_size=global_batch_size, exact=exact, seed=seed)

    def _refuse_with_exchanges(self, what: str, instead: str) -> None:
        if (every := self.arguments["sync_every"]) is not None:
            raise ArgumentError(f"RingFabricStrategy(sync_every={every!r}) does not work with {what}: {instead}.")

    def _averager_in(self, module: Module, caller: str) -> GradientAverager:
        """The averager of what ``fabric.setup`` returned (Fabric 2.6.6, fabric/wrappers.py:119)."""
        own: Module = getattr(module, "_forward_module", module)
        if self.world_size > 1:
            return self.averager_of(own, caller)
        if id(module) not in self._alone:
            self._alone[id(module)] = module, GradientAverager(own)
        return self._alone[id(module)][1]

    def join(self, *parts: Any, batch_size: int = 1, passes: int = 1) -> join:
        """Let ranks with different numbers of batches train to the end of the longest.

            with fabric.strategy.join(model, optimizer, scheduler):
                for batch in loader:
                    ...  # a step as always

        Args:
            parts: What ``fabric.setup`` returned, and what else a step changes that has a `state_dict`.
            batch_size, passes: See `ring_plugins.torch.join`.

        Raises:
            ArgumentError: A module has not been set up, or there is none, or the strategy has `sync_every`.
        """
        self._refuse_with_exchanges("join()", "give the ranks of a host equally many steps; hosts may have others")
        followed = list[Any]()
        for part in parts:
            if not isinstance(part, Module):
                followed.append(getattr(part, "optimizer", part) if hasattr(part, "param_groups") else part)
                continue
            followed.append(self._averager_in(part, "join"))
        return join(*followed, batch_size=batch_size, passes=passes)

    @override
    def setup_optimizer(self, optimizer: Any) -> Any:
        """Shard it if wanted, and compare its options among ranks with the gradients of the modules it updates.

        It takes the place of earlier ones that updated some of its parameters.
        """
        optimizer = self._sharded([optimizer])[0]
        updated = _parameters_of(optimizer)
        self._optimizers = [other for other in self._optimizers if not updated & _parameters_of(other)] + [optimizer]
        for module, averager in self._averagers.values():
            own = {id(parameter) for parameter in module.parameters()}
            using = [other for other in self._optimizers if own & _parameters_of(other)]
            averager.compare_options(functools.partial(_groups_of, using))
        for local in self._local_of(optimizer):
            optimizer.register_load_state_dict_pre_hook(lambda _, state, local=local: local.resume(state))
        return optimizer

    def _local_of(self, optimizer: Any) -> list[LocalTraining]:
        """Those of the modules that an optimizer updates."""
        if not self._local:
            return []
        updated = _parameters_of(optimizer)
        modules = [module for module, _ in self._averagers.values() if updated & set(map(id, module.parameters()))]
        return [self._local[id(module)] for module in modules]

    @override
    def get_optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The whole state, which rank 0 writes; all ranks call this, as ``fabric.save`` does."""
        if isinstance(optimizer, ShardedOptimizer):
            return optimizer.state_dict(to=self.first_rank)
        state: dict[str, Any] = super().get_optimizer_state(optimizer)
        for local in self._local_of(optimizer)[:1]:
            local.save_into(state)
        return state

    def divided(self, loader: Any) -> Any:
        """A loader of which this rank reads every n-th sample or batch in its order; itself if Fabric divides it so."""
        draws, batches = loader.sampler, loader.batch_sampler
        is_torchs = batches is None or makes_batches(batches, draws)
        if is_torchs and (type(draws) is SequentialSampler or (is_permutation(draws) and not is_torchdatas(draws))):
            return loader
        seed = int(os.environ.get("PL_GLOBAL_SEED", "0"))
        return with_every_nth(loader, **self.distributed_sampler_kwargs, seed=seed, pads=True)

    @override
    def module_to_device(self, module: Module) -> None:
        """Move `module` to this rank's device."""
        module.to(self.root_device)

    @override
    def optimizer_step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        updated = self._local_of(optimizer)
        for local in updated:
            local.before_step()
        result = super().optimizer_step(optimizer, *args, **kwargs)
        for local in updated:
            local.after_step()
        for _, averager in self._averagers.values():
            averager.checks.updates.add()
        return result

    @override
    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self.exchange()
        for _, averager in self._averagers.values():
            averager.check()
        for _, averager in self._averagers.values():
            averager.checks.weights.compare("before this checkpoint is saved", averager.communicator)
        super().save_checkpoint(*args, **kwargs)

    @override
    def teardown(self) -> None:
        """Remove the hooks from all modules."""
        for _, averager in [*self._averagers.values(), *self._alone.values()]:
            averager.close()
        for local in self._local.values():
            local.close()
        self._local.clear()
        self._averagers.clear()
        self._alone.clear()
        self._optimizers.clear()
        super().teardown()


class BackwardSyncControl:
    """Fabric's ``_BackwardSyncControl``: switches averaging off for a module that has been set up."""

    def __init__(self, strategy: RingFabricLogic) -> None:
        self._strategy = strategy

    def no_backward_sync(self, module: Module, enabled: bool) -> AbstractContextManager[None]:
        """Let the gradients of `module` accumulate on this rank inside the context."""
        if not enabled or not self._strategy._averagers:
            return nullcontext()
        return self._strategy.averager_of(module, "no_backward_sync").no_sync()


def _groups_of(optimizers: list[Any]) -> list[dict[str, Any]]:
    return [group for optimizer in optimizers for group in optimizer.param_groups]


def _parameters_of(optimizer: Any) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


check_calls({"RingFabricStrategy": RingFabricLogic}, ("RingFabricStrategy",))
