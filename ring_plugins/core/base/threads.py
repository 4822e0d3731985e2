"""Helper threads, none of which dies silently.

The problem: an unexpected exception ends a thread, Python prints a traceback somewhere in the output, and the process
goes on without the thread. Whatever relied on the thread then waits for ever: a rank without its monitor thread no
longer notices that another rank was killed, and a rank without its listener can no longer be reached.

So all threads of this package are of one class. It hands an exception that its target did not catch to the process's
job, which prints the traceback, tells the other ranks and ends (core/exit_hooks.py). A thread that serves many
connections must therefore catch whatever a single connection can cause.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from ring_plugins.core.base.log import logger

#: Called on a thread that an exception ends, with its name and the exception; returns False outside a job.
OnDeath = Callable[[str, BaseException], bool]

T = TypeVar("T")

#: Seconds after which a blocked thread looks for signals.
_SIGNALS = 0.25

_on_death: OnDeath = lambda name, error: False  # noqa: E731 - replaced by `set_on_death`


def set_on_death(handler: OnDeath) -> None:
    """Hand the exceptions of all helper threads to `handler` from now on."""
    global _on_death
    _on_death = handler


class HelperThread(threading.Thread):
    """A daemon thread whose death by an exception ends the job.

    Args:
        target, args: what it runs.
        name: for messages.
        outside_a_job: called if it dies in a process that belongs to no job, after the traceback is printed.
    """

    def __init__(
        self,
        target: Callable[..., None],
        name: str,
        args: tuple[Any, ...] = (),
        outside_a_job: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__(target=target, name=name, args=args, daemon=True)
        self._outside_a_job = outside_a_job

    def run(self) -> None:
        """Run the target."""
        try:
            super().run()
        except BaseException as error:
            if not _on_death(self.name, error):
                logger.error(f"the thread {self.name} died:\n{traceback.format_exc().rstrip()}")
                self._outside_a_job()


def wait_for_event(event: threading.Event) -> None:
    """Wait until an event is set; signal handlers may raise meanwhile.

    Python runs a handler in the main thread. A signal that arrives just before that thread blocks, or that the kernel
    delivers to another thread, does not wake it. So the thread wakes up by itself now and then.
    """
    while not event.wait(_SIGNALS):
        pass


def until(ready: Callable[[], T], seconds: float, pause: float = 0.005) -> T:
    """What `ready` returns once that is true, or after `seconds`, whatever it is then.

    For what takes a moment, such as the end of a process. Ranks wait for each other in core/control/wait.py.
    """
    end = time.monotonic() + seconds
    while not (found := ready()) and time.monotonic() < end:
        time.sleep(pause)
    return found
