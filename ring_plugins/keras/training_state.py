"""The state of a training whose script calls `fit` several times, for a process that takes the place of a lost rank.

Within one `fit`, `BroadcastCallback` lets such a process join. But only the script knows in which of its calls of `fit`
the others are. So it says where its own loop is, between two calls, as in `ring_plugins.torch.TrainingState`.
"""

from __future__ import annotations

from typing import Any

from ring_plugins.core.base.errors import ArgumentError, MismatchError
from ring_plugins.core.joining import admit, if_different, join
from ring_plugins.core.world import current
from ring_plugins.keras.job import connect
from ring_plugins.keras.joining import set_joins_between_fits, share_state
from ring_plugins.keras.state import build_optimizer

_PLACE = "between two calls of fit()"


class TrainingState:
    """Where a script that calls `fit` several times has come to; a process that replaces a lost rank gets it.

        state = TrainingState(model, epoch=0)
        for state.epoch in range(state.epoch, 12):
            state.commit()
            model.fit(..., callbacks=[BroadcastCallback()])

    Create it on all ranks, before the loop. In a replacement, the constructor waits until the other ranks call
    `commit`, and then gives model and optimizer their values and sets the attributes. No process joins within `fit`
    then. It works with any `on_failure`; processes join only with "replace".

    Args:
        model: built and compiled.
        values: become attributes that the script reads and sets; anything that can be pickled, such as numbers.

    Raises:
        ArgumentError: a name is taken or begins with an underscore, or the model is not built.
        MismatchError: in a replacement, the script has come to another place, or models differ.
    """

    def __init__(self, model: Any, **values: Any) -> None:
        for name in values:
            if hasattr(type(self), name) or name.startswith("_"):
                raise ArgumentError(f"TrainingState({name}=...): choose another name.")
        world = connect()
        if world.replaces and not model.built:
            raise ArgumentError(
                "TrainingState(model): the model must be built, so that a process that takes the place of a lost rank "
                "can get the weights: begin it with keras.Input(...), or call it once."
            )
        self._model, self._names = model, list(values)
        self._has_joined = False
        self._operations_at_join = -1
        for name, value in values.items():
            setattr(self, name, value)
        if world.replaces:
            set_joins_between_fits()
            build_optimizer(model)
        if world.is_joining:
            self._share(join(_PLACE, "begin the next fit"))
            self._operations_at_join = world.operations()

    def commit(self) -> None:
        """Let waiting processes join here; call it on all ranks before each `fit`.

        Raises:
            MismatchError: after a process has joined, an integer of the state differs among ranks.
        """
        world = current()
        is_where_others_let_it_join = world.operations() == self._operations_at_join
        if not world.replaces or is_where_others_let_it_join:
            return
        if any(world.communicator.all_gather_object(world.wants_change)):
            world.change_members()
        if world.changes.untold:
            world.tell_changes()
        if world.awaited and (joined := admit(_PLACE, further=True)):
            self._share(joined)
        elif self._has_joined:
            self._compare()

    def _share(self, joined: tuple[int, ...]) -> None:
        world = current()
        values = {name: getattr(self, name) for name in self._names}
        found = share_state(self._model, [], values, joined, world.communicator)
        for name, value in (found or {}).items():
            setattr(self, name, value)
        self._has_joined = True
        world.tell_changes()

    def _compare(self) -> None:
        found = {name: value for name in self._names if isinstance(value := getattr(self, name), int)}
        if told := if_different(found):
            raise MismatchError(
                f"ranks are at different places of the training since a process has joined: {told}. Begin the loop "
                "with the numbers of the TrainingState, as in `for state.epoch in range(state.epoch, epochs)`."
            )
