"""Horovod's elastic training: a state, and a training function that begins again when ranks are lost or added.

Horovod stops all ranks when one is lost, restores what they last committed, and calls the function again. Here the
other ranks finish the step without the lost one, so nothing is restored. But the function still has to begin again,
since scripts read `hvd.size()` where it begins, to divide data and steps. So at the first `commit()` after a change,
all ranks raise `HostsUpdatedInterrupt`, as Horovod does when hosts are added. `run` catches it, calls the reset
callbacks, gives all ranks equal states, and calls the function with what has been reached.

A process that takes the place of a lost rank, or is added, runs the script up to the call of that function, and waits
there. It joins in a `commit()` of the others, gets their state, and begins with them.

The ranks go on after a loss if `ring run` was given `--min-np`, `--max-np` or `--on-failure`, or if RING_ON_FAILURE is
set.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

import ring_plugins as ring
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.joining.state_transfer import transfer_state
from ring_plugins.core.joining.training_state import ListedState
from ring_plugins.core.world import current
from ring_plugins.horovod import settings
from ring_plugins.horovod.common.exceptions import HostsUpdatedInterrupt

P = ParamSpec("P")
T = TypeVar("T")

__all__ = ["ObjectState", "State", "run", "run_fn"]


class State(ListedState):
    """What the ranks have reached in a training; its values become attributes that the script reads and sets.

    Args:
        values: by name; those that can be pickled.
    """

    def __init__(self, **values: Any) -> None:
        super().__init__(values, self._pickled(values))
        self._names = list(values)
        self._reset_callbacks: list[Callable[[], object]] = []
        self._view = current().elastic.view
        self._saved: dict[str, Any] | None = None
        self._restores = False  # whether the script ever goes back

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], object]]) -> None:
        """Call functions without arguments on all ranks after each change of the ranks, before the training goes on."""
        self._reset_callbacks.extend(callbacks)

    def commit(self) -> None:
        """Let ranks join and leave here; call it on all ranks at the same places, best after each step.

        It copies the state once the script has called `restore`.

        Raises:
            HostsUpdatedInterrupt: the ranks have changed since the function began, on all ranks alike.
        """
        self._saved = None
        if self._restores:
            self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """`commit()`, without a copy."""
        elastic = current().elastic
        if elastic.mesh is None:  # the ranks of this job do not change
            return
        self._follow_changes()
        self._let_join(added=True)
        if self._view != elastic.view:
            raise HostsUpdatedInterrupt(False)

    def on_reset(self) -> None:
        """Call the reset callbacks; `run` does so after each change of the ranks."""
        self._view = current().elastic.view
        settings.tell_place()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def reset(self) -> None:
        """Do something before the reset callbacks, in a subclass."""

    def save(self) -> None:
        """Copy the state, for `restore`. `run` needs no copy."""
        self._saved = copy.deepcopy(self._state())

    def restore(self) -> None:
        """Go back to the last `sync`, `save` or `commit`. `run` never does.

        Raises:
            ArgumentError: that was a `commit`, before the first call of `restore`, which has copied nothing.
        """
        self._restores = True
        if self._saved is None:
            raise ArgumentError(
                "restore() has nothing to go back to: commit() copies the state only after a first call of restore(). "
                "Call save() where the script may go back to."
            )
        self._load(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """Give all ranks the state of rank 0; `run` does so each time before the function."""
        self._load(ring.broadcast_object(self._state(), 0))
        self.save()

    def _pickled(self, values: dict[str, Any]) -> list[str]:
        """Which values a process that joins gets as copies."""
        return list(values)

    def _described(self) -> str:
        return ", ".join(self._names) or "no values"

    def _state(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._names}

    def _load(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)

    def _share(self, joined: tuple[int, ...]) -> None:
        received = transfer_state(lambda: (None, self._state()), joined, lambda *_: None)
        if received is not None:
            self._load(received)


class ObjectState(State):
    """A state of values that can be pickled, such as numbers.

    Args:
        bcast_object, get_rank: have no effect.
        values: become attributes.
    """

    def __init__(self, bcast_object: Any = None, get_rank: Any = None, **values: Any) -> None:
        super().__init__(**values)


def run(func: Callable[P, T]) -> Callable[P, T]:
    """Make a function of a training that begins again whenever the ranks have changed.

    Args:
        func: takes a state as its first argument, and begins with what that has. All ranks call it.
    """

    @functools.wraps(func)
    def training(*args: P.args, **kwargs: P.kwargs) -> T:
        state: Any = args[0] if args else None
        if not isinstance(state, State):
            raise ArgumentError(
                f"the first argument of {getattr(func, '__name__', func)!r} is a {type(state).__name__}, but "
                "hvd.elastic.run needs a state there, such as hvd.elastic.TorchState(model, optimizer, epoch=0)."
            )
        if current().is_joining:
            state._join("call commit() of the state of hvd.elastic")
            state.on_reset()
        while True:
            try:
                state.sync()
                return func(*args, **kwargs)
            except HostsUpdatedInterrupt:
                state.on_reset()

    return training


def run_fn(func: Callable[P, T], reset: Callable[[], object]) -> Callable[P, T]:
    """`run`; `reset`, by which Horovod joins its job anew, is not needed."""
    return run(func)
