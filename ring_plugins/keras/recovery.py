"""Training with Keras where ranks may be lost: the proof that the others are equal.

The survivors average the step's gradients once more, from the memory in which the framework or `SavedInputs` still has
them (core/gradients/repetition.py), so a compiled step notices nothing.
"""

from __future__ import annotations

from typing import Any

from ring_plugins.core.base.errors import DriftError
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.observe.consistency import Checksums, differing_weights, membership_changes


class LossWatch:
    """Notices once that ranks were lost or have joined, at a place to which all ranks come."""

    def __init__(self) -> None:
        self._view = membership_changes()

    def has_changed(self) -> bool:
        """Whether ranks were lost or have joined since the last call."""
        before, self._view = self._view, membership_changes()
        return self._view != before


def check_equal(checksums: Checksums, communicator: Communicator[Any]) -> None:
    """Compare weights or averages among the ranks that are left. Collective.

    Raises:
        DriftError: on all ranks, if they differ. Not if RING_WEIGHT_CHECK=0.
    """
    found = differing_weights(checksums, "after ranks were lost or joined", communicator)
    if found:
        raise DriftError(f"{found} Continue from a checkpoint.")
