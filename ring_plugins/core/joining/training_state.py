"""What the frameworks' `TrainingState`s share: values that a script lists, and where it lets processes join.

A process that joins runs the script from its first line. In the constructor of the state, it waits until the others
call `commit` of theirs, and takes over their values there.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.arrays.memory import HostMemory
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.collectives.fingerprint import purpose
from ring_plugins.core.joining.join import admit, join
from ring_plugins.core.joining.state_transfer import check_picklable, fails_alone
from ring_plugins.core.world import current


class ListedState(abc.ABC):
    """Values of a script, which become attributes, and which a process that joins gets.

    Args:
        values: by name.
        pickled: those of which it gets a copy. Of others, it gets what they hold.

    Raises:
        ArgumentError: a name is taken or begins with an underscore, or a value cannot be pickled.
    """

    _made = 0  # by this process

    def __init__(self, values: Mapping[str, Any], pickled: Sequence[str]) -> None:
        for name in values:
            if hasattr(type(self), name) or name.startswith("_"):
                raise ArgumentError(f"TrainingState({name}=...): choose another name.")
        if current().replaces:
            check_picklable({name: values[name] for name in pickled})
        ListedState._made += 1
        self._number = ListedState._made
        self._has_joined = False
        self._operations_at_join = -1
        vars(self).update(values)

    @abc.abstractmethod
    def _described(self) -> str:
        """What must be the same of this state in a process that joins."""

    @abc.abstractmethod
    def _share(self, joined: tuple[int, ...]) -> None:
        """Give these ranks, which have joined, the state. Collective."""

    def _place(self) -> str:
        """Which of the script's states this is: a second one of a joiner would keep the values of its first line."""
        return f"TrainingState {self._number} of {self._made} made so far, of {self._described()}"

    def _join(self, until: str) -> None:
        """In a process that is to join, wait until the others do that, and take over their state."""
        joined = join(self._place(), until)
        with fails_alone():
            self._share(joined)
        current().elastic.tell_changes()
        self._operations_at_join = current().operations()

    def _is_where_it_joined(self) -> bool:
        """Whether this process has joined, and stands at the place at which the others let it."""
        return current().operations() == self._operations_at_join

    def _change_members(self, *numbers: int) -> list[int]:
        """Let ranks leave that were told to end, and see who waits to join; returns the maximum of each number."""
        world = current()
        maxima = np.array([world.elastic.wants_change, *numbers], np.int64)
        with purpose("TrainingState"):
            world.communicator.all_reduce(HostMemory(maxima, "int64"), Op.MAX)
        if maxima[0]:
            world.elastic.change_members()
        return [int(found) for found in maxima[1:]]

    def _follow_changes(self) -> None:
        """Let ranks leave and see who waits, in a loop that averages by itself; tell the script of any change.

        Passes of gradients do so elsewhere, where they are whole: a `commit` may stand between two passes of a step.
        """
        elastic = current().elastic
        if not elastic.averages:
            self._change_members()
        if elastic.changes.untold:
            elastic.tell_changes()

    def _let_join(self, added: bool) -> bool:
        """Admit pending joiners, added ranks only if `added`; returns whether any has joined."""
        elastic = current().elastic
        is_pending = elastic.is_pending or (added and elastic.pending)
        joined = admit(self._place(), added=added) if is_pending else ()
        if joined:
            self._share(joined)
            elastic.tell_changes()
        return bool(joined)

    def _integers_of(self, names: Sequence[str]) -> dict[str, int]:
        """Those of these values that are integers, which say where this rank is in the training."""
        return {name: value for name in names if isinstance(value := getattr(self, name), int)}
