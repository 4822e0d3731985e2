"""Hooks on a model's parameters that count gradients as autograd accumulates them.

Autograd calls a hook once a parameter and step, thousands of times, so a hook only counts. Parameters that lie in one
bucket share a counter; the averager looks when all gradients of a counter have come, and at the first gradient of a
backward. While the order of gradients is being learned, a second hook notes each arrival.

torch has no hook in C++ for many parameters: `torch.autograd.graph.register_multi_grad_hook` puts a Python closure on
each, and takes 4.3 µs a parameter where these take 0.7 (5,000 parameters, torch 2.13, busy machine). A hook that does
nothing takes as long as these: the time is autograd's own.

Hooks hold the averager weakly: an averager that nobody refers to any more is gone. If it averaged, its hooks stay, and
tell of gradients that nobody averages any more, until another averager takes the parameters.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from ring_plugins.torch.autograd import when_accumulated
from ring_plugins.torch.device import TorchStreams
from ring_plugins.torch.gradient_buckets import GradientBuckets
from ring_plugins.torch.own_gradients import forget_dropped

#: The count of a group whose gradients nobody counts.
_UNCOUNTED = 1 << 62


class Averager(Protocol):
    """What hooks call; a `GradientAverager`."""

    def gradient_came(self, group: Group, parameter: torch.Tensor) -> None:
        """Handle the first gradient of a backward, the last one of a group, and any that came after it."""

    def before_forward(self) -> None:
        """Look what has changed before the forward of the module."""


class GradientHooks:
    """The hooks of one averager.

    It refers to neither the model nor its parameters, so that what waits for the averager's end may hold it.

    Args:
        averager: held weakly.
        streams: those of the GPU on which gradients are computed; None on the host.

    Attributes:
        groups: that are in use.
        arrivals: `id` of each parameter whose gradient has come in this pass, while their order is being learned; else
            None. A change counts from the next `put`.
    """

    def __init__(self, averager: Averager, streams: TorchStreams | None) -> None:
        self._averager, self._streams = weakref.ref(averager), streams
        self.arrivals: list[int] | None = None
        self._handles: list[Any] = []  # but those of groups
        self._handles_of_groups: list[Any] = []
        self.groups: list[Group] = []

    def put(
        self, parameters: Sequence[nn.Parameter], kept: Collection[GradientBuckets], module: nn.Module | None
    ) -> None:
        """Put one hook on all parameters that are in one bucket in each of the sets of buckets, in place of all hooks.

        Args:
            parameters: of the model.
            kept: the sets of buckets.
            module: the model, if its forward is to be noticed.
        """
        self.remove()
        for parameter in parameters:
            retire(parameter)
        together: dict[tuple[int, ...], list[int]] = {}
        for position in range(len(parameters)):
            key = tuple(buckets.bucket_of[position] for buckets in kept)
            together.setdefault(key, []).append(position)
        for positions in together.values():
            if self._streams is None:
                group = Group(self._averager, positions)
            else:
                group = _GroupOnGpu(self._averager, positions, self._streams)
            self.groups.append(group)
            for position in positions:
                self._handles_of_groups += when_accumulated(parameters[position], group)
        if (arrivals := self.arrivals) is not None:
            for parameter in parameters:
                self._handles += when_accumulated(parameter, lambda parameter: arrivals.append(id(parameter)))
        if module is not None:
            self._handles.append(module.register_forward_pre_hook(_BeforeForward(self._averager)))

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in itertools.chain(self._handles, self._handles_of_groups):
            handle.remove()
        self._handles.clear()
        self._handles_of_groups.clear()
        self.groups.clear()

    def leave_behind(self, call: Callable[[torch.Tensor], None]) -> None:
        """From now on, call a function with every parameter that gets a gradient: the averager is gone."""
        groups, handles = self.groups.copy(), self._handles_of_groups.copy()
        self._handles_of_groups.clear()
        self.remove()
        for group in groups if handles else ():
            group.left, group.when_dropped = 0, call

    def fit(self, buckets: GradientBuckets) -> bool:
        """Whether the parameters of each group are in one of these buckets."""
        return all(len({buckets.bucket_of[i] for i in group.positions}) <= 1 for group in self.groups)

    def start_counting(self, buckets: GradientBuckets, counts: bool) -> None:
        """Begin a pass.

        Args:
            buckets: those of the pass.
            counts: whether to look when all gradients of a group have come.
        """
        for group in self.groups:
            group.bucket = buckets.bucket_of[group.positions[0]]
            group.left = len(group.positions) if counts and group.bucket >= 0 else _UNCOUNTED

    def stop_counting(self) -> None:
        """Look at the next gradient, which is the first one of a backward."""
        for group in self.groups:
            group.left = 0

    def group_at(self, position: int) -> Group:
        """The group of the parameter at this position."""
        return next(group for group in self.groups if position in group.positions)


def retire(parameter: torch.Tensor) -> None:
    """Let hooks of averagers that are gone do nothing from now on."""
    forget_dropped(parameter)
    # torch 2.4 to 2.13: hooks by the number that their handle has, or None.
    for hook in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values():
        if isinstance(hook, Group) and hook.when_dropped is not None:
            hook.left, hook.when_dropped = _UNCOUNTED, None


class Group:
    """Parameters of one bucket, whichever set of parameters is trained, and the hook that counts their gradients.

    The averager looks when all have come, and at the first gradient of a backward: outside of one, `left` is 0.

    A gradient that comes twice, as in a backward with others inside, makes the count end early. `GradientAverager`
    then holds the buckets back, or raises at the gradient that comes after its bucket has left.

    Args:
        averager: a weak reference.
        positions: of the parameters.

    Attributes:
        left: gradients that have not come in this pass.
        bucket: theirs in this pass, -1 for parameters that the reducer does not know.
        when_dropped: called with a parameter that gets a gradient when the averager is gone.
    """

    __slots__ = ("_averager", "bucket", "left", "positions", "when_dropped")

    def __init__(self, averager: Callable[[], Averager | None], positions: Sequence[int]) -> None:
        self._averager, self.positions = averager, tuple(positions)
        self.left, self.bucket = 0, -1
        self.when_dropped: Callable[[torch.Tensor], None] | None = None

    def __call__(self, parameter: torch.Tensor) -> None:
        self.left = left = self.left - 1
        if left > 0:
            return
        if (averager := self._averager()) is not None:
            averager.gradient_came(self, parameter)
        elif self.when_dropped is not None:
            self.when_dropped(parameter)


class _GroupOnGpu(Group):
    """As `Group`; also notes the stream of every gradient."""

    __slots__ = ("_streams",)

    def __init__(
        self, averager: Callable[[], Averager | None], positions: Sequence[int], streams: TorchStreams
    ) -> None:
        super().__init__(averager, positions)
        self._streams = streams

    def __call__(self, parameter: torch.Tensor) -> None:
        self._streams.note()
        super().__call__(parameter)


class _BeforeForward:
    """Tells an averager of the module's forward; a copy of the module has no averager."""

    def __init__(self, averager: Callable[[], Averager | None] = lambda: None) -> None:
        self._averager = averager

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        if (averager := self._averager()) is not None:
            averager.before_forward()

    def __reduce__(self) -> tuple[type[_BeforeForward], tuple[()]]:
        return _BeforeForward, ()
