"""Local updates for plain torch loops: the schedule and the outer optimizer are the core's (core/gradients).

Inside a host, this is a `DistributedOptimizer` of the host's ranks. So what that offers works here: accumulation,
skipped steps, a sharded optimizer. Between hosts, weights are exchanged over a communicator of all ranks: it sums
inside a host first, and each rank sends a slice of what its host has to send.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from ring_plugins.core.arrays.codec import CodecName, Compression
from ring_plugins.core.arrays.memory import CACHE_LINE
from ring_plugins.core.base.errors import ArgumentError, MismatchError, RingError
from ring_plugins.core.base.types import Array
from ring_plugins.core.gradients.local_settings import Settings
from ring_plugins.core.gradients.local_updates import OuterSteps
from ring_plugins.core.groups import Group, communicator_of
from ring_plugins.core.world import constructed_by_all, current
from ring_plugins.observe.averaging_check import averages_seldom
from ring_plugins.observe.consistency import differing_weights
from ring_plugins.torch.consistency import check_has_joined, parameter_checksums
from ring_plugins.torch.optimizer import DistributedOptimizer
from ring_plugins.torch.sharded_optimizer import Shard
from ring_plugins.torch.skipped_steps import SkippableStep


class LocalUpdates(DistributedOptimizer):
    """An optimizer for slow networks: averages gradients inside each host, and weights between hosts every few steps.

    See docs/slow_networks.md for what that costs and when not to use it. Call `finish()` after the last step. Inside
    `at_anchor()` the model has the weights that all ranks have in common, for validation and checkpoints.

    Args:
        optimizer: any torch optimizer; its state, such as Adam's moments, stays each host's own.
        named_parameters: the model, whose floating-point buffers (statistics of batch normalization) are averaged with
            the weights; or `model.named_parameters()`, without buffers. Equal on all ranks.
        every: steps between exchanges, or a time such as "30s". Then each host takes as many steps as it can, and its
            weights count by these.
        outer: what an exchange does: "average" takes the average of the weights. (lr, momentum) takes the average
            change for a gradient of SGD with Nesterov's momentum; "nesterov" is (0.9, 0.6). A momentum m needs about
            10 / (1 - m) exchanges.
        fragments: parts of the weights that take turns, so that fewer bytes go at once; a divisor of `every`.
        delay: steps that go on while an exchange travels. A rank takes its result that many steps after it has begun,
            and keeps what it has learned meanwhile; less than `every` / `fragments`. 0 waits for each exchange.
        compression: "int8", "bf16" or "fp16" sends fewer bits between hosts, as for `GradientAverager`.
        error_feedback: whether the rounding error of an exchange is added to the next; None: with "int8" only.
        within_host: False lets each rank take steps of its own, on one host too.
        steps: steps of the whole training, if known; then `outer` is checked against the number of exchanges.
        backward_passes_per_step, sparse, drift_check_every, shard, overlap: of the averages inside a host, as of
            `DistributedOptimizer`.
        group: whose ranks train the model, by default all; only these construct it.

    Raises:
        ArgumentError: an argument is invalid, they do not suit each other, or the job has `on_failure="replace"` and
            several ranks on one of several hosts that average every step, or "continue" and several GPUs there.
        MismatchError: arguments or parameters differ among ranks.
    """

    #: Whether a `GradScaler` has looked at the gradients of a step that has not come.
    _is_unscaled = False

    def __init__(
        self,
        optimizer: Optimizer,
        named_parameters: nn.Module | Iterable[tuple[str, nn.Parameter]] | None = None,
        *,
        every: int | str = 64,
        outer: Literal["average", "nesterov"] | tuple[float, float] = "average",
        fragments: int = 1,
        delay: int = 0,
        compression: CodecName | None = None,
        error_feedback: bool | None = None,
        within_host: bool = True,
        steps: int | None = None,
        backward_passes_per_step: int = 1,
        sparse: Literal["gather", "densify"] = "gather",
        drift_check_every: int | None = None,
        shard: Shard = False,
        overlap: bool | Literal["auto"] = "auto",
        group: Group | None = None,
    ) -> None:
        members = communicator_of(group)
        with constructed_by_all("the construction of LocalUpdates", members):
            current().elastic.widest = max(current().elastic.widest, members.size)  # so no host leaves by itself
            codec = Compression.named(compression, error_feedback)
            settings = Settings.checked(every, outer, fragments, codec, steps, delay=delay)
            if delay:
                current().refuse_to_recover(f"LocalUpdates(delay={delay})")
            if not isinstance(optimizer, Optimizer):
                raise ArgumentError(f"optimizer={type(optimizer).__name__} is not a torch.optim.Optimizer.")
            self._buffers = floating_buffers(named_parameters) if isinstance(named_parameters, nn.Module) else {}
            named = named_parameters.named_parameters() if isinstance(named_parameters, nn.Module) else named_parameters
            named = None if named is None else list(named)
            weights = [p for one in optimizer.param_groups for p in one["params"]]
            described: list[object] = [(tuple(p.shape), str(p.dtype)) for p in weights]
            described += [(name, tuple(buffer.shape)) for name, buffer in self._buffers.items()]
            planned = steps / settings.every if steps is not None and settings.every else math.inf
        self._outer = BetweenHosts(settings, described, group, within_host, planned)
        try:
            super().__init__(
                optimizer,
                named,
                backward_passes_per_step=backward_passes_per_step,
                sparse=sparse,
                drift_check_every=drift_check_every,
                shard=shard,
                overlap=overlap,
                group=self._outer.team,
            )
        except BaseException:
            self._outer.close()
            raise

    # Steps --------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters with the averages of this host, and exchange weights if that is due.

        Args:
            closure: as for `DistributedOptimizer.step`, among the ranks of this host.

        Returns:
            What the wrapped optimizer returns.

        Raises:
            MismatchError: before the first step, if the weights differ among ranks.
            DriftError: at an exchange, if the weights that ranks had in common differ.
            RingError: parameters were added or replaced after the first step.
        """
        self._begin()
        result = super().step(closure)
        self._is_unscaled = False
        self._outer.after_step()
        return result

    def _begin(self) -> None:
        """Take the anchor before the first step: until then a script may load or broadcast weights."""
        check_has_joined()
        if not self.averager.is_closed:
            self._outer.start(self._named(), self._buffers)

    def _take_new_parameters(self) -> bool:
        before = self._averaged_parameters
        is_changed = super()._take_new_parameters()
        if is_changed and self._outer.has_begun:
            raise RingError(
                f"LocalUpdates: the optimizer has {len(self._averaged_parameters)} parameters now, and had "
                f"{len(before)} or others in its first step. Call finish() and close(), and build a new one on all "
                "ranks."
            )
        return is_changed

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._count_skipped()
        super().zero_grad(set_to_none)

    def before_unscale(self) -> None:
        self._count_skipped()
        self._begin()
        super().before_unscale()
        self._is_unscaled = True

    def _count_skipped(self) -> None:
        """Count a step that a `GradScaler` has left out: other hosts have taken it."""
        if self._is_unscaled:
            self._is_unscaled = False
            self._outer.after_step()

    @contextlib.contextmanager
    def skip_step_on(self, *exceptions: type[BaseException]) -> Iterator[SkippableStep]:
        """As of `DistributedOptimizer`, for the ranks of this host; the others take the step."""
        with super().skip_step_on(*exceptions) as step:
            yield step
        if step.skipped:
            self._begin()
            self._outer.after_step()

    # Exchanges ----------------------------------------------------------------------------------------

    def exchange(self) -> None:
        """Exchange all weights, once all ranks have called this: they are equal then, and a checkpoint loses no step.

        Until then take part in what is due on the others.
        """
        self._count_skipped()
        self._begin()
        self._outer.exchange()

    def finish(self) -> None:
        """As `exchange`, after the last step of this rank. One that has fewer steps than others waits here for them."""
        self._count_skipped()
        self._begin()
        self._outer.finish()

    def at_anchor(self) -> contextlib.AbstractContextManager[None]:
        """Let the model have the weights of the last exchange inside the context, which are equal on all ranks."""
        return self._outer.at_anchor()

    @property
    def exchanges(self) -> float:
        """Exchanges so far, of all fragments."""
        return self._outer.exchanges

    # State --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state, and under "local_updates" the anchor and the outer optimizer's velocity."""
        state = super().state_dict()
        if saved := self._outer.saved():
            state["local_updates"] = saved
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load it, the same on all ranks; the anchor becomes the weights of the model. Load the model before this."""
        outer = state_dict.get("local_updates")
        super().load_state_dict({name: one for name, one in state_dict.items() if name != "local_updates"})
        if outer is not None:
            self._outer.resume(outer, self._named(), self._buffers)

    def __repr__(self) -> str:
        return f"LocalUpdates({self.optimizer!r})"

    def close(self) -> None:
        super().close()
        self._outer.close()


class BetweenHosts(OuterSteps):
    """`OuterSteps` of torch models, and the ranks inside a host. Collective.

    Args:
        settings, described, planned: as of `OuterSteps`.
        group: whose ranks train the model, all by default.
        within_host: whether the ranks of a host average every step.

    Attributes:
        team: the ranks that do, among them this one.
    """

    _is_closed = False

    def __init__(
        self,
        settings: Settings,
        described: Sequence[object],
        group: Group | None,
        within_host: bool = True,
        planned: float = math.inf,
    ) -> None:
        own = current().topology
        number = own.node_rank if within_host else own.rank
        communicator = (group or current()).new_communicator("local updates")
        try:
            settings = settings._replace(within_host=within_host)
            super().__init__(settings, communicator, number, described, planned)
            if communicator.recovers:
                current().elastic.averages = True  # exchanges tell who is to leave, and who waits to join
                mates = self.mates
                if current().replaces:  # what joins is alone, and knows of the others' places only
                    self.teams = own.num_nodes if within_host else own.size
                    mates = [own.rank] if self.teams > 1 else [*range(own.size)]
                if current().replaces and 1 < self.teams < own.size:
                    current().refuse_to_recover(
                        "LocalUpdates on several hosts, of which some have several ranks, unless within_host=False,"
                    )
                self.team = Group(mates, purpose="local updates" if self.teams > 1 else "")
            else:
                self.team = Group.split(number, group=group)
        except BaseException:
            communicator.close()
            raise
        self._elastic = current().elastic
        self._elastic.exchanges += not self.is_idle  # else passes tell

    def start(self, named: Sequence[tuple[str, torch.Tensor]], buffers: Mapping[str, torch.Tensor]) -> None:
        """Take the weights for the anchor, unless that was done: before the first step, so a script may load others.

        Raises:
            MismatchError: they differ among ranks.
        """
        if self.has_begun or self.is_idle:
            return
        when = "before the first step"
        if found := differing_weights(lambda: parameter_checksums(named), when, self._communicator):
            raise MismatchError(
                f"{found} Local updates begin with equal weights: call ring_plugins.torch.broadcast_parameters(model)."
            )
        self.begin(FlatWeights([parameter for _, parameter in named], [*buffers.values()]))
        averages_seldom()

    def wants_change(self) -> int:
        return int(self._elastic.wants_change)

    def follow_changes(self, wanted: int) -> bool:
        if wanted:
            pending = self._elastic.pending
            self._elastic.change_members()
            if not self.are_together:  # some come to no TrainingState.commit() now, where processes join
                self._elastic.pending = pending
        if self._elastic.changes.untold:
            self._elastic.tell_changes()
        return self._elastic.is_ending

    def saved(self) -> dict[str, Any]:
        """`state` with tensors, which torch.load takes."""
        return {
            name: torch.from_numpy(one) if isinstance(one, np.ndarray) else one for name, one in self.state().items()
        }

    def resume(
        self, saved: dict[str, Any], named: Sequence[tuple[str, torch.Tensor]], buffers: Mapping[str, torch.Tensor]
    ) -> None:
        """Go on from what `saved` returned; see `load`."""
        if not self.has_begun:
            self.begin(FlatWeights([parameter for _, parameter in named], [*buffers.values()]))
        self.load({name: np.asarray(one) for name, one in saved.items()})

    def close(self) -> None:
        """End the communication of both levels."""
        if not self._is_closed:
            self._elastic.exchanges -= not self.is_idle
        self._is_closed = True
        self._communicator.close()
        self.team.close()


def floating_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Those that can be averaged, by name."""
    return {name: one for name, one in model.named_buffers() if one.is_floating_point() and one.numel()}


