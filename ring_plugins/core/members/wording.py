"""The line that the log gets when ranks were lost, left or joined."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from ring_plugins.core.base.errors import name_ranks

#: Process ids by world rank.
Pids = Mapping[int, int] | Sequence[int]


def what_was_lost(
    lost: Sequence[int],
    pids: Pids,
    left: Sequence[int],
    job: tuple[int, bool],
    seconds: float,
    silent: Sequence[int] = (),
    hosts: Mapping[int, str] | None = None,
) -> str:
    """The line that tells the user of a loss, and of the ranks' new numbers.

    Args:
        lost: world ranks.
        pids: of all processes, by world rank.
        left: the world ranks that go on, in order.
        job: how many ranks it started with, and whether other processes take the places of lost ones.
        seconds: that the agreement took.
        silent: those of `lost` that cannot be reached, and may be alive.
        hosts: of all ranks, if there are several.
    """
    dead = [rank for rank in lost if rank not in silent]
    gone = "; ".join(
        f"{_named(ranks, pids, hosts)} {how}"
        for ranks, how in ((dead, "died"), (silent, "cannot be reached any more"))
        if ranks
    )
    return _who_goes_on(gone, lost, left, job, f", after {seconds * 1e3:.0f} ms")


def who_joined(slots: Mapping[int, int], pids: Pids, members: Sequence[int], seconds: float, ranks: int) -> str:
    """The line that tells the user of processes that have joined.

    Args:
        slots: of their world ranks.
        pids: by world rank.
        members: the world ranks of all, in order.
        seconds: that joining took.
        ranks: how many the job had at the most before; those with slots beyond take nobody's place.
    """
    who = " and ".join(
        f"{_named([rank], pids)} {f'in the place of rank {slot}' if slot < ranks else 'as an added rank'}"
        for rank, slot in slots.items()
    )
    numbers = ", ".join(f"{old} is now {new}" for new, old in enumerate(members) if old != new)
    return (
        f"{who} joined; the job goes on with {len(members)} ranks since {time.strftime('%H:%M:%S')}, after "
        f"{seconds * 1e3:.0f} ms." + (f" Errors keep the old numbers: rank {numbers}." if numbers else "")
    )


def who_left(leaving: Sequence[int], pids: Pids, left: Sequence[int], job: tuple[int, bool]) -> str:
    """The line that tells the user of ranks that left the job because they were told to end; arguments as above."""
    return _who_goes_on(f"{_named(leaving, pids)} left on SIGTERM", leaving, left, job)


def too_few_left(leaving: Sequence[int], pids: Pids, left: Sequence[int], min_ranks: int) -> str:
    """The line that tells the user that all end because too many were told to."""
    return (
        f"{_named(leaving, pids)} got SIGTERM. All ranks end after this step, since training cannot go on with "
        f"{len(left)} rank{'s' * (len(left) != 1)}: min_ranks={min_ranks}."
    )


def _named(ranks: Sequence[int], pids: Pids, hosts: Mapping[int, str] | None = None) -> str:
    return " and ".join(
        f"{name_ranks([rank])} (process {pids[rank]}{f' on {hosts[rank]}' if hosts else ''})" for rank in ranks
    )


def _who_goes_on(gone: str, lost: Sequence[int], left: Sequence[int], job: tuple[int, bool], after: str = "") -> str:
    moved = ", ".join(f"{old} is now {new}" for new, old in enumerate(left) if old != new)
    size, replaces = job
    if replaces:
        data = "Another process takes its place" if len(lost) == 1 else "Other processes take their places"
    else:
        data = (
            "Nobody takes over the data of this rank" if len(lost) == 1 else "Nobody takes over the data of these ranks"
        )
    now = time.strftime("%H:%M:%S")
    line = f"{gone}; the job goes on with {len(left)} of its {size} ranks since {now}{after}. {data}."
    if moved:
        line += f" Renumbered, though errors keep the old numbers: rank {moved}."
    if 0 in lost:
        line += " Timelines end with rank 0, which collected them."
    return line
