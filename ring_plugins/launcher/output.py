"""Where ranks print: straight to the terminal, through this process, or to files.

What passes through this process arrives as soon as a line is complete or rewound by a carriage return, as progress bars
do. An unfinished line, such as the bar itself or a question, waits a moment for its rest and is then shown. If another
rank prints meanwhile, it begins a new line.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import re
import select
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from ring_plugins.core.base.threads import HelperThread

#: Milliseconds for which an unfinished line waits for its rest: programs often write a line in pieces.
_PATIENCE = 100
_READ = 1 << 16
#: A line, the part of one before a carriage return, or what is left.
_PIECE = re.compile(r"[^\r\n]*(?:\r\n|\n|\r)|[^\r\n]+")


class Relay:
    """Hands each rank its standard output and error. Lines that it passes on never mix with those of other ranks.

    Leaving the context waits until everything printed has been passed on.

    Args:
        tag: put `[rank] ` in front of each line.
        directory: write each rank's output to `rank.N.out` and `rank.N.err` in this directory instead.
        always: relay lines without a tag too, because `sys.stdout` is no file here, as in a notebook.
    """

    def __init__(self, tag: bool, directory: str | None = None, always: bool = False) -> None:
        self._tag, self._directory = tag, Path(directory) if directory else None
        self._needed = tag or always
        self._threads: list[threading.Thread] = []
        self._open: list[int] = []
        self._sources: dict[int, list[_Source]] = {}
        self._lock = threading.Lock()
        #: Whose line is unfinished, None if every line is finished.
        self._unfinished: _Source | None = None
        if self._directory is not None:
            self._directory.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Relay:  # noqa: PYI034 - typing.Self needs Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        if self._open:  # a rank could not be started, and nobody called `start`
            self.start()
        for thread in self._threads:
            # A process that a rank left behind may keep its end of the pipe open.
            thread.join(5.0)

    def files(self, rank: int, again: bool = False) -> tuple[int | None, int | None]:
        """File descriptors for a rank's standard output and error, as Popen takes them.

        Call `start` once all ranks have theirs, and after each that is started `again`.
        """
        if self._directory is not None:
            return self._file(f"rank.{rank}.out", again), self._file(f"rank.{rank}.err", again)
        if not self._needed:
            return None, None
        return self._pipe(rank, lambda: sys.stdout), self._pipe(rank, lambda: sys.stderr)

    def rename(self, rank: int, new: int) -> None:
        """From now on, tag the lines of the process that has the files of `rank` with another rank."""
        for source in self._sources.pop(rank, ()):
            source.prefix = self._prefix(new)

    def start(self) -> None:
        """Begin to relay, and close this process's copies of the ranks' files, so that each pipe ends with its rank."""
        while self._open:
            os.close(self._open.pop())
        for thread in self._threads:
            if thread.ident is None:
                thread.start()

    def _file(self, name: str, again: bool) -> int:
        assert self._directory is not None
        how = os.O_APPEND if again else os.O_TRUNC
        self._open.append(os.open(self._directory / name, os.O_WRONLY | os.O_CREAT | how, 0o666))
        return self._open[-1]

    def _pipe(self, rank: int, stream: Callable[[], TextIO]) -> int:
        reading, writing = os.pipe()
        self._open.append(writing)
        source = _Source(self._prefix(rank), stream)
        self._sources.setdefault(rank, []).append(source)
        # Its death closes the pipe, and the rank's next print fails.
        self._threads.append(HelperThread(self._copy, f"ring:output {rank}", (reading, source)))
        return writing

    def _prefix(self, rank: int) -> str:
        return f"[{rank}] " if self._tag else ""

    def _copy(self, reading: int, source: _Source) -> None:
        decoder, rest = codecs.getincrementaldecoder("utf-8")(errors="replace"), ""
        poll = select.poll()
        poll.register(reading, select.POLLIN)
        with os.fdopen(reading, "rb", buffering=0) as pipe:
            while True:
                if rest and not poll.poll(_PATIENCE):
                    self._write(source, rest)
                    rest = ""
                data = pipe.read(_READ)
                text = rest + decoder.decode(data or b"", final=not data)
                end = len(text) if not data else max(text.rfind("\n"), text.rfind("\r")) + 1
                if end:
                    self._write(source, text[:end])
                rest = text[end:]
                if not data:
                    break
        self._write(source, "", is_last=True)

    def _write(self, source: _Source, text: str, is_last: bool = False) -> None:
        with self._lock, contextlib.suppress(OSError, ValueError, AttributeError):  # closed: drain the pipe
            before, stream = self._unfinished, source.stream()
            if before is not None and (before is not source or is_last) and (text or before is source):
                self._unfinished = None
                before.at_start, before.rewound = True, False
                before.stream().write("\n")
                before.stream().flush()
            for piece in _PIECE.findall(text):
                ends_rewound = source.rewound and piece == "\n"  # the tag of that line stands already
                stream.write(source.prefix + piece if source.at_start and not ends_rewound else piece)
                source.at_start, source.rewound = piece.endswith(("\n", "\r")), piece.endswith("\r")
                self._unfinished = None if piece.endswith("\n") else source
            stream.flush()


class _Source:
    """A rank's standard output or error.

    Attributes:
        prefix: of each of its lines.
        stream: returns where it is written.
        at_start: whether what it writes next begins a line.
        rewound: whether it ended with a carriage return, so that the line is still unfinished.
    """

    def __init__(self, prefix: str, stream: Callable[[], TextIO]) -> None:
        self.prefix, self.stream, self.at_start, self.rewound = prefix, stream, True, False