class FlatWeights:
    """The numbers of tensors one after the other, in the order of their dimensions: the core's `Weights`.

    Args:
        trained: parameters, on whatever device.
        averaged: buffers.
    """

    def __init__(self, trained: Sequence[torch.Tensor], averaged: Sequence[torch.Tensor]) -> None:
        both = [*trained, *averaged]
        is_double = any(one.dtype in (torch.float64, torch.complex128) for one in both)
        self.dtype, self._dtype = ("float64", torch.float64) if is_double else ("float32", torch.float32)
        parts = [torch.view_as_real(one.detach()) if one.is_complex() else one.detach() for one in trained]
        line = CACHE_LINE // self._dtype.itemsize
        parts.append(torch.zeros(-sum(one.numel() for one in parts) % line))  # so that the others begin on a line
        self.trained = sum(one.numel() for one in parts)
        parts += [one.detach() for one in averaged]
        self.averaged = sum(one.numel() for one in averaged)
        self._parts = parts

    def _pieces(self, start: int, array: Array) -> Iterator[tuple[torch.Tensor, slice, torch.Tensor]]:
        """Tensors of which a stretch has some, which of their numbers, and these numbers' place in `array`."""
        begin, values = 0, torch.from_numpy(array)
        for part in self._parts:
            first, last = max(start - begin, 0), min(start + array.size - begin, part.numel())
            if first < last:
                yield part, slice(first, last), values[begin + first - start : begin + last - start]
            begin += part.numel()

    def read(self, start: int, out: Array) -> None:
        for part, where, values in self._pieces(start, out):
            values.copy_(part.reshape(-1)[where])

    def write(self, start: int, values: Array) -> None:
        for part, where, new in self._pieces(start, values):
            if part.is_contiguous():
                part.view(-1)[where].copy_(new)
            else:
                flat = part.reshape(-1)  # a copy
                flat[where].copy_(new)
                part.copy_(flat.view(part.shape))
