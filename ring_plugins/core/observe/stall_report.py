"""The stall report: what missing ranks are doing, a guess at the cause, and the text that the user reads."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ring_plugins.core.base.errors import name_ranks
from ring_plugins.core.base.member import Member, Members
from ring_plugins.core.collectives.api import Activity
from ring_plugins.core.linux import process
from ring_plugins.core.trace.steps import steps

#: Frames of a stack and activities in a snapshot, frames in a report, and ranks listed by number, at most.
_FRAMES, _ACTIVITIES, _LINES, _LISTED = 24, 3, 8, 8

# What a process does ------------------------------------------------------------------------------

#: States of proc(5) in words.
_STATES = {
    "R": "running",
    "S": "sleeping in the kernel",
    "D": "waiting for a disk, a network file system or a device",
    "T": "stopped",
    "t": "stopped by a debugger",
    "Z": "dead, and its parent has not noticed",
    "X": "dead",
}


def process_snapshot(activities: Iterable[Activity]) -> dict[str, Any]:
    """What the calling process is doing, as JSON can hold it.

    Args:
        activities: its last operation in each communicator.

    Returns:
        "host", "pid"; "step", the number of finished steps; "activities", the latest first, each with "communicator",
        "operation", "part_of", "number" of finished operations, and "ended", how many seconds ago it ended (None if it
        is under way); "stack", the innermost frames of the main thread, outermost first: file, line, function, source.
    """
    now = time.monotonic()
    latest = sorted(activities, key=lambda activity: activity.ended or now, reverse=True)
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    stack = traceback.extract_stack(frame)[-_FRAMES:] if frame is not None else []
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "step": steps.count,
        "activities": [
            {
                "communicator": activity.communicator,
                "operation": activity.operation,
                "part_of": activity.part_of,
                "number": activity.number,
                "ended": now - activity.ended if activity.ended else None,
            }
            for activity in latest[:_ACTIVITIES]
        ],
        "stack": [[entry.filename, entry.lineno, entry.name, entry.line or ""] for entry in stack],
    }


def process_state(pid: int) -> dict[str, Any]:
    """What the kernel reports about another process of this host.

    Returns:
        "state", its letter in proc(5), "" if there is no such process; "text", the same in words, with the kernel
        function it waits in if this user may see that.
    """
    letter = process.state(pid)
    if not letter:
        return {"state": "", "text": "gone"}
    text = _STATES.get(letter, f"in state {letter}")
    with contextlib.suppress(OSError), open(f"/proc/{pid}/wchan") as file:
        function = file.read().strip("\0\n ")
        if function not in ("", "0"):
            text += f" (in {function})"
    return {"state": letter, "text": text}


class Absent(NamedTuple):
    """What is known of a missing rank.

    Attributes:
        snapshot: its answer (`process_snapshot`), None if it does not answer.
        state: what another rank of its host saw (`process_state`), None if no rank could look.
    """

    snapshot: dict[str, Any] | None
    state: dict[str, Any] | None


# Why it is missing --------------------------------------------------------------------------------


class _Clue(NamedTuple):
    """The meaning of a stack that passes through certain code.

    Attributes:
        files: parts of file names.
        functions: parts of function names; frames of this package do not count.
        meaning: the sentence for the report.
    """

    files: tuple[str, ...]
    functions: tuple[str, ...]
    meaning: str


#: The first clue that matches any frame counts.
_CLUES = (
    _Clue(("/pdb.py", "/bdb.py", "debugpy"), (), "it is stopped in a debugger"),
    _Clue(
        ("/torch/utils/data/", "/tensorflow/python/data/", "data_adapters/", "/datasets/", "/webdataset/", "/PIL/"),
        ("next_data", "load_batch", "read_batch", "__getitem__", "get_batch"),
        "its data loader is slow, or has no data",
    ),
    _Clue(
        ("/torch/serialization.py", "/saving/", "checkpoint", "/h5py/", "/safetensors/", "/fsspec/", "/orbax/"),
        ("save_checkpoint", "save_model", "save_weights", "dump_checkpoint"),
        "it is writing or reading a checkpoint; let all ranks wait for it, or raise RING_STALL_WARNING",
    ),
    _Clue(
        ("evaluation_loop.py",),
        ("validat", "evaluat", "eval_", "test_step", "_eval"),
        "it is evaluating while the others train; let all ranks evaluate, each on its share",
    ),
    _Clue(
        ("/torch/_inductor/", "/torch/_dynamo/", "/jax/_src/interpreters/", "/jax/_src/compiler.py", "/triton/"),
        ("trace_function", "xla_compile"),
        "it is compiling; data of a new shape makes a rank recompile",
    ),
    _Clue(("/requests/", "/urllib", "/http/client.py", "/socket.py", "/ssl.py"), (), "it is waiting for the network"),
    _Clue(("/subprocess.py",), (), "it is waiting for another program"),
)


def likely_cause(snapshot: dict[str, Any] | None, state: dict[str, Any] | None, step: int, waits_in: str) -> str:
    """A guess at why a rank is missing, in a sentence.

    Args:
        snapshot, state: see `Absent`.
        step: number of steps that the waiting ranks have finished.
        waits_in: the operation in which the missing rank itself waits, "" if it does not.
    """
    letter = state["state"] if state is not None else "?"
    if letter in ("T", "t"):
        return "the process is stopped (Ctrl-Z, SIGSTOP or a debugger); `kill -CONT` resumes it"
    if letter in ("Z", "X", ""):
        return "the process is dead"
    if snapshot is None:
        if state is None:
            return "its host is down or cut off, or it is in native code that holds the GIL"
        if letter == "D":
            return "a disk or network file system does not respond"
        return "it is in native code that holds the GIL"
    if waits_in:
        return f"it took another path through the program: it is itself waiting in {waits_in}"
    return (
        _cause_in_stack(snapshot["stack"], snapshot["step"] - step)
        or "it is computing, or waiting for something, in the lines above"
    )


def _cause_in_stack(stack: Sequence[Sequence[Any]], steps_ahead: int) -> str:
    frames = [(str(file), str(function)) for file, _, function, _ in stack if not _is_ours(str(file))]
    if frames and frames[-1][1] in ("_shutdown", "_run_exitfuncs", "_at_exit"):
        return "its script has ended; the ranks took different numbers of steps"
    for clue in _CLUES:
        for file, function in frames:
            if any(part in file for part in clue.files) or any(part in function.lower() for part in clue.functions):
                return clue.meaning
    if steps_ahead > 0:
        plural = "s" if steps_ahead > 1 else ""
        return f"it has finished {steps_ahead} more step{plural} than the waiting ranks and left the loop"
    return ""


def _is_ours(file: str) -> bool:
    """Whether a frame belongs to this package."""
    return "/ring_plugins/" in file and "/tests/" not in file


# The report ---------------------------------------------------------------------------------------


class Waiting(NamedTuple):
    """A rank that waits, as rank 0 knows it.

    Attributes:
        rank: the one that waits.
        communicator, what, number, part_of: the operation it waits in; see `LongWait`.
        missing: the ranks it waits for.
        since: time of rank 0's `time.monotonic` at which the wait began.
        blocked_since: the same for its script, 0 while that computes.
        clock: local time on its host at which the wait began.
        on_gpu: whether its GPU waits. NCCL does not say for which ranks, so `missing` then has all other members.
        step: number of steps that it has finished.
        hindrances: sentences on what keeps it from other operations, if that is known.
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
    step: int = 0
    hindrances: str = ""

    @property
    def operation(self) -> str:
        """The operation, whichever of its stages waits."""
        return self.what.removesuffix(" between hosts")


