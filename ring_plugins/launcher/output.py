"""What ranks print: passed on as it is, with the rank in front of each line, or written to files."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TextIO


class Relay:
    """Where ranks print to. Lines that are passed on from several ranks never mix.

    Used as a context, which ends when everything that was printed has been passed on.

    Args:
        tag: put `[rank] ` in front of each line.
        directory: write each rank's output to `rank.N.out` and `rank.N.err` in there instead.
        always: relay also where neither is asked for, because standard output is no file here, as in a notebook.
    """

    def __init__(self, tag: bool, directory: str | None = None, always: bool = False) -> None:
        self._tag, self._directory = tag, Path(directory) if directory else None
        self._needed = tag or always
        self._threads: list[threading.Thread] = []
        self._given: list[int] = []
        self._lock = threading.Lock()
        if self._directory is not None:
            self._directory.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Relay:  # noqa: PYI034 - typing.Self is younger than Python 3.10
        return self

    def __exit__(self, *_: object) -> None:
        if self._given:  # a rank could not be started
            self.start()
        for thread in self._threads:
            # A process that a rank left behind may hold its end of the pipe open.
            thread.join(5.0)

    def ends(self, rank: int) -> tuple[int | None, int | None]:
        """Where a rank is to write its standard output and error: for Popen; call `start` after the last one."""
        if self._directory is not None:
            return self._file(f"rank.{rank}.out"), self._file(f"rank.{rank}.err")
        if not self._needed:
            return None, None
        return self._pipe(rank, lambda: sys.stdout), self._pipe(rank, lambda: sys.stderr)

    def start(self) -> None:
        """All ranks run and have their ends: close them here, so that each pipe ends with its rank, and begin."""
        while self._given:
            os.close(self._given.pop())
        for thread in self._threads:
            thread.start()

    def _file(self, name: str) -> int:
        assert self._directory is not None
        self._given.append(os.open(self._directory / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666))
        return self._given[-1]

    def _pipe(self, rank: int, stream: Callable[[], TextIO]) -> int:
        reading, writing = os.pipe()
        self._given.append(writing)
        prefix = f"[{rank}] " if self._tag else ""
        self._threads.append(
            threading.Thread(
                target=self._pass_on, args=(reading, stream, prefix), name=f"ring:output {rank}", daemon=True
            )
        )
        return writing

    def _pass_on(self, reading: int, stream: Callable[[], TextIO], prefix: str) -> None:
        with os.fdopen(reading, "rb") as pipe:
            for line in pipe:
                text = line.decode(errors="replace")
                with self._lock, contextlib.suppress(OSError, ValueError):
                    stream().write(prefix + text if text.endswith("\n") else f"{prefix}{text}\n")
                    stream().flush()
