"""The hosts of a job as its coordinator knows them, and the exit status of the job that follows from their reports.

A job that goes on without lost ranks has no single process whose exit status is that of the job. Each host reports how
its ranks ended, or is lost. The job has ended well if a rank has that did not leave before, and was not
cut off from the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ring_plugins.core.base.errors import name_ranks
from ring_plugins.core.control.liveness import MOST_MEMBERS
from ring_plugins.core.linux.process import as_status, ending, silent_end
from ring_plugins.launcher.processes import Popen

#: How ranks end (`End.how`) whose ends end the job, and how those that the others do without.
FAILED, OUT = ("failed", "followed"), ("left", "excluded", "lost", "late")


class End(NamedTuple):
    """How a rank ended.

    Attributes:
        rank: its number.
        code: `returncode` of its process.
        how: why it ended, if `code` does not say it. It has "failed", which ends the job, or "followed" another that
            did. It has "left", was "excluded" since others go on without it, or was "lost" although its `code` is an
            exit status. Or it was too "late" to join, or has not joined yet.
        of_memory: whether it may have been killed since memory had run out.
    """

    rank: int
    code: int
    how: str
    of_memory: bool = False

    @classmethod
    def told(cls, rank: Any, code: Any, how: Any, of_memory: Any = False) -> End:
        """As a supervisor tells it.

        Raises:
            ValueError, TypeError: it is none.
        """
        if type(code) is not int or not -128 < code < 256 or how not in ("", *FAILED, *OUT):
            raise ValueError(f"{(rank, code, how)} is no end of a rank")
        return cls(read_ranks([rank])[0], code, how, of_memory is True)

    @property
    def text(self) -> str:
        """A sentence about it."""
        how = silent_end(self.code, self.of_memory) if self.code < 0 else f"ended with {ending(self.code)}"
        return f"rank {self.rank} {how}."


def read_ranks(told: Iterable[Any]) -> list[int]:
    """Numbers of ranks, as a supervisor tells them.

    Raises:
        ValueError, TypeError: they are none.
    """
    ranks = list(told)
    if not all(type(rank) is int and 0 <= rank < MOST_MEMBERS for rank in ranks):
        raise ValueError(f"{ranks} are no ranks")
    return ranks


class Host:
    """What the coordinator knows of a host.

    Attributes:
        name: of it.
        ranks: that it runs.
        addresses: of both ends of the connection to its supervisor, this one last; None before that has come.
        inbox: messages for a supervisor in this process; None for others.
        here: the first message of its supervisor, None before.
        report: how its ranks ended, None before its supervisor has said so.
        why: why they could not go on.
        replaced: ranks of it whose places other processes have taken, with how often.
        added: ranks of it by which the job has grown.
        is_lost: whether the connection has ended before all was said.
        is_added: whether the job has begun without it.
        login: the process that runs its supervisor, or the login there; None if that comes by itself.
        since: when it became a host of the job.
        members, joiners: how many ranks such a host has now, and who waits there if it has none.
        has_begun: whether such a host has been told how to take part.
    """

    def __init__(self, name: str, ranks: Sequence[int], is_added: bool = False) -> None:
        self.name, self.ranks, self.is_added, self.since = name, tuple(ranks), is_added, time.monotonic()
        self.addresses: tuple[str, str] | None = None
        self.inbox: list[tuple[str, Any]] | None = None
        self.here: Mapping[str, Any] | None = None
        self.report: list[End] | None = None
        self.why: str | None = None
        self.replaced: dict[int, int] = {}
        self.added: list[int] = []
        self.login: Popen | None = None
        self.members, self.joiners = 0, list[Any]()
        self.has_begun = self.is_lost = False

    @property
    def is_connected(self) -> bool:
        """Whether messages reach its supervisor."""
        return not self.is_lost and (self.addresses is not None or self.inbox is not None)

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to be expected from it."""
        return self.is_lost or self.report is not None


class OwnHost:
    """As `Link`, for a supervisor in the coordinator's process; each of its turns is one of the coordinator's, too.

    Args:
        host: of the supervisor.
        take: does what a message asks for.
        tick: gives the coordinator a turn.
    """

    is_lost = is_orphaned = False

    def __init__(self, host: Host, take: Callable[[Host, str, Any], None], tick: Callable[[], None]) -> None:
        self._host, self._take, self._tick = host, take, tick

    def send(self, kind: str, body: Any) -> None:
        self._take(self._host, kind, body)

    def read(self) -> list[tuple[str, Any]]:
        self._tick()
        found, self._host.inbox = self._host.inbox or [], []
        return found


def verdict(hosts: Sequence[Host], failed: Sequence[End], size: int) -> tuple[int, str | None]:
    """The exit status of a job whose hosts have reported or are lost, and what the user should know of it.

    Args:
        hosts: of the job.
        failed: the ends that end the job, in the order in which they were told.
        size: number of ranks at its start.
    """
    ends = [end for host in hosts for end in host.report or ()]
    lost = [host for host in hosts if host.report is None and (host.has_begun or not host.is_added)]
    died = [end for end in ends if (end.code and not end.how) or end.how == "lost"]
    killed = [end for end in died if end.code]  # rather than ended with status 0, before the others
    causes = sorted(failed, key=lambda end: (end.how == "followed", end.code == 1)) or killed
    status = as_status(causes[0].code) if causes else 1
    if why := next((host.why for host in hosts if host.why), None):
        return status, why
    if failed:
        return status, causes[0].text
    cut = [end.rank for end in ends if end.how == "excluded"]
    left = [end.rank for end in ends if end.how == "left"]
    well = [end for end in ends if not end.code and not end.how]  # those that left have not finished
    had_not_joined = sorted(end.rank for end in ends if end.how == "late")
    late, added_late = (
        [rank for rank in had_not_joined if rank < size],
        [rank for rank in had_not_joined if rank >= size],
    )
    replaced = {rank: times for host in hosts for rank, times in host.replaced.items()}
    added = sorted(rank for host in hosts for rank in host.added)
    told = [f"{name_ranks(added)} joined"] if added else []
    often = [f"rank {rank}{f' ({times} times)' * (times > 1)}" for rank, times in replaced.items()]
    told += [f"other processes took the place of {', '.join(often)}"] if often else []
    told += [f"{name_ranks(sorted(left))} left"] if left else []
    told += [f"{name_ranks(sorted(end.rank for end in died))} died"] if died else []
    told += [f"{name_ranks(sorted(cut))} ended as the others could not be reached"] if cut else []
    told += [f"{host.name} was lost{with_ranks(host.ranks)}" for host in lost]
    if well:
        told += [f"nobody had joined yet in the place of {name_ranks(late)}"] if late else []
        told += [f"{name_ranks(added_late)} had not joined yet"] if added_late else []
        others = "all" if told and not (left or died or cut or lost or late or added_late) else "the other"
        return 0, f"{', '.join(told)}, and {others} {len(well)} ended normally." if told else None
    if lost and (cut or not died):
        where = " and ".join(host.name for host in lost)
        return 1, f"{', '.join(told)}. The ranks on {where} may have gone on; nobody here can tell."
    if len(died) == 1 and killed:
        return status, died[0].text
    return status, f"{', '.join(told)}, and no rank is left."


def with_ranks(ranks: Sequence[int]) -> str:
    """The ranks of a host that is lost, for a line about it; one that was added may have none."""
    return f", with {name_ranks(ranks)}" if ranks else ""
