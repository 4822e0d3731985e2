"""What torch's autograd tells: that a gradient is there, and that a backward is over."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable


def when_accumulated(parameter: nn.Parameter, call: Callable[[torch.Tensor], None]) -> list[Any]:
    """Call whenever the parameter's gradient has been accumulated, also if it is frozen now and unfrozen later.

    Returns:
        The hook, to be removed with its `remove()`; nothing for parameters that cannot have gradients.
    """
    if not (parameter.is_floating_point() or parameter.is_complex()):
        return []
    register: Any = parameter.register_post_accumulate_grad_hook
    frozen = not parameter.requires_grad
    if frozen:
        parameter.requires_grad_(True)  # torch refuses hooks otherwise, and keeps those it has
    hook = register(call)
    if frozen:
        parameter.requires_grad_(False)
    return [hook]


class Backward:
    """The backward that is under way, if one is.

    Autograd drops its callbacks when backward raises, so a backward that failed is one that nobody holds the callback
    of: it is then not under way any more.

    Args:
        ended: called at the end of each.
    """

    def __init__(self, ended: Callable[[], None]) -> None:
        self._ended = ended
        self._end: Callable[[], _End | None] = lambda: None

    @property
    def is_under_way(self) -> bool:
        """Whether autograd still holds the callback."""
        return self._end() is not None

    def begin(self) -> None:
        """Called inside a backward, at its first gradient."""
        end = _End(self._ended)
        self._end = weakref.ref(end)
        Variable._execution_engine.queue_callback(end)

    def is_over(self) -> None:
        """Its end has been seen to."""
        self._end = lambda: None


class _End:
    """What autograd calls when backward is over. Autograd holds the only reference to it."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def __call__(self) -> None:
        self._call()
