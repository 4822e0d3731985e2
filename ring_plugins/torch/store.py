"""Exchange of items and a monitored barrier, through a torch store.

A store needs no communicator, so this works before one exists and while one hangs.

torch's stores ask for no secret: everyone who can connect to one can read and change it. So what ranks exchange through
it is JSON, never a pickle, and is signed with a secret of the job (HMAC-SHA256 over the key and the value). A stranger
who deletes or overwrites a value causes an error on the ranks, and nothing else. The outcome of a monitored barrier is
a text for the user, and is not signed.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import itertools
import json
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, cast

from torch.distributed import Store  # type: ignore[attr-defined]  # torch re-exports it unmarked

from ring_plugins.core.base.errors import PeerFailed, RingError, TimeoutExceeded, name_ranks, quoted
from ring_plugins.core.control.failure_detector import FailureDetector

#: Waits for a member until a condition is true.
Waits = Callable[[int, Callable[[], bool]], None]
#: torch.distributed's own default for `monitored_barrier`.
_BARRIER_TIMEOUT = timedelta(minutes=30)
_PASSED = b"passed"
#: The key under which a member says that it cannot construct the group, and seconds between two looks at it.
_FAILED, _LOOK = "failed", 0.1
#: Characters of a signature, which stands before the value.
_SIGNATURE = 2 * hashlib.sha256().digest_size


class GroupStore:
    """What the members of a process group exchange through a torch store, before they have a communicator.

    Args:
        store: shared by the members, under a prefix that nothing else uses.
        rank: of this process among the members.
        size: how many members there are.
        secret: that only they know, and that belongs to no other store.
        detector: knows which ranks of the job have failed; None if there is only one.
    """

    def __init__(
        self, store: Store, rank: int, size: int, secret: bytes, detector: FailureDetector | None = None
    ) -> None:
        self.store, self.rank, self.size, self.secret, self.detector = store, rank, size, secret, detector
        self._next_look = 0.0

    def exchange(self, name: str, item: Any, wait: Waits | None = None) -> list[Any]:
        """Exchange one item per member; return all in rank order.

        Args:
            name: never used before in this store.
            item: this member's, a value that JSON can hold. A tuple arrives as a list.
            wait: waits for a member until a condition is true, instead of polling for as long as the store's timeout.

        Raises:
            TimeoutExceeded: a member did not call within the store's timeout.
            PeerFailed: a member could not construct the group, or has failed.
            RingError: something that is no rank of the job has written to the store.
        """
        limit = cast("timedelta", cast(Any, self.store).timeout).total_seconds()
        own = f"{name}/{self.rank}"
        self.store.set(own, sign(own, json.dumps(item), self.secret))
        found = []
        for other in range(self.size):
            key = f"{name}/{other}"
            if wait is not None:
                wait(other, partial(self.store.check, [key]))
            late = (
                f"rank {self.rank} of {self.size} waited for rank {other} in {name} for {limit:g} s. All ranks of a "
                "group must create it; look for the error that the missing rank printed."
            )
            found.append(verify(key, _wait_for(self.store, key, limit, late, self.check), self.secret))
        return found

    def gather(self, name: str, wait: Waits | None = None) -> Callable[[Any], list[Any]]:
        """A function that exchanges items among the members, any number of times; arguments as for `exchange`."""
        rounds = itertools.count()
        return lambda item: self.exchange(f"{name}/{next(rounds)}", item, wait)

    def tell(self, rank: int, group: str, error: BaseException) -> None:
        """Make the others raise, since this member cannot construct the group, unless the error is about one of them.

        Args:
            rank: of this process in the job.
            group: what to call it.
            error: why it cannot.
        """
        if isinstance(error, PeerFailed):
            return
        text = f"{group}: rank {rank} could not construct it: {type(error).__name__}: {error}"
        with contextlib.suppress(Exception):  # the store may be what failed
            self.store.set(_FAILED, sign(_FAILED, json.dumps([rank, text]), self.secret))

    def check(self) -> None:
        """Raise if the group cannot be made; many calls cost little.

        Raises:
            PeerFailed: a member could not construct the group, or has failed.
        """
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + _LOOK
        failure = self.detector.failure() if self.detector is not None else None
        if failure is not None:
            raise failure
        if self.store.check([_FAILED]):
            rank, text = verify(_FAILED, self.store.get(_FAILED), self.secret)
            raise PeerFailed(text, rank)


def sign(key: str, value: str, secret: bytes) -> str:
    """A value as it stands in the store."""
    return hmac.new(secret, f"{key}={value}".encode(), hashlib.sha256).hexdigest() + value


def verify(key: str, data: bytes, secret: bytes) -> Any:
    """The item that a value in the store holds.

    Raises:
        RingError: no rank of the job has signed it.
    """
    signature, value = data[:_SIGNATURE], data[_SIGNATURE:]
    expected = hmac.new(secret, key.encode() + b"=" + value, hashlib.sha256).hexdigest().encode()
    if not hmac.compare_digest(signature, expected):
        raise RingError(
            f"the store of torch.distributed holds a value under {key} that no rank of this job has written: another "
            "job uses the same store, or somebody who can connect to it has changed it."
        )
    return json.loads(value)


def _wait_for(store: Store, key: str, limit: float, late: str, check: Callable[[], object] = lambda: None) -> bytes:
    """Poll for the value of a key: a blocking `get` or `wait` would lock all other threads out of the store.

    Args:
        store, key: where to look.
        limit: seconds.
        late: text of the error after that time.
        check: may raise.
    """
    started, pause = time.monotonic(), 0.001
    while not store.check([key]):
        check()
        if time.monotonic() - started > limit:
            raise TimeoutExceeded(late)
        time.sleep(pause)
        pause = min(1.5 * pause, 0.02)
    return store.get(key)


def monitored_barrier(
    store: Store, rank: int, size: int, timeout: timedelta | None = None, wait_all_ranks: bool = False
) -> None:
    """Return when all ranks have called. Rank 0 watches for the others and publishes the outcome.

    Args:
        store: shared by the ranks, under a prefix that only this barrier uses.
        rank: of the caller.
        size: how many ranks there are.
        timeout: how long rank 0 waits, counted from its own arrival; 30 minutes by default.
        wait_all_ranks: whether the error names every missing rank, or only the first.

    Raises:
        TimeoutExceeded: ranks are missing; the text names them.
    """
    limit = timeout or _BARRIER_TIMEOUT
    if rank == 0:
        end = time.monotonic() + limit.total_seconds()
        missing = list(range(1, size))
        while missing := [other for other in missing if not store.check([f"arrived/{other}"])]:
            if time.monotonic() > end:
                text = (
                    f"{name_ranks(missing if wait_all_ranks else missing[:1])} of {size} did not call "
                    f"monitored_barrier within {limit} of rank 0. Have all ranks called it, and do the others' outputs "
                    "show errors?"
                )
                store.set("outcome", text)
                raise TimeoutExceeded(text)
            time.sleep(0.002)
        store.set("outcome", _PASSED.decode())
        return
    store.set(f"arrived/{rank}", "")
    outcome = _wait_for(
        store,
        "outcome",
        2 * limit.total_seconds(),  # rank 0 may itself be late by as much as its own limit
        f"rank 0 did not call monitored_barrier within {2 * limit} of rank {rank}; find out what it does instead.",
    )
    if outcome != _PASSED:
        raise TimeoutExceeded(quoted(outcome.decode(errors="replace"), 4000))  # which anybody may have set
