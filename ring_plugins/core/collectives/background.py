"""The thread of an executor, the works that it runs, and what is called when one is done.

**Problem.** Whoever gets a future of a work may attach functions to it, and these may do what they like: start a
collective and wait for it, as PowerSGD does in every step, wait for a work that is still queued, or wait for something
that the script does later. torch runs them on the thread that completes the future, so on the one thread on which
everything of the communicator runs, and which must go on.

**Idea.** All ranks must come to the operations of a callback at the same place, or they would be matched with those
that the script has started meanwhile, and with equal sizes nobody would notice. Where the work is over before a
callback is attached, torch calls it at once in the script's thread: behind the work, and before whatever the script
calls next. So a callback that comes later has the same place: the queue is held while it runs, what it starts is run at
once, and if it waits for a queued work, the thread runs the queue up to that. It cannot wait for itself.

What is left is a callback that waits for something else: an event that the script sets once a later collective is over,
or another group whose own callback waits for this one. It neither computes nor waits for other ranks. After some
seconds of that, another thread goes on with the queue, and a warning says so the first time. From then on the
callback's place is lost, so a collective that it calls breaks the communicator on all ranks.

Considered and rejected: a pool of threads for callbacks that the queue does not wait for, as gloo has. The order of
operations then differs between ranks by chance. A second communicator for the operations of callbacks gives them an
order of their own, but nothing tells a callback that is called at once in the script's thread.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from ring_plugins.core.base.errors import RingError
from ring_plugins.core.base.log import logger
from ring_plugins.core.base.places import place_of_thread
from ring_plugins.core.base.threads import HelperThread
from ring_plugins.core.control.wait import long_waits, nap_precisely

T = TypeVar("T")

#: Seconds for which a callback may hold the queue while it neither computes nor waits for other ranks, and between two
#: looks at it.
_IDLE_CALLBACK, _LOOK = 5.0, 0.5


class BackgroundWork(Generic[T]):
    """A `Work` that another thread runs.

    Args:
        description: for error texts and reports.
        function: performs the work.
        block: waits for `finished` on behalf of a caller.
        interrupt: called with the description and an exception that ends a wait while the work is under way.

    Attributes:
        error: what the function raised, None if nothing.
    """

    def __init__(
        self,
        description: str,
        function: Callable[[], T],
        block: Callable[[BackgroundWork[Any]], None],
        interrupt: Callable[[str, BaseException], None],
    ) -> None:
        self.description = description
        self.finished = threading.Event()
        self.lock = threading.Lock()
        self.thread: QueueThread | None = None  # in whose queue it is
        #: Whoever pops the function runs or cancels it.
        self._function: list[Callable[[], T]] = [function]
        self._block, self._interrupt = block, interrupt
        self._result: Any = None
        self.error: BaseException | None = None
        self._callbacks: list[Callable[[], object]] | None = []

    @classmethod
    def run_now(
        cls, description: str, function: Callable[[], T], interrupt: Callable[[str, BaseException], None]
    ) -> BackgroundWork[T]:
        """A work that the caller's thread has run, without a queue."""
        work = cls(description, function, lambda _: None, interrupt)
        work.run()
        work.call_back()  # whoever attaches a callback from now on calls it
        return work

    def done(self) -> bool:
        return self.finished.is_set()

    def wait(self, breaking: bool = True) -> T:
        try:
            self.come_first()
            if not self.finished.is_set():
                self._block(self)
        except BaseException as error:
            if breaking:
                self.interrupt(error)
            raise
        if self.error is not None:
            raise self.error
        result: T = self._result
        return result

    def come_first(self) -> None:
        """Run the work now if the caller, which is about to wait for it, is the thread that would run it later.

        Raises:
            RingError: it cannot be run now.
        """
        if self.thread is not None and not self.finished.is_set() and self.thread.is_current():
            self.thread.come_to(self)

    def interrupt(self, cause: BaseException) -> None:
        """Break the communicator unless the work is done: its owner no longer waits for it."""
        if not self.done():
            self._interrupt(self.description, cause)

    def cancel(self) -> bool:
        """Take the work back; returns whether that was possible, that is, it had not begun."""
        try:
            self._function.pop()
        except IndexError:
            return False
        self.finished.set()
        return True

    def run(self) -> None:
        """Call the function, unless it was taken back; called once."""
        try:
            function = self._function.pop()  # it may hold memory that the caller wants back
        except IndexError:
            return
        try:
            self._result = function()
        except BaseException as error:  # raised in the caller's thread by `wait`
            self.error = error
        finally:
            self.finished.set()

    def when_done(self, callback: Callable[[], object]) -> bool:
        """Let the executor's thread call a function once the work is done; returns False if that has been done already.

        Args:
            callback: must not raise; may call the communicator, and wait for it.
        """
        with self.lock:
            if self._callbacks is None:
                return False
            self._callbacks.append(callback)
            return True

    def call_back(self) -> list[Callable[[], object]]:
        """Give out the callbacks, of which there are no more from now on."""
        with self.lock:
            callbacks, self._callbacks = self._callbacks, None
            return callbacks or []


