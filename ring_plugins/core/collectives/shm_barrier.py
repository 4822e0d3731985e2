"""A barrier among the ranks of one host: epoch counters in shared memory, and a futex to sleep on.

**Problem.** A small all-reduce is a few copies and one barrier, so the barrier dominates its cost: a system call would
take as long as the copies. Yet a wait may also be long: while the slowest rank computes for some milliseconds more, the
others must leave the processor to it.

**Counters.** Each member owns a control page that all others map. It holds the member's *epoch*, a counter that only
its owner increments. At a barrier, a member increments its epoch and waits until all others are at least as high.
Nobody writes to another member's cache line, and no atomic instructions are needed, which Python lacks. The counters
never go back, so there is no second phase as in a sense-reversing barrier (Mellor-Crummey and Scott, "Algorithms for
scalable synchronization on shared-memory multiprocessors", 1991): a member that looks late merely sees a higher number.
Each waiting member reads n-1 cache lines, which for the ranks of one host is cheaper than a tree.

**Memory ordering.** A member that sees a new epoch must also see everything that its owner wrote before raising it, and
no member may read data before it has read the epochs. Calling `publish` before the store and after the wait ensures
both. It is a full fence on Arm and POWER, and a no-op on x86, which keeps stores in order with stores and loads with
loads.

**Sleeping.** A waiting member reads the epochs 50 times, then spins for another 500 µs (`Wait.until`), then sleeps in
the kernel on the epoch of the first missing member. A core that has become idle takes long to wake up, in a virtual
machine above all, and the other members wait for it at the next barrier. Polling every 50 µs without an end took a
tenth of the processor from a rank that was computing. `futex(2)` compares the epoch once more before it sleeps, so an
epoch that was raised just before is not missed. Waking costs a system call, so a member sets a flag while it sleeps,
and a member that raises its epoch makes the call only if it sees a flag.

**Lost wake-ups.** The flag and the epoch are two words: the raising member stores its epoch and then loads the flags,
the sleeping member stores its flag and then loads the epoch (in the kernel). Every processor may let a load overtake an
earlier store (as in Dekker's algorithm), so each may miss the other's store. The remedy is not a fence in every barrier
but a limit: no member sleeps longer than 1 ms without looking again.

**Mismatches.** The first barrier of an operation also compares fingerprints. They alternate between two slots, by the
parity of the epoch, since a member may begin the next operation before another has read this one's slot, but not the
operation after that. Only if codes differ do the members write the texts to the rest of their pages, and all raise the
same error after one more barrier. They may then go on: nothing but the epoch is left of the operation.

**Interruptions.** An exception of a signal handler may end a wait after this member has announced itself, and its
script may go on to overwrite memory that the others still read. Before the script gets there, the member sets its epoch
to -1, for good. The others then never see it arrive: whoever has not seen it yet raises, and whoever has seen it has
read its memory before. This costs the barrier nothing. The published epoch is the only state of the barrier, so one
that was interrupted before publishing is as if it had never been called.

**Losses.** Where members may die (recovery.py), those that are left stand at the same barrier, but one more may die
then, so they may differ in whom they saw die. Each writes down which members it goes on without, takes over what others
have written, and waits until all others have written the same. A member is dropped if it is dead and has written
something else: whoever sees a death looks at the page behind it, so what the dead have written counts, for all alike.
So if one has seen all write the same, none drops anybody else: the first to do so would have found a page that has more
or differs. And all come to the same: those that are left take over from each other, and the dead are dropped or agree.
Two agreements take turns with two slots, since a member may begin the next one before another has read this one's.

Considered and rejected: semaphores and pthread barriers in shared memory (a system call or two for every barrier, and a
dead rank leaves them locked), and `multiprocessing.Barrier`, which needs a common parent.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet

import numpy as np

from ring_plugins.core.base.errors import MismatchError, PeerFailed, RingError
from ring_plugins.core.base.places import frames_of_call
from ring_plugins.core.base.types import Bytes
from ring_plugins.core.collectives.fingerprint import Fingerprint, fingerprint, mismatch
from ring_plugins.core.control.wait import SPIN, Wait
from ring_plugins.core.linux import shared_memory
from ring_plugins.core.linux.shared_memory import is_weakly_ordered, publish

#: Bytes of a control page.
PAGE = 4096
# Its layout, in 64-bit words: epoch and sleeping flag share a cache line, the two fingerprint slots have the next one.
_EPOCH, _SLEEPING = 0, 1
#: Of each of two slots for agreements on the lost: which agreement, a code of it and of the members that this one goes
#: on without, and these as bits by place.
_WITHOUT, _SLOT = 16, 56
_FINGERPRINTS = 8
#: Offset in bytes of the text, whose first byte is its kind.
_TEXT = 1024
_OPERATION, _MISMATCH_BETWEEN_HOSTS, _INTERRUPTED = 1, 2, 3
#: The epoch of a member that takes part no more.
_NEVER = -1
#: Reads of the epochs before `Wait.until`: members in step arrive within these few microseconds.
_LOOKS = 50
#: Seconds of spinning before the first sleep, unless there is something to do meanwhile. See docs/performance.md.
_SPIN = 500e-6
_LONGEST_SLEEP = 1e-3
#: Seconds for which a member that found a mismatch waits for the others' texts; all write them after the same barrier.
_TEXTS_TIMEOUT = 2.0


class SharedMemoryBarrier:
    """One member's view of all members' control pages.

    Args:
        pages: all members' pages in rank order, `PAGE` bytes each, zeros to begin with.
        ranks: their world ranks.
        position: which of them this process is.
        wait: long waits go through it.
        name: of the communicator, for error texts.
    """

    def __init__(self, pages: Sequence[Bytes], ranks: Sequence[int], position: int, wait: Wait, name: str) -> None:
        self._ranks, self._position, self._wait, self._name = tuple(ranks), position, wait, name
        self._pages = [memoryview(page).cast("B").cast("q") for page in pages]
        self._own = self._pages[position]
        self._others = [page for i, page in enumerate(self._pages) if i != position]
        self._addresses = [int(page.ctypes.data) for page in pages]
        self._texts = [page[_TEXT:] for page in pages]
        self._fingerprint = Fingerprint(0, "start")

    def keep(self, places: Sequence[int], epoch: int) -> None:
        """Go on with the members at `places`; the others are gone.

        Args:
            places: of those that stay.
            epoch: to go on from, the same for all and higher than any before.
        """
        publish()
        self._own[_EPOCH] = epoch
        self._ranks = tuple(self._ranks[place] for place in places)
        self._pages = [self._pages[place] for place in places]
        self._addresses = [self._addresses[place] for place in places]
        self._texts = [self._texts[place] for place in places]
        self._position = list(places).index(self._position)
        self._others = [page for i, page in enumerate(self._pages) if i != self._position]

    def agree_on_lost(self, view: int, number: int, dead: Callable[[], AbstractSet[int]]) -> list[int]:
        """Agree with the members that are left on those that are lost; each calls this when it has given up a barrier.

        Args:
            view: of the job's members, equal on all.
            number: of the agreement in that view, equal on all and one more than before.
            dead: returns the world ranks of members that are proven to be dead, perhaps with others.

        Returns:
            The world ranks of the lost.
        """
        agreement, lost = fingerprint("lost", detail=f"{number} in view {view}").code, 0  # bits by place
        first = _WITHOUT + number % 2 * _SLOT
        own, code, bits, end = self._own, first + 1, first + 2, first + _SLOT
        own[bits:end] = _words(0)
        publish()
        own[first] = agreement

        def missing() -> list[int]:
            nonlocal lost
            while True:
                mine = fingerprint("lost", detail=f"{lost} in {number} in view {view}").code
                gone = dead()
                own[bits:end] = _words(lost)
                publish()
                own[code] = mine
                absent, found = [], 0
                for place, (rank, page) in enumerate(zip(self._ranks, self._pages, strict=True)):
                    if not lost >> place & 1 and page[code] != mine:
                        absent.append(rank)
                        if rank in gone:
                            found |= 1 << place
                        elif page[first] == agreement:
                            publish()
                            found |= int.from_bytes(page[bits:end].tobytes(), sys.byteorder)
                if found | lost == lost:
                    return absent
                lost |= found

        self._wait.until(
            lambda: not missing(), missing, lambda: f"{self._name}: the agreement on the ranks of this host"
        )
        return sorted(rank for place, rank in enumerate(self._ranks) if lost >> place & 1)

    @property
    def parity(self) -> int:
        """0 or 1, alternating from barrier to barrier; equal on all members that are before the same one."""
        return self._own[_EPOCH] & 1

    def arrive(self, fingerprint: Fingerprint, meanwhile: Callable[[], None] | None = None) -> None:
        """The first barrier of an operation, which checks that all members are in the same one.

        Args:
            fingerprint: of the operation.
            meanwhile: called repeatedly while this member waits.

        Raises:
            MismatchError: the members are in different operations.
        """
        self._fingerprint = fingerprint
        slot = _FINGERPRINTS + (self._own[_EPOCH] & 1)
        self._own[slot] = fingerprint.code
        self.synchronize(arrival=True, meanwhile=meanwhile)
        for page in self._others:
            if page[slot] != fingerprint.code:
                self._raise_mismatch()

    def synchronize(self, arrival: bool = False, meanwhile: Callable[[], None] | None = None) -> None:
        """Return when all members have called.

        Args:
            arrival: whether this is the first barrier of an operation, which members reach at different times.
            meanwhile: called repeatedly while this member waits.
        """
        epoch = self._own[_EPOCH] + 1
        if epoch <= 0:
            raise RingError(f"{self._name}: this rank takes part no more.")
        self._wait.begun = True
        if is_weakly_ordered:
            publish()
        self._own[_EPOCH] = epoch
        others = self._others
        for page in others:
            if page[_SLEEPING]:
                shared_memory.wake(self._addresses[self._position])
                break
        for _ in range(_LOOKS):
            for page in others:
                if page[_EPOCH] < epoch:
                    break
            else:
                break
        else:
            self._wait_for(epoch, arrival, meanwhile)
        if is_weakly_ordered:
            publish()

    def _wait_for(self, epoch: int, arrival: bool, meanwhile: Callable[[], None] | None) -> None:
        self._wait.until(
            lambda: self._have_arrived(epoch),
            lambda: [rank for rank, page in zip(self._ranks, self._pages, strict=True) if page[_EPOCH] < epoch],
            lambda: f"{self._name}: {self._fingerprint.text}",
            arrival,
            lambda seconds: self._sleep(epoch, meanwhile),
            _SPIN if meanwhile is None else SPIN,
        )

    def _have_arrived(self, epoch: int) -> bool:
        for page in self._pages:  # with this rank's own, whose thread may have been interrupted
            if page[_EPOCH] < epoch:
                break
        else:
            return True
        self.raise_reported()
        return False

    def _sleep(self, epoch: int, meanwhile: Callable[[], None] | None) -> None:
        """Sleep until the first missing member raises its epoch, for `_LONGEST_SLEEP` at most."""
        if meanwhile is not None:
            meanwhile()
        for page, address in zip(self._pages, self._addresses, strict=True):
            seen = page[_EPOCH]
            if seen < epoch:
                self._own[_SLEEPING] = 1
                shared_memory.sleep_while(address, seen, _LONGEST_SLEEP)
                self._own[_SLEEPING] = 0
                return

    def report_mismatch(self, error: MismatchError) -> None:
        """Make members that wait for this one raise `error` too, which it found between hosts.

        Nothing is written after a mismatch on this host: all members know of it, and some may still read the text.
        """
        if self._texts[self._position][0] != _OPERATION:
            self._write(str(error), _MISMATCH_BETWEEN_HOSTS)

    def raise_reported(self) -> None:
        """Raise what keeps the operation from finishing, if a member reported it: an interruption, or a mismatch."""
        for rank, page, text in zip(self._ranks, self._pages, self._texts, strict=True):
            if page[_EPOCH] == _NEVER:
                publish()
                raise PeerFailed(_read(text) or f"rank {rank} was interrupted.", rank)
            if text[0] == _MISMATCH_BETWEEN_HOSTS and rank != self._ranks[self._position]:
                publish()
                raise MismatchError(_read(text) or f"rank {rank} found a mismatch with another host.")

    def withdraw(self, text: str) -> None:
        """Take part no more, and make members that wait for this one raise `PeerFailed` with this text."""
        self._write(text, _INTERRUPTED)
        publish()
        self._own[_EPOCH] = _NEVER
        shared_memory.wake(self._addresses[self._position])

    def _write(self, text: str, kind: int) -> None:
        data = np.frombuffer(text.encode()[: PAGE - _TEXT - 1], np.uint8)
        own = self._texts[self._position]
        own[1 : 1 + data.size] = data
        own[1 + data.size :] = 0
        publish()
        own[0] = kind

    def _raise_mismatch(self) -> None:
        """Exchange texts and raise; every member sees that codes differ, so all of them call this."""
        self._write("\n".join([self._fingerprint.text, *_shortened(frames_of_call())]), _OPERATION)
        end = time.monotonic() + _TEXTS_TIMEOUT
        while time.monotonic() < end and not all(text[0] for text in self._texts):
            time.sleep(0.001)
        publish()  # read the texts only after their kinds
        calls = {rank: _read(text) or "another operation" for rank, text in zip(self._ranks, self._texts, strict=True)}
        self.synchronize()  # all have read the texts, and are in step again
        self._texts[self._position][0] = 0
        raise mismatch(self._name, calls)


def _words(bits: int) -> memoryview:
    """As a slot has them."""
    return memoryview(bits.to_bytes((_SLOT - 2) * 8, sys.byteorder)).cast("q")


def _shortened(frames: Sequence[str]) -> Sequence[str]:
    """As many frames as fit into a page."""
    room = PAGE - _TEXT - 1024
    while len(frames) > 1 and len("\n".join(frames).encode()) > room:
        middle = len(frames) // 2
        frames = [*frames[:middle], *frames[middle + 1 :]]
    return frames


def _read(text: Bytes) -> str:
    return bytes(text[1:]).rstrip(b"\0").decode(errors="replace")