def without_arrived_gpus(waits: Sequence[Waiting]) -> list[Waiting]:
    """The same waits, but a GPU waits only for ranks whose own GPU has not reached that operation or a later one."""
    arrived: dict[str, dict[int, int]] = {}
    for wait in waits:
        if wait.on_gpu:
            arrived.setdefault(wait.communicator, {})[wait.rank] = wait.number
    return [
        wait._replace(missing=tuple(r for r in wait.missing if arrived[wait.communicator].get(r, -1) < wait.number))
        if wait.on_gpu
        else wait
        for wait in waits
    ]


def stall_report(
    waits: Sequence[Waiting],
    absent: Mapping[int, Absent],
    members: Members,
    step: int,
    now: float,
    next_report: float,
) -> str:
    """The text of the report.

    Args:
        waits: the waits that last too long, at least one.
        absent: what is known of missing ranks; not of all if there are many.
        members: of the job.
        step: number of steps that the waiting ranks have finished.
        now: on the clock of `Waiting.since`.
        next_report: seconds until the next report.
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
            f"  {name_ranks(ranks, _LISTED)} {'has' if len(ranks) == 1 else 'have'} been waiting since {first.clock} "
            f"in {operation}"
            + (f", part of {part_of}" if part_of else "")
            + _for_ranks(sorted({rank for wait in group for rank in wait.missing}))
        )
    if cycle := _cycle(waits):
        pairs = [
            f"rank {rank} waits for rank {other}" for rank, other in zip(cycle, cycle[1:] + cycle[:1], strict=True)
        ]
        lines.append(f"  likely a deadlock: {', '.join(pairs)}")
    for rank, found in sorted(absent.items()):
        own = [wait for wait in waits if wait.rank == rank]
        lines += _absent_lines(rank, members.known[rank], found, step, own[0].operation if own else "")
    lines.append(f"  Next report in {next_report:.0f} s. RING_STALL_ABORT=seconds would end a stalled job.")
    return "\n".join(lines)


def _cycle(waits: Sequence[Waiting]) -> list[int]:
    """Ranks whose scripts wait, each for the next and the last for the first; empty if there are none.

    A rank does not wait in vain for one that is in the same operation or a later one: bytes are on their way.
    """
    reached: dict[tuple[int, str], int] = {}
    for wait in waits:
        place = wait.rank, wait.communicator
        reached[place] = max(wait.number, reached.get(place, -1))
    missing: dict[int, set[int]] = {}
    for wait in waits:
        if wait.blocked_since:
            late = {rank for rank in wait.missing if reached.get((rank, wait.communicator), -1) < wait.number}
            missing.setdefault(wait.rank, set()).update(late)
    ranks, before = set(missing), -1
    while len(ranks) != before:  # leave out those that wait for none of the rest, which may arrive
        before = len(ranks)
        ranks = {rank for rank in ranks if missing[rank] & ranks}
    path: list[int] = []
    while ranks and (rank := min(missing[path[-1]] & ranks if path else ranks)) not in path:
        path.append(rank)
    return path[path.index(rank) :] if path else []


def _for_ranks(missing: Sequence[int]) -> str:
    if missing:
        return f", for {name_ranks(missing, _LISTED)}"
    return (
        ", which all ranks have reached: NCCL makes no progress. NCCL_DEBUG=INFO shows the network that it uses; ranks "
        "that pass different sizes look like this too"
    )


def _absent_lines(rank: int, peer: Member, found: Absent, step: int, waits_in: str) -> list[str]:
    lines = [f"  missing: rank {rank} (process {peer.pid} on {peer.host})"]
    snapshot, state = found
    if snapshot is None:
        seen = state["text"] if state else "not visible to any other rank"
        lines.append(f"    does not answer; its process is {seen}")
    else:
        if snapshot["activities"]:
            done = f"{snapshot['step']} steps done"
            lines.append(f"    last operation: {_activity_text(snapshot['activities'][0])}; {done}")
        else:
            lines.append("    has called no operation so far")
        lines.append("    its main thread:")
        lines += _stack_lines(snapshot["stack"])
    lines.append(f"    likely: {likely_cause(snapshot, state, step, waits_in)}")
    return lines


def _activity_text(activity: Mapping[str, Any]) -> str:
    text = f"{activity['communicator']}: {activity['operation']}"
    if activity["part_of"]:
        text += f" of {activity['part_of']}"
    ended = activity["ended"]
    return f"{text}, " + ("under way" if ended is None else f"finished {ended:.0f} s ago")


def _stack_lines(stack: Sequence[Sequence[Any]]) -> list[str]:
    """The innermost frames; of this package only the first one, which shows where it was called."""
    shown: list[str] = []
    for file, line, function, source in stack:
        shown.append(f"      {file}, line {line}, in {function}" + (f": {source}" if source else ""))
        if _is_ours(str(file)):
            break
    return shown[-_LINES:] or ["      (it has none)"]
