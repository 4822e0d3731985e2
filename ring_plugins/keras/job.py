"""Join the job, and raise its original exceptions out of frameworks that replace them.

A reduction runs inside a host call of TensorFlow or XLA. The framework replaces any exception raised there with its
own and keeps only the text. So the host call stores its exception (`capture_exceptions`), and where the step returns,
the stored exception is raised instead of the framework's (`restore_exceptions`, and an excepthook for loops outside
`fit`).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, TypeVar

from ring_plugins.core.base.errors import RingError
from ring_plugins.core.base.log import flush_output
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.groups import Group, communicator_of
from ring_plugins.core.job import World
from ring_plugins.core.world import current, init, is_initialized

T = TypeVar("T")

#: The first exception of a host call that has not been raised again; at most one.
_captured: list[BaseException] = []
_hooked: list[Any] = []


def connect() -> World:
    """Return the job's world, after `ring.init()` if the script has not called it."""
    if not is_initialized():
        init()
    _install_excepthook()
    return current()


def members(group: Group | None) -> World | Group:
    """What has the communicators of a group, or of all ranks, after `connect`.

    Raises:
        ArgumentError: `group` is not a group, or this rank is not in it.
    """
    world = connect()
    communicator_of(group)
    return world if group is None else group


def are_several(communicator: Communicator[Any]) -> bool:
    """Whether others take part; so it is in a process that is yet to join them, which is alone until then."""
    return communicator.size > 1 or current().is_joining


def capture_exceptions(function: Callable[..., T]) -> Callable[..., T]:
    """Wrap a host call to store its exception, which the calling framework would replace."""

    @functools.wraps(function)
    def call(*args: Any) -> T:
        try:
            result = function(*args)
        except BaseException as error:
            if not _captured:
                _captured.append(error)
            raise
        _captured.clear()  # the script went on after an earlier exception, which cannot explain a later one
        return result

    return call


@contextlib.contextmanager
def restore_exceptions() -> Iterator[None]:
    """Raise the exception of a host call in this block instead of the framework's error."""
    try:
        yield
    except Exception as error:
        cause = restored(error)
        if cause is error:
            raise
        raise cause from None


def restored(error: BaseException) -> BaseException:
    """Return the captured exception behind a framework's `error`, or `error` itself if there is none."""
    # TensorFlow's OpError, jaxlib's XlaRuntimeError and their subclasses.
    packages = {kind.__module__.split(".")[0] for kind in type(error).__mro__}
    if _captured and error is _captured[0]:  # the framework has raised it itself, so it explains no later one
        _captured.clear()
    if not _captured or isinstance(error, RingError) or packages.isdisjoint(("tensorflow", "jax", "jaxlib")):
        return error
    cause = _captured[0]
    _captured.clear()
    return cause


def _install_excepthook() -> None:
    """Report the cause of an uncaught framework error, also in loops outside `fit`."""
    if sys.excepthook in _hooked:
        return
    previous = sys.excepthook

    def uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        cause = restored(error)
        previous(type(cause), cause, trace if cause is error else cause.__traceback__)
        if is_initialized() and current().topology.size > 1:
            # Without finalizing the interpreter: frameworks stop pipelines and threads there. That takes seconds, or
            # forever if such a thread waits for the GIL. A failed job does not need it.
            atexit._run_exitfuncs()
            flush_output()
            os._exit(1)

    _hooked.append(uncaught)
    sys.excepthook = uncaught
