"""The rounds in which a process joins (mesh_admission.py): what each rank has told in them."""

from __future__ import annotations

from typing import Any

from ring_plugins.core.control.consensus import NUMBER, fits

#: Rounds.
CALL, OFFERS, READY = range(3)


class Rounds:
    """What has arrived, by the number of the view with which the attempt ends.

    Attributes:
        problems: by view, why nobody joins.
    """

    def __init__(self) -> None:
        self.problems: dict[int, str] = {}
        self._told: dict[tuple[int, int, int], Any] = {}  # by view, round and rank
        self._over = 0

    def note(self, sender: int, body: dict[str, Any]) -> bool:
        """Take a message of a rank; returns whether its attempt is still under way.

        Raises:
            Exception: it is invalid.
        """
        view = body["view"]
        if not fits(view, NUMBER):
            raise ValueError(f"{view!r} is no view")
        if view <= self._over:
            return False
        if "problem" in body:
            self.problems.setdefault(view, str(body["problem"]))
        else:
            self._told[view, int(body["round"]), sender] = body["payload"]
        return True

    def of(self, view: int, number: int) -> dict[int, Any]:
        """What ranks have told in a round, by rank."""
        told = list(self._told.items())  # the channel's thread adds to it
        return {rank: payload for (of, round_, rank), payload in told if (of, round_) == (view, number)}

    def forget(self, view: int) -> None:
        """Forget all until this view, also what is still to come."""
        self._over = view
        for key in [key for key in list(self._told) if key[0] <= view]:
            del self._told[key]
        for old in [old for old in list(self.problems) if old <= view]:
            del self.problems[old]
