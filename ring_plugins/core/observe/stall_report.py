"""What a person reads when ranks wait: pure text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ring_plugins.core.failure import Peer
from ring_plugins.core.observe.causes import guess, is_ours

_LISTED, _LINES = 8, 8


class Waiting(NamedTuple):
    """A rank that waits, as rank 0 knows it.

    Attributes:
        rank: who waits.
        communicator, what, number, part_of: in which operation, the how many-th, and what that is a part of.
        missing: for whom.
        since: time of rank 0's `time.monotonic` at which it began.
        blocked_since: the same for its script, 0 while that computes.
        clock: when it began, on the wall of its host.
        on_gpu: whether it is a GPU that waits. NCCL does not tell for whom: `missing` are then all others.
    """

    rank: int
    communicator: str
    what: str
    number: int
    part_of: str
    missing: tuple[int, ...]
    since: float
    blocked_since: float
    clock: str
    on_gpu: bool = False

    @property
    def operation(self) -> str:
        """What the communicator does, however it is carried out."""
        return self.what.removesuffix(" between hosts")


def without_those_who_came(waits: Sequence[Waiting]) -> list[Waiting]:
    """The same waits, where a GPU waits only for ranks whose GPUs do not wait in that operation, or a later one."""
    came: dict[str, dict[int, int]] = {}
    for wait in waits:
        if wait.on_gpu:
            came.setdefault(wait.communicator, {})[wait.rank] = wait.number
    return [
        wait._replace(missing=tuple(r for r in wait.missing if came[wait.communicator].get(r, -1) < wait.number))
        if wait.on_gpu
        else wait
        for wait in waits
    ]


class Absent(NamedTuple):
    """A rank that is waited for.

    Attributes:
        account: what it says (`whereabouts.own_account`), None where it does not answer.
        kernel: what the kernel says (`whereabouts.kernel_account`), None where nobody could look.
    """

    account: dict[str, Any] | None
    kernel: dict[str, Any] | None


def ranks_of(ranks: Sequence[int]) -> str:
    """ "rank 3", "ranks 1, 2, 5", or their number where there are many."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:_LISTED]))
    return f"ranks {shown}" + (f" and {len(ranks) - _LISTED} more" if len(ranks) > _LISTED else "")


def report(
    waits: Sequence[Waiting],
    absent: Mapping[int, Absent],
    roster: Sequence[Peer],
    step: int,
    now: float,
    next_report: float,
) -> str:
    """The report.

    Args:
        waits: the waits that last too long.
        absent: the ranks that are waited for and do not wait themselves for one of the others, and as many of the rest
            as are of interest; what is known of each.
        roster: where all ranks are.
        step: steps that the waiting ranks have finished.
        now: as `Waiting.since`.
        next_report: in how many seconds the next one comes.
    """
    longest = max(now - wait.since for wait in waits)
    lines = [f"stalled for {longest:.0f} s."]
    by_operation: dict[tuple[str, str], list[Waiting]] = {}
    for wait in waits:
        by_operation.setdefault((wait.operation, wait.part_of), []).append(wait)
    for (operation, part_of), group in by_operation.items():
        ranks = sorted({wait.rank for wait in group})
        first = min(group, key=lambda wait: wait.since)
        lines.append(
            f"  {ranks_of(ranks)} wait{'s' if len(ranks) == 1 else ''} since {first.clock} in {operation}"
            + (f", part of {part_of}" if part_of else "")
            + _for_whom(sorted({rank for wait in group for rank in wait.missing}))
        )
    for rank, found in sorted(absent.items()):
        own = [wait for wait in waits if wait.rank == rank]
        lines += _absent(rank, roster[rank], found, step, own[0].operation if own else "")
    lines.append(f"  Next report in {next_report:.0f} s. RING_STALL_ABORT=seconds would end a stalled job.")
    return "\n".join(lines)


def _for_whom(missing: Sequence[int]) -> str:
    if missing:
        return f", for {ranks_of(missing)}"
    return (
        ", to which all have come: NCCL does not get through. NCCL_DEBUG=INFO shows the network that it uses; ranks "
        "that pass different sizes look like this too"
    )


def _absent(rank: int, peer: Peer, found: Absent, step: int, waits_in: str) -> list[str]:
    lines = [f"  missing: rank {rank} (process {peer.pid} on {peer.host})"]
    account, kernel = found
    if account is None:
        lines.append(f"    does not answer; its process is {kernel['said'] if kernel else 'out of sight'}")
    else:
        if account["activities"]:
            lines.append(
                f"    last in ring_plugins: {_activity(account['activities'][0])}; {account['step']} steps done"
            )
        else:
            lines.append("    has done nothing with ring_plugins so far")
        lines.append("    its main thread:")
        lines += _stack(account["stack"])
    lines.append(f"    likely: {guess(account, kernel, step, waits_in)}")
    return lines


def _activity(activity: Mapping[str, Any]) -> str:
    text = f"{activity['communicator']}: {activity['operation']}"
    if activity["part_of"]:
        text += f" of {activity['part_of']}"
    ended = activity["ended"]
    return f"{text}, " + ("under way" if ended is None else f"finished {ended:.0f} s ago")


def _stack(stack: Sequence[Sequence[Any]]) -> list[str]:
    """The innermost lines, without those of this package except the first of them: where it was called."""
    shown: list[str] = []
    for file, line, function, source in stack:
        shown.append(f"      {file}, line {line}, in {function}" + (f": {source}" if source else ""))
        if is_ours(str(file)):
            break
    return shown[-_LINES:] or ["      (it has none)"]
