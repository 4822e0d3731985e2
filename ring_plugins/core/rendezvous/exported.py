"""Tells libraries of a rank's process which rank it is, in the variables that torchrun sets.

Many libraries train on several processes if the environment speaks of several, and alone, without a word, if it does
not: it says nothing under mpirun and srun, and in a script that started its own ranks. So `init` sets the variables
that are missing, and `shutdown` removes them.

Processes that a rank starts inherit them, as they do under torchrun. To `init` in such a process they say nothing: they
are not a launcher's as long as all still have the values that RING_EXPORTED lists.

Not in a job that goes on after losses: its ranks and size change, and the variables could not.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from ring_plugins.core.base import config

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
#: Those that say which rank of how many this process is. Left by something else, they may be wrong.
_PLACE = NAMES[:2]


def launchers_value(name: str) -> str:
    """A variable as a launcher, or the user, has set it: "" if it is not set, or was exported by a rank."""
    return "" if name in _exported() else os.environ.get(name, "")


def export(values: Mapping[str, str]) -> None:
    """Set those of the variables that are missing or call this process another rank.

    Args:
        values: of all `NAMES`.
    """
    chosen = {
        name: value
        for name, value in values.items()
        if not os.environ.get(name) or (name in _PLACE and os.environ[name] != value)
    }
    os.environ.update(chosen)
    if chosen:
        os.environ[config.EXPORTED.name] = " ".join([",".join(chosen), *(os.environ[name] for name in NAMES)])


def withdraw() -> None:
    """Remove what a rank has exported, this process or one from which it has inherited it."""
    names, *values = config.EXPORTED.get().split() or ("",)
    for name, value in zip(NAMES, values, strict=False):
        if name in names.split(",") and os.environ.get(name) == value:
            del os.environ[name]
    os.environ.pop(config.EXPORTED.name, None)


def _exported() -> list[str]:
    """The variables that a rank has exported and no launcher has set since."""
    names, *values = config.EXPORTED.get().split() or ("",)
    return names.split(",") if values and values == [os.environ.get(name, "") for name in NAMES] else []
