"""Barriers among the ranks of a host, by counters in shared memory.

Each member has a control page with a *milestone*, a number that only its owner raises. A barrier is raising
the own and waiting until all others are as high. The first barrier of every operation also compares what the
members are doing.

Who has to wait longer than a moment sleeps in the kernel until a missing member wakes it: looking again every
50 µs took a tenth of the processor from a rank that computes meanwhile. A member that sleeps says so in its page,
so that others spend a system call on waking only where somebody sleeps. Saying so and looking may cross, which
loses a waking; therefore nobody sleeps longer than a millisecond without looking.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from ring_plugins.core.base.errors import MismatchError
from ring_plugins.core.base.types import Bytes
from ring_plugins.core.collectives.fingerprint import Fingerprint, mismatch
from ring_plugins.core.control.wait import Wait
from ring_plugins.core.linux import futex
from ring_plugins.core.linux.shared_memory import publish

#: Bytes of a control page.
PAGE = 4096
_MILESTONE, _SLEEPS = 0, 1  # words of it, in one cache line
_FINGERPRINTS = 8  # word of the first of two signatures, a cache line away from the milestone
_TEXT = 1024
#: What a control page's text is: the own operation, or what went wrong between hosts.
_FINGERPRINT, _VERDICT = 1, 2
_LONGEST_SLEEP = 1e-3


class SharedMemoryBarrier:
    """One member's view of everyone's control pages.

    Args:
        pages: all members' pages in rank order, `PAGE` bytes of zeros to begin with.
        ranks: their world ranks.
        position: which of them this process is.
        wait: how to wait.
        name: of the communicator, for texts.
    """

    def __init__(self, pages: Sequence[Bytes], ranks: Sequence[int], position: int, wait: Wait, name: str) -> None:
        self._ranks, self._position, self._wait, self._name = tuple(ranks), position, wait, name
        self._clocks = [memoryview(page).cast("B").cast("q") for page in pages]
        self._clock = self._clocks[position]
        self._others = [clock for i, clock in enumerate(self._clocks) if i != position]
        self._addresses = [int(page.ctypes.data) for page in pages]
        self._texts = [page[_TEXT:] for page in pages]
        self._milestone = 0
        self._operation = 0
        self._current = Fingerprint(0, "start")

    def barrier(self, arrival: bool = False, meanwhile: Callable[[], None] | None = None) -> None:
        """Return when all members have called.

        Args:
            arrival: whether it is the first of an operation, where members come from work of different length.
            meanwhile: called again and again by a member that has to wait.
        """
        self._milestone += 1
        publish()
        self._clock[_MILESTONE] = self._milestone
        for clock in self._others:
            if clock[_SLEEPS]:
                futex.wake(self._addresses[self._position])
                break
        self._await(self._milestone, arrival, meanwhile)
        publish()  # nor may what follows be read ahead of the others' clocks

    def _await(self, milestone: int, arrival: bool, meanwhile: Callable[[], None] | None) -> None:
        """Wait until all others have raised their milestone this far."""
        for clock in self._others:
            if clock[_MILESTONE] < milestone:
                break
        else:
            return
        others = self._others
        for _ in range(50):
            for clock in others:
                if clock[_MILESTONE] < milestone:
                    break
            else:
                return
        self._wait.until(
            lambda: self._are_there(milestone),
            lambda: [
                rank for rank, clock in zip(self._ranks, self._clocks, strict=True) if clock[_MILESTONE] < milestone
            ],
            lambda: f"{self._name}: {self._current.text}",
            arrival,
            lambda seconds: self._sleep(milestone, meanwhile),
        )

    def _sleep(self, milestone: int, meanwhile: Callable[[], None] | None) -> None:
        """Until the first missing member raises its milestone, or a moment."""
        if meanwhile is not None:
            meanwhile()
        for clock, address in zip(self._clocks, self._addresses, strict=True):
            seen = clock[_MILESTONE]
            if seen < milestone:
                self._clock[_SLEEPS] = 1
                futex.sleep_while(address, seen, _LONGEST_SLEEP)
                self._clock[_SLEEPS] = 0
                return

    def _are_there(self, milestone: int) -> bool:
        for rank, clock, text in zip(self._ranks, self._clocks, self._texts, strict=True):
            if clock[_MILESTONE] < milestone and text[0] == _VERDICT:
                publish()
                raise MismatchError(_read(text) or f"rank {rank} found a mismatch with another host.")
        return all(clock[_MILESTONE] >= milestone for clock in self._others)

    def tell(self, error: MismatchError) -> None:
        """Let members that wait for this one raise what it found out about other hosts, where they cannot look."""
        self._write(str(error), _VERDICT)

    def _write(self, text: str, kind: int) -> None:
        data = np.frombuffer(text.encode()[: PAGE - _TEXT - 1], np.uint8)
        own = self._texts[self._position]
        own[1 : 1 + data.size] = data
        own[1 + data.size :] = 0
        publish()
        own[0] = kind

    def arrive(self, fingerprint: Fingerprint, meanwhile: Callable[[], None] | None = None) -> None:
        """The first barrier of an operation, which also finds members that are in another one."""
        self._current = fingerprint
        self._operation += 1
        slot = _FINGERPRINTS + (self._operation & 1)
        self._clock[slot] = fingerprint.code
        self.barrier(arrival=True, meanwhile=meanwhile)
        for clock in self._others:
            if clock[slot] != fingerprint.code:
                self._report_mismatch(slot)

    def _report_mismatch(self, slot: int) -> None:
        """Exchange texts and raise: all members see the difference, so all come here."""
        self._write(self._current.text, _FINGERPRINT)
        end = time.monotonic() + 2.0
        while time.monotonic() < end and not all(t[0] for t in self._texts):
            time.sleep(0.001)
        calls = {rank: _read(t) or "another operation" for rank, t in zip(self._ranks, self._texts, strict=True)}
        raise mismatch(self._name, calls)


def _read(text: Bytes) -> str:
    return bytes(text[1:]).rstrip(b"\0").decode(errors="replace")
