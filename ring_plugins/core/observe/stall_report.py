"""What a person reads when ranks wait: pure text.

What a process is doing: by its own account, or, where it does not answer, as far as the kernel tells.

A guess at why a rank does not come, from what it and the kernel say.
"""

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
from ring_plugins.core.collectives.api import Activity
from ring_plugins.core.control.failure_detector import Peer
from ring_plugins.core.trace.steps import steps

_FRAMES = 24
_STATES = {
    "R": "running",
    "S": "sleeping in the kernel",
    "D": "waiting for a disk, a network file system or a device",
    "T": "stopped",
    "t": "stopped by a debugger",
    "Z": "dead, and its parent has not noticed",
    "X": "dead",
}


def own_account(activities: Iterable[Activity]) -> dict[str, Any]:
    """What the calling process is doing, as JSON can hold it.

    Args:
        activities: what it did last with each of its communicators.

    Returns:
        host, pid; "step", how many have ended; "activities", the latest first: communicator, operation, part_of,
        number of operations finished, and how many seconds ago the last ended (None: it is under way); "stack", the
        innermost frames of the main thread, outermost first: file, line, function, source.
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
            for activity in latest[:3]
        ],
        "stack": [[entry.filename, entry.lineno, entry.name, entry.line or ""] for entry in stack],
    }


def kernel_account(pid: int) -> dict[str, Any]:
    """What the kernel says of another process of this host.

    Returns:
        "state", its letter in proc(5), "" where there is no such process; "said", the same in words with where in the
        kernel it waits, as far as this user may know.
    """
    try:
        with open(f"/proc/{pid}/stat") as file:
            state = file.read().rpartition(")")[2].split()[0]
    except OSError:
        return {"state": "", "said": "there is no such process any more"}
    said = _STATES.get(state, f"in state {state}")
    with contextlib.suppress(OSError), open(f"/proc/{pid}/wchan") as file:
        function = file.read().strip("\0\n ")
        if function not in ("", "0"):
            said += f" (in {function})"
    return {"state": state, "said": said}


class _Sign(NamedTuple):
    """Where a stack passes through, what that means.

    Attributes:
        files: parts of file names.
        functions: parts of function names, of frames that are not this package's.
        meaning: for the report.
    """

    files: tuple[str, ...]
    functions: tuple[str, ...]
    meaning: str


#: The first that fits counts; the innermost frames are looked at first for each.
_SIGNS = (
    _Sign(("/pdb.py", "/bdb.py", "debugpy"), (), "it stands in a debugger"),
    _Sign(
        ("/torch/utils/data/", "/tensorflow/python/data/", "data_adapters/", "/datasets/", "/webdataset/", "/PIL/"),
        ("next_data", "load_batch", "read_batch", "__getitem__", "get_batch"),
        "its data loader is slow, or has no data",
    ),
    _Sign(
        ("/torch/serialization.py", "/saving/", "checkpoint", "/h5py/", "/safetensors/", "/fsspec/", "/orbax/"),
        ("save_checkpoint", "save_model", "save_weights", "dump_checkpoint"),
        "it writes or reads a checkpoint; let all ranks wait for it, or raise RING_STALL_WARNING",
    ),
    _Sign(
        ("evaluation_loop.py",),
        ("validat", "evaluat", "eval_", "test_step", "_eval"),
        "it is in evaluation while the others train: let all ranks evaluate, each its share",
    ),
    _Sign(
        ("/torch/_inductor/", "/torch/_dynamo/", "/jax/_src/interpreters/", "/jax/_src/compiler.py", "/triton/"),
        ("trace_function", "xla_compile"),
        "it compiles; data of another shape makes a rank compile anew",
    ),
    _Sign(("/requests/", "/urllib", "/http/client.py", "/socket.py", "/ssl.py"), (), "it waits for the network"),
    _Sign(("/subprocess.py",), (), "it waits for another program"),
)


def is_ours(file: str) -> bool:
    """Whether a frame belongs to this package."""
    return "/ring_plugins/" in file and "/tests/" not in file


def guess(account: dict[str, Any] | None, kernel: dict[str, Any] | None, step: int, waits_in: str) -> str:
    """Why a rank does not come, in a sentence.

    Args:
        account: what the rank says (`own_account`), None where it does not answer.
        kernel: what the kernel says (`kernel_account`), None where nobody could look.
        step: how many steps the waiting ranks have finished.
        waits_in: the operation that this rank itself waits in, "" if it does not.
    """
    state = kernel["state"] if kernel is not None else "?"
    if state in ("T", "t"):
        return "the process is stopped (Ctrl-Z, SIGSTOP or a debugger); `kill -CONT` lets it go on"
    if state in ("Z", "X", ""):
        return "the process is dead"
    if account is None:
        if kernel is None:
            return "its host is down or cut off, or it is in native code holding the GIL"
        if state == "D":
            return "a disk or network file system does not answer it"
        return "does not answer: it is in native code holding the GIL"
    if waits_in:
        return f"it took another path through the program: it waits itself, in {waits_in}"
    return (
        _from_stack(account["stack"], account["step"] - step)
        or "it computes, or waits for something, in the lines above"
    )


def _from_stack(stack: Sequence[Sequence[Any]], ahead: int) -> str:
    frames = [(str(file), str(function)) for file, _, function, _ in stack if not is_ours(str(file))]
    if frames and frames[-1][1] in ("_shutdown", "_run_exitfuncs", "_at_exit"):
        return "its script has ended; the ranks took different numbers of steps"
    for sign in _SIGNS:
        for file, function in reversed(frames):
            if any(part in file for part in sign.files) or any(part in function.lower() for part in sign.functions):
                return sign.meaning
    if ahead > 0:
        return f"it has finished {ahead} more step{'s' if ahead > 1 else ''} than the waiting ranks and left the loop"
    return ""


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


def report(
    waits: Sequence[Waiting],
    absent: Mapping[int, Absent],
    membership: Sequence[Peer],
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
            f"  {name_ranks(ranks)} wait{'s' if len(ranks) == 1 else ''} since {first.clock} in {operation}"
            + (f", part of {part_of}" if part_of else "")
            + _for_whom(sorted({rank for wait in group for rank in wait.missing}))
        )
    for rank, found in sorted(absent.items()):
        own = [wait for wait in waits if wait.rank == rank]
        lines += _absent(rank, membership[rank], found, step, own[0].operation if own else "")
    lines.append(f"  Next report in {next_report:.0f} s. RING_STALL_ABORT=seconds would end a stalled job.")
    return "\n".join(lines)


def _for_whom(missing: Sequence[int]) -> str:
    if missing:
        return f", for {name_ranks(missing)}"
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
