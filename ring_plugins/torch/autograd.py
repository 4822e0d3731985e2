"""The events that torch reports: a gradient is accumulated, a backward ends, a module gets a parameter."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)


def when_accumulated(parameter: nn.Parameter, call: Callable[[torch.Tensor], None]) -> list[Any]:
    """Call a function whenever the parameter's gradient has been accumulated; a frozen one may be unfrozen later.

    Returns:
        The hook, to be removed with its `remove()`; nothing for parameters that cannot have gradients.
    """
    if not (parameter.is_floating_point() or parameter.is_complex()):
        return []
    register: Any = parameter.register_post_accumulate_grad_hook
    frozen = not parameter.requires_grad
    if frozen:
        parameter.requires_grad_(True)  # torch refuses hooks otherwise, but keeps them when it is frozen again
    hook = register(call)
    if frozen:
        parameter.requires_grad_(False)
    return [hook]


class Backward:
    """The running backward, if any.

    Autograd drops its callbacks when backward raises. It holds the only reference to ours, so once the callback is gone
    the backward has failed.

    Args:
        ended: called at the end of each backward.
    """

    def __init__(self, ended: Callable[[], None]) -> None:
        self._ended = ended
        self._callback: Callable[[], _EndOfBackward | None] = lambda: None

    @property
    def is_running(self) -> bool:
        """Whether autograd still holds the callback."""
        return self._callback() is not None

    def begin(self) -> None:
        """Ask autograd for a callback at the end; called inside a backward, at its first gradient."""
        callback = _EndOfBackward(self._ended)
        self._callback = weakref.ref(callback)
        Variable._execution_engine.queue_callback(callback)

    def end(self) -> None:
        """Note that the end has been handled."""
        self._callback = lambda: None


class _EndOfBackward:
    """A callable that can be referenced weakly, which a bound method cannot."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def __call__(self) -> None:
        self._call()


# Walking through a model of thousands of parameters at every step would take milliseconds. Instead, torch calls these
# hooks whenever any module gets a parameter or a submodule, so an unchanged count means an unchanged model.
_registrations = 0


def _count_registration(module: Any, name: str, value: Any) -> None:
    global _registrations
    _registrations += 1


register_module_parameter_registration_hook(_count_registration)
register_module_module_registration_hook(_count_registration)


def registrations() -> int:
    """How many parameters and submodules have been registered with any module of this process so far."""
    return _registrations