class QueueThread:
    """Runs works in the order in which they were given.

    It holds no reference to its executor, so that an unused communicator can be collected, which ends the thread.

    Attributes:
        current: the work that runs now; None between works, and while callbacks run.
        late: threads in callbacks for which the queue waits no longer.
        unfinished: works that were given and have not ended.
        ident: of the thread.
    """

    def __init__(self, name: str) -> None:
        self.current: BackgroundWork[Any] | None = None
        self._name = name
        self._queue: queue.SimpleQueue[BackgroundWork[Any] | None] = queue.SimpleQueue()
        self.unfinished = 0
        self._lock = threading.Lock()
        self._callback_of = ""  # the work whose callbacks hold the queue
        self.late: set[int] = set()
        self._was_told = False  # that a callback has held the queue
        self._stand_in: HelperThread | None = None
        self._ended = threading.Event()
        self._thread = HelperThread(self._serve, f"ring:{name}")
        self._thread.start()
        self.ident = self._thread.ident

    def give(self, work: BackgroundWork[Any]) -> None:
        """Queue a work, or run it if a callback gives it."""
        at_once = self._callback_of and self.is_current()
        with self._lock:
            self.unfinished += 1
            if not at_once:
                self._queue.put(work)
        if at_once:
            self._perform(work)

    def come_to(self, work: BackgroundWork[Any]) -> None:
        """Run the queue up to a work that this thread is about to wait for.

        Raises:
            RingError: it is behind the work that this thread runs now.
        """
        with contextlib.suppress(queue.Empty):
            while self._callback_of and not work.done():
                following = self._queue.get_nowait()
                if following is None:  # the communicator is being closed
                    self._queue.put(None)
                    break
                self._perform(following)
        if not work.done():
            raise RingError(
                f"{self._name}: {self.current.description if self.current else 'a callback'} waits for "
                f"{work.description}, which the same thread runs behind it. Wait for it in the script's own thread."
            )

    def has_one_left(self) -> bool:
        """Whether a single work has not ended, so that another thread may run it: none is before it."""
        return self.unfinished == 1 and not self._callback_of

    def wait_until_idle(self, seconds: float) -> None:
        """Return when no work is left, after `seconds` at the latest."""
        end = time.monotonic() + seconds
        while self.unfinished and self._thread.is_alive() and time.monotonic() < end:
            time.sleep(0.001)

    def is_current(self) -> bool:
        return threading.get_ident() == self.ident

    def check_place(self, operation: str) -> None:
        """Raise if a callback calls an operation, and the queue has gone on without it."""
        if self.late and threading.get_ident() in self.late:
            raise RingError(
                f"{self._name}: {operation} was called in a future's callback that had waited {_IDLE_CALLBACK:g} s for "
                "something else than other ranks, while further operations were queued. Those have been run, so this "
                "one would come at another place than on other ranks. Call it in the script, or before the callback "
                "waits."
            )

    def end(self) -> None:
        """Let the thread end once its queue is empty."""
        self._ended.set()
        self._queue.put(None)

    def close(self) -> None:
        """End the thread once its queue is empty; wait up to 5 s for that."""
        self.end()
        if not self.is_current():
            with contextlib.suppress(RuntimeError):
                self._thread.join(timeout=5.0)

    def _serve(self) -> None:
        nap_precisely()
        while (work := self._queue.get()) is not None:
            self._perform(work)
            del work  # so that its result does not live until the next work
            if not self.is_current():
                return

    def _perform(self, work: BackgroundWork[Any]) -> None:
        before, self.current = self.current, work
        work.run()
        work.finished.wait()  # another thread may run it
        self.current = before
        callbacks = work.call_back()
        if callbacks:
            self._run_callbacks(work.description, callbacks)
        with self._lock:
            self.unfinished -= self.is_current()  # else the stand-in has counted it

    def _run_callbacks(self, description: str, callbacks: list[Callable[[], object]]) -> None:
        if self._stand_in is None:
            self._stand_in = HelperThread(self._stand_by, f"ring:{self._name} stand-in")
            self._stand_in.start()
        outer, self._callback_of = self._callback_of, description
        try:
            for callback in callbacks:
                callback()
        finally:
            with self._lock:
                if self.is_current():
                    self._callback_of = outer
                elif not outer:
                    self.late.discard(threading.get_ident())

    def _stand_by(self) -> None:
        """Go on with the queue in this thread, once a callback has held it for long and does nothing."""
        waiting, computed = 0.0, -1.0
        while not self._ended.wait(_LOOK):
            with self._lock:
                ident = self.ident or 0
                # The callback may wait for a thread of ours that waits for other ranks.
                waits_for_ranks = any(thread != threading.main_thread().ident for thread in list(long_waits))
                if not self._callback_of or self._queue.empty() or waits_for_ranks:
                    waiting = 0.0
                    continue
                seconds = time.clock_gettime(time.pthread_getcpuclockid(ident))  # it is alive, in its callback
                waiting = waiting + _LOOK if seconds - computed < 0.05 * _LOOK else 0.0
                computed = seconds
                if waiting < _IDLE_CALLBACK:
                    continue
                self.late.add(ident)
                callback_of, was_told, self._was_told = self._callback_of, self._was_told, True
                self._thread, self._stand_in = threading.current_thread(), None  # type: ignore[assignment]
                self.ident = threading.get_ident()
                self._callback_of, self.unfinished = "", self._queue.qsize()
            if not was_told:
                where = f" at {where}" if (where := place_of_thread(ident)) else ""
                logger.warning(
                    f"{self._name}: a callback of {callback_of} has waited {_IDLE_CALLBACK:g} s{where} "
                    "for something else than other ranks, such as an operation of another group whose own callback "
                    "waits for this one. Further operations were queued behind it and go on now, but each such wait "
                    "takes as long. Wait in the script instead, or start there what the callback waits for."
                )
            self._serve()
            return
