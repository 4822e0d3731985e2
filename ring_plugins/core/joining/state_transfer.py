"""A member gives the state of the training to processes that have just joined. What fails there ends only these.

Such a process cannot take over the state if another script made it, or if a function of the script that loads it
raises. The others have lost nothing by then, and can go on without it. An exception that they heard of would end them,
too. So the process prints its error and kills itself. The others find that it is gone, as they find any loss, and `ring
run` starts another one in its place, a few times an hour at most.

The script's own objects are pickled by the member that gives them, and unpickled only in processes that have joined. If
they cannot be pickled, these processes end, with the reason.

**Several broadcasts in a row must take from one process**, a `Root`. When a rank is lost, those above it get other
numbers. A loop that broadcasts one tensor after the other from a fixed number would then take some from one process and
the rest from another, and all ranks would have the same wrong values. So such a loop asks for the root's present number
before each broadcast.

Considered and rejected: telling the others before the process ends. They would have to agree that it is out, as they do
anyway once it is gone.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ring_plugins.core.base.errors import ArgumentError, PeerFailed, name_ranks
from ring_plugins.core.base.log import flush_output, logger
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.collectives.recovery import repeated
from ring_plugins.core.members.changes import MembershipChange
from ring_plugins.core.world import current


@contextlib.contextmanager
def fails_alone() -> Iterator[None]:
    """In a process that has just joined: let an error in this block end it as if it had been killed.

    The failure of another rank is raised as ever.
    """
    try:
        yield
    except (PeerFailed, KeyboardInterrupt):
        raise
    except BaseException as error:
        logger.error(
            f"rank {current().world_rank} (process {os.getpid()}) has joined, but cannot take over the state of the "
            "training. It ends, and the other ranks go on without it:"
        )
        sys.__excepthook__(type(error), error, error.__traceback__)
        flush_output()
        os.kill(os.getpid(), signal.SIGKILL)


def check_picklable(values: Mapping[str, Any]) -> None:
    """Check the values of a `TrainingState` where it is made, since they are pickled only once a rank is lost.

    Raises:
        ArgumentError: one cannot be pickled.
    """
    for name, value in values.items():
        try:
            pickle.dumps(value)
        except Exception as error:  # an object's own hooks may raise anything
            raise ArgumentError(
                f"TrainingState({name}=...): a {type(value).__name__} cannot be pickled ({error}), as a process needs "
                "it that takes the place of a lost rank. Leave it out, and let each process make its own."
            ) from error


def transfer_state(
    state: Callable[[], tuple[Any, Any]],
    joined: Sequence[int],
    send: Callable[[Any, Callable[[], int]], None],
    communicator: Communicator[Any] | None = None,
) -> Any:
    """Give those that have joined the state of an earlier rank; if that is lost meanwhile, of the next one. Collective.

    Args:
        state: called on the rank that gives. Returns what all ranks need for `send`, and what those that have joined
            get, which may have objects of the script.
        joined: world ranks of those that have joined.
        send: called on all ranks with the former, and with a function that returns the communicator's rank that gives:
            broadcasts the rest. It asks before each broadcast, since that rank changes when one before it is lost.
        communicator: of all ranks; None for the world's.

    Returns:
        What `state` returned for those that have joined, on these; None on the other ranks. A process that has joined
        is told of changes from now on as the others are, even of those before that they were not told of yet.

    Raises:
        PeerFailed: no earlier rank is left.
        ArgumentError: in those that have joined, the state could not be made or pickled.
    """
    everyone = current().communicator if communicator is None else communicator
    packed, problem = b"", ""

    def attempt() -> None:
        nonlocal packed, problem
        giver = next((rank for rank in everyone.ranks if rank not in joined), None)
        if giver is None:
            text = f"all ranks from which {name_ranks(sorted(joined))} could get the state of the training are lost."
            raise PeerFailed(text, joined[0])
        is_mine = everyone.ranks[everyone.rank] == giver
        told = _packed(state, _untold_changes()) if is_mine else None
        needed, packed, problem = everyone.broadcast_object(told, everyone.ranks.index(giver), purpose="state transfer")
        if not problem:
            send(needed, lambda: everyone.ranks.index(giver))

    repeated(attempt)
    if everyone.ranks[everyone.rank] not in joined:
        return None
    if problem:
        raise ArgumentError(f"{problem}. Its own output has the traceback.")
    found, untold = pickle.loads(packed)
    _hear_of(untold)
    return found


def _packed(state: Callable[[], tuple[Any, Any]], untold: Sequence[Any]) -> tuple[Any, bytes, str]:
    """What this rank gives: what all need, what those that have joined get, and what keeps it from that."""
    try:
        needed, found = state()
        return needed, pickle.dumps((found, untold)), ""
    except Exception as error:
        problem = (
            f"rank {current().world_rank} could not give the state of the training ({type(error).__name__}: {error})"
        )
        logger.warning(f"{problem}, so nobody can join:", exc_info=error)
        return None, b"", problem


def _untold_changes() -> list[MembershipChange]:
    """Changes that a member's script is yet to be told of; the state that it gives to joiners lacks them, too."""
    return list(current().elastic.changes.untold)


def _hear_of(changes: Sequence[MembershipChange]) -> None:
    """Replay to a joiner the changes that it missed, as a member sent them.

    All ranks' callbacks run at the same place and equally often, so a joiner also sees the joins before its own.
    """
    own, rank, known = current().world_rank, current().topology.rank, current().elastic.changes.untold
    before = list(itertools.takewhile(lambda change: own not in change.joined, changes))
    known.extendleft(change._replace(rank_before=rank, rank=rank) for change in reversed(before))


#: No rank.
_UNKNOWN = -1


class Root:
    """A rank that stays the same process; if it is lost, the lowest of those that are left.

    A broadcast in which the root is lost raises. So nobody goes on with a part of what it had.

    Args:
        rank: as the script numbers the ranks now.
    """

    def __init__(self, rank: int) -> None:
        #: A process that takes the place of a lost rank hears of it when it joins.
        self.world_rank = _UNKNOWN if current().is_joining else current().world_ranks[rank]

    def is_here(self) -> bool:
        """Whether it is this process now."""
        world = current()
        return not world.is_joining and self._among(world.world_ranks) == world.world_rank

    def rank_in(self, communicator: Communicator[Any]) -> int:
        """Its rank in a communicator now."""
        return communicator.ranks.index(self._among(communicator.ranks))

    def _among(self, ranks: Sequence[int]) -> int:
        return self.world_rank if self.world_rank in ranks else ranks[0]
