"""Averaging where ranks may be lost: what is rejected, and the proof that those that are left are still equal.

The survivors average that step's gradients once more, without the rank that died (core/gradients/repetition).
They have computed nothing else again, so their weights must be equal to the last bit, and so must be the averages with
which they step. That is checked there and then, before the update: a job that went on with different weights would end
with a useless model, and nobody would know.

A process that joins also gets the optimizer's state, of which the weights tell nothing before it is used. So they are
compared in the next pass, too, behind the first update.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from ring_plugins.core.base.errors import ArgumentError, DriftError
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.gradients.trials import tuning_is_wanted
from ring_plugins.core.world import current
from ring_plugins.observe.drift import differing_weights
from ring_plugins.torch.drift import parameter_checksums

#: Passes after a change of the ranks in which weights are compared.
_COMPARED = 2


class RecoveryCheck:
    """Compares all ranks after some were lost, for one averager.

    Args:
        communicator: the averager's.
        autotune: as the averager got it.

    Raises:
        ArgumentError: averaging in this way cannot go on after a loss.
    """

    def __init__(self, communicator: Communicator[Any], autotune: bool | None) -> None:
        self._communicator = communicator
        if tuning_is_wanted(autotune):
            current().refuse_to_recover("autotuning of bucket sizes (autotune=True, RING_AUTOTUNE=1)")
        self._view, self._to_compare = current().elastic.view, 0

    def check_has_joined(self) -> None:
        """Refuse to average before this process has joined the others.

        Raises:
            ArgumentError: it is to take the place of a lost rank, and has not joined.
        """
        if current().is_joining:
            raise ArgumentError(
                "this process takes the place of a lost rank, and averages gradients before it has joined the others: "
                'with on_failure="replace", make a ring_plugins.torch.TrainingState before the training loop, and call '
                "its commit() after each step."
            )

    def after_pass(self, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        """If ranks were lost or joined since the last call or the one before, compare weights and averages.

        Collective then. The script is told of the change, too.

        Args:
            named: (name, parameter) pairs, equal on all ranks, at the end of a backward.

        Raises:
            DriftError: on all ranks, if they differ. Not if RING_WEIGHT_CHECK=0.
        """
        view = current().elastic.view
        if view != self._view:
            self._view, self._to_compare = view, _COMPARED
        if not self._to_compare:
            return
        self._to_compare -= 1
        trained = [(name, p.grad) for name, p in named if p.requires_grad]
        averages = [(f"the gradient of {name}", average) for name, average in trained if average is not None]
        found = differing_weights(
            lambda: parameter_checksums([*named, *averages]), "after ranks were lost or joined", self._communicator
        )
        if found:
            raise DriftError(f"{found} Continue from a checkpoint.")
        current().elastic.tell_changes()
