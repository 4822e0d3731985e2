"""Where in the user's code something happened, and whether it is the same place on two ranks.

A user's frame is one that belongs neither to this package, nor to an installed one, nor to Python itself. Two ranks are
at the same place only if all their user's frames agree, and the framework's innermost one: a helper that calls a
collective may have been called from different lines, and `trainer.fit()` may be in its progress bar on one rank only.
"""

from __future__ import annotations

import functools
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterable
from pathlib import Path

_PACKAGE = str(Path(__file__).parents[2])
_INSTALLED = ("/site-packages/", "/dist-packages/")
#: The innermost of the user's frames that are named.
_MOST = 4


@functools.lru_cache(maxsize=4096)
def _owner(file: str) -> str:
    """Whose code a file holds: "ours", "installed", "python" or "user"."""
    if file.startswith(f"{_PACKAGE}/"):
        return "ours"
    if any(part in file for part in _INSTALLED):
        return "installed"
    return "python" if file.startswith(("<frozen", sysconfig.get_path("stdlib"))) else "user"


def place(frames: Iterable[tuple[str, int]]) -> str:
    """A place as people read it, such as "train.py, line 12, called from line 40"; "" if all frames are ours.

    Args:
        frames: file and line, the innermost first.
    """
    told: list[tuple[str, str]] = []
    last = ""
    for file, line in frames:
        owner = _owner(file)
        if owner in ("ours", "python") or (told and (owner == "installed" or file == "<string>")):
            continue
        path = file if owner == "user" else next(file.rpartition(part)[2] for part in _INSTALLED if part in file)
        told.append((owner, f"line {line}" if path == last else f"{path}, line {line}"))
        last = path
        if len(told) > _MOST:
            break
    if len(told) > 1 and told[0][0] == "installed":  # the user's own place first
        (_, inner), (_, outer), *callers = told
        first = f"{outer}, in {inner}"
    else:
        first, callers = told[0][1] if told else "", told[1:]
    return first + "".join(f"{', called from' if i == 0 else ' and'} {text}" for i, (_, text) in enumerate(callers))


def place_of(error: BaseException) -> str:
    """Where an error was raised."""
    return place((frame.filename, frame.lineno or 0) for frame in reversed(traceback.extract_tb(error.__traceback__)))


def place_of_call() -> str:
    """Where the calling thread is in the user's code; where the main thread is, if the caller is a thread of ours."""
    for ident in (threading.get_ident(), threading.main_thread().ident):
        found = sys._current_frames().get(ident or 0)
        frames = []
        while found is not None:
            frames.append((found.f_code.co_filename, found.f_lineno))
            found = found.f_back
        if any(_owner(file) == "user" for file, _ in frames):
            return place(frames)
    return ""
