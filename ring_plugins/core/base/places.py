"""Where in the user's code something happened, and whether it is the same place on two ranks.

A user's frame is one that belongs neither to this package, nor to an installed one, nor to Python itself. Two ranks are
at the same place only if all their user's frames agree, and the framework's innermost one: a helper that calls a
collective may have been called from different lines, and `trainer.fit()` may be in its progress bar on one rank only.
Texts show few of many frames, and a checksum of the others.
"""

from __future__ import annotations

import functools
import sys
import sysconfig
import threading
import traceback
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import CodeType
from typing import TypeVar

T = TypeVar("T")

_PACKAGE = str(Path(__file__).parents[2])
_INSTALLED = ("/site-packages/", "/dist-packages/")
#: How many of the user's innermost and outermost frames are named.
_INNER, _OUTER = 4, 3
#: By thread, the frames of the call that it works for, innermost first: code, and the position in it.
_calls: dict[int, list[tuple[CodeType, int]]] = {}


@functools.lru_cache(maxsize=4096)
def _owner(file: str) -> str:
    """Whose code a file holds: "ours", "installed", "python" or "user"."""
    if file.startswith(f"{_PACKAGE}/"):
        return "ours"
    if any(part in file for part in _INSTALLED):
        return "installed"
    return "python" if file.startswith(("<frozen", sysconfig.get_path("stdlib"))) else "user"


def frames_of_user(frames: Iterable[tuple[str, int]]) -> list[str]:
    """The user's frames among these, and the framework's innermost one: "train.py, line 12", the innermost first.

    Args:
        frames: file and line, the innermost first.
    """
    told: list[str] = []
    inner = ""  # the framework's, which follows the user's own place
    for file, line in frames:
        owner = _owner(file)
        if owner in ("ours", "python") or ((told or inner) and (owner == "installed" or file == "<string>")):
            continue
        if owner == "installed":
            inner = f"{next(file.rpartition(part)[2] for part in _INSTALLED if part in file)}, line {line}"
        else:
            told.append(f"{file}, line {line}{inner and f', in {inner}' if not told else ''}")
    return told or [inner] * bool(inner)


def described(frames: Sequence[str], common: int = 0) -> str:
    """A place as people read it, such as "train.py, line 12, called from line 40"; "" without frames.

    Args:
        frames: from `frames_of_user`.
        common: how many of the outermost ones other ranks have, too; the ones around there are shown.
    """
    few, count = _INNER + _OUTER, len(frames)
    around = count - max(common + 2, _OUTER)
    shown = {*range(_INNER), *range(around, around + _OUTER)} if count > few + 1 else range(count)
    told, last, hidden = [], "", []
    for i, frame in enumerate(frames):
        if i not in shown:
            hidden.append(frame)
            if i + 1 == count or i + 1 in shown:
                told.append(f"{len(hidden)} more ({zlib.crc32(' '.join(hidden).encode()):08x})")
                hidden = []
            continue
        path, _, line = frame.partition(", line ")
        told.append(f"line {line}" if path == last else frame)
        last = path
    first, callers = " ".join(told[:1]), " and ".join(told[1:])
    return f"{first}, called from {callers}" if callers else first


def place(frames: Iterable[tuple[str, int]]) -> str:
    """A place as people read it; arguments as of `frames_of_user`."""
    return described(frames_of_user(frames))


def place_of(error: BaseException) -> str:
    """Where an error was raised."""
    return place((frame.filename, frame.lineno or 0) for frame in reversed(traceback.extract_tb(error.__traceback__)))


def frames_of_call() -> list[str]:
    """Where the calling thread, or the call it works for, is in the user's code; else where the main thread is."""
    for ident in (threading.get_ident(), threading.main_thread().ident or 0):
        frames = [(code.co_filename, _line(code, at)) for code, at in _calls.get(ident) or _stack_of(ident)]
        if any(_owner(file) == "user" for file, _ in frames):
            return frames_of_user(frames)
    return []


def place_of_call() -> str:
    """As people read it."""
    return described(frames_of_call())


def place_of_thread(ident: int) -> str:
    """Where a thread is in the user's code."""
    return place((code.co_filename, _line(code, at)) for code, at in _stack_of(ident))


def called_here(function: Callable[[], T]) -> Callable[[], T]:
    """Let `function`, which another thread will run, be at the place where this thread is now."""
    frames = _stack_of(threading.get_ident())  # neither frames, whose variables would live on, nor texts: slow

    def run() -> T:
        ident = threading.get_ident()
        _calls[ident] = frames
        try:
            return function()
        finally:
            _calls.pop(ident, None)

    return run


def _stack_of(ident: int) -> list[tuple[CodeType, int]]:
    frame = sys._current_frames().get(ident)
    found = []
    while frame is not None:
        found.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return found


def _line(code: CodeType, at: int) -> int:
    """The line of a position in code."""
    return next((line or 0 for first, end, line in code.co_lines() if first <= at < end), 0)
