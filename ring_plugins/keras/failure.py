"""Errors that happen inside a framework's step come out as themselves.

A reduction runs in a host call of TensorFlow or XLA, which turns any exception into one of its own and keeps only
the text. The true one is remembered here, and takes its place where the step returns.
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

from ring_plugins.core.world import current, is_initialized

T = TypeVar("T")

_remembered: list[BaseException] = []
_hooked: list[Any] = []


def remembering(function: Callable[..., T]) -> Callable[..., T]:
    """A host call whose exception survives the framework that calls it."""

    @functools.wraps(function)
    def call(*args: Any) -> T:
        try:
            return function(*args)
        except BaseException as error:
            if not _remembered:
                _remembered.append(error)
            raise

    return call


@contextlib.contextmanager
def unwrapped() -> Iterator[None]:
    """Around a framework's step: what a host call raised inside it is raised in place of the framework's error."""
    try:
        yield
    except Exception as error:
        cause = taken(error)
        if cause is error:
            raise
        raise cause from None


def taken(error: BaseException) -> BaseException:
    """The remembered exception behind `error`, or `error` itself where there is none."""
    if not _remembered or error is _remembered[0] or not _comes_from_a_step(error):
        return error
    cause = _remembered[0]
    _remembered.clear()
    return cause


def install_hook() -> None:
    """See that an uncaught error of a framework is reported as what it was, also in a loop of the user's own."""
    if sys.excepthook in _hooked:
        return
    previous = sys.excepthook

    def uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        cause = taken(error)
        previous(type(cause), cause, trace if cause is error else cause.__traceback__)
        if is_initialized() and current().topology.size > 1:
            _end_at_once()

    _hooked.append(uncaught)
    sys.excepthook = uncaught


def _end_at_once() -> None:
    """End this process with its exit functions, but without taking the interpreter apart.

    Frameworks destroy pipelines and threads of theirs while the interpreter is taken apart, which takes seconds, and
    where such a thread wants the interpreter's lock it takes for ever. Nothing of a job that failed is worth that.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _comes_from_a_step(error: BaseException) -> bool:
    """Whether a framework raised it (tensorflow's OpError and jaxlib's XlaRuntimeError and their kin)."""
    return any(kind.__module__.split(".")[0] in ("tensorflow", "jax", "jaxlib") for kind in type(error).__mro__)
