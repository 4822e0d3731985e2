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
from typing import Any

import torch
from torch import nn

from ring_plugins.torch.autograd import when_accumulated
from ring_plugins.torch.device import TorchStreams
from ring_plugins.torch.gradient_buckets import GradientBuckets
from ring_plugins.torch.own_gradients import forget_dropped

#: The count of a group whose gradients nobody counts.
_UNCOUNTED = 1 << 62


class GradientHooks:
    """The hooks of one averager.

    It refers to neither the model nor its parameters, so that what waits for the averager's end may hold it.

    Args:
        count_ended: called with a group and a parameter at the first gradient of a backward, the last one of a group,
            and any that came after it; a bound method, held weakly.
        before_forward: called before the forward of a module; a bound method, held weakly.
        streams: those of the GPU on which gradients are computed; None on the host.

    Attributes:
        arrivals: `id` of each parameter whose gradient has come in this pass, while their order is being learned; else
            None. A change counts from the next `put`.
    """

    def __init__(
        self,
        count_ended: Callable[[Group, torch.Tensor], None],
        before_forward: Callable[[], None],
        streams: TorchStreams | None,
    ) -> None:
        self._count_ended, self._before_forward = weakref.WeakMethod(count_ended), weakref.WeakMethod(before_forward)
        self._streams = streams
        self.arrivals: list[int] | None = None
        self._handles: list[Any] = []  # but those of groups
        self._handles_of_groups: list[Any] = []
        self._groups: list[Group] = []

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
            key = tuple(buckets.bucket_at(position) for buckets in kept)
            together.setdefault(key, []).append(position)
        for positions in together.values():
            if self._streams is None:
                group = Group(self._count_ended, positions)
            else:
                group = _GroupOnGpu(self._count_ended, positions, self._streams.note)
            self._groups.append(group)
            for position in positions:
                self._handles_of_groups += when_accumulated(parameters[position], group)
        if (arrivals := self.arrivals) is not None:
            for parameter in parameters:
                self._handles += when_accumulated(parameter, lambda parameter: arrivals.append(id(parameter)))
        if module is not None:
            self._handles.append(module.register_forward_pre_hook(_BeforeForward(self._before_forward)))

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in itertools.chain(self._handles, self._handles_of_groups):
            handle.remove()
        self._handles.clear()
        self._handles_of_groups.clear()
        self._groups.clear()

    def leave_behind(self, call: Callable[[torch.Tensor], None]) -> None:
        """From now on, call a function with every parameter that gets a gradient: the averager is gone."""
        groups, handles = self._groups.copy(), self._handles_of_groups.copy()
        self._handles_of_groups.clear()
        self.remove()
        for group in groups if handles else ():
            group.left, group.when_dropped = 0, call

    def fit(self, buckets: GradientBuckets) -> bool:
        """Whether the parameters of each group are in one of these buckets."""
        return all(len({buckets.bucket_at(i) for i in group.positions}) <= 1 for group in self._groups)

    def start_counting(self, buckets: GradientBuckets, counts: bool) -> None:
        """Begin a pass.

        Args:
            buckets: those of the pass.
            counts: whether to look when all gradients of a group have come.
        """
        for group in self._groups:
            group.bucket = buckets.bucket_at(group.positions[0])
            group.left = len(group.positions) if counts and group.bucket >= 0 else _UNCOUNTED

    def stop_counting(self) -> None:
        """Look at the next gradient, which is the first one of a backward."""
        for group in self._groups:
            group.left = 0

    def has(self, group: Group) -> bool:
        """Whether this group is still in use; not if hooks were put anew since."""
        return group in self._groups

    def group_at(self, position: int) -> Group:
        """The group of the parameter at this position."""
        return next(group for group in self._groups if position in group.positions)


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
        count_ended: returns what to call, or None.
        positions: of the parameters.

    Attributes:
        left: gradients that have not come in this pass.
        bucket: theirs in this pass, -1 for parameters that the reducer does not know.
        when_dropped: called with a parameter that gets a gradient when the averager is gone.
    """

    __slots__ = ("_count_ended", "bucket", "left", "positions", "when_dropped")

    def __init__(
        self, count_ended: Callable[[], Callable[[Group, torch.Tensor], None] | None], positions: Sequence[int]
    ) -> None:
        self._count_ended, self.positions = count_ended, tuple(positions)
        self.left, self.bucket = 0, -1
        self.when_dropped: Callable[[torch.Tensor], None] | None = None

    def __call__(self, parameter: torch.Tensor) -> None:
        self.left = left = self.left - 1
        if left > 0:
            return
        if (count_ended := self._count_ended()) is not None:
            count_ended(self, parameter)
        elif self.when_dropped is not None:
            self.when_dropped(parameter)


class _GroupOnGpu(Group):
    """As `Group`; also notes the stream of every gradient."""

    __slots__ = ("_note",)

    def __init__(
        self,
        count_ended: Callable[[], Callable[[Group, torch.Tensor], None] | None],
        positions: Sequence[int],
        note: Callable[[], None],
    ) -> None:
        super().__init__(count_ended, positions)
        self._note = note

    def __call__(self, parameter: torch.Tensor) -> None:
        self._note()
        super().__call__(parameter)


class _BeforeForward:
    """Calls an averager's method before the module's forward; a copy of the module has no averager."""

    def __init__(self, before_forward: Callable[[], Callable[[], None] | None] = lambda: None) -> None:
        self._before_forward = before_forward

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        if (before_forward := self._before_forward()) is not None:
            before_forward()

    def __reduce__(self) -> tuple[type[_BeforeForward], tuple[()]]:
        return _BeforeForward, ()
