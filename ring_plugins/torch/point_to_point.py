"""Messages between two ranks of a process group, each stream of them over a two-member communicator."""

from __future__ import annotations

import functools
import queue
import threading
import weakref
from collections.abc import Callable
from typing import cast

import torch

from ring_plugins.core.collectives.protocol import Communicator
from ring_plugins.core.errors import ArgumentError, RingError
from ring_plugins.core.memory import HostMemory
from ring_plugins.torch.device import is_on_gpu
from ring_plugins.torch.tensors import Target, ThroughHost, check_dense
from ring_plugins.torch.work import RingWork

#: (sender, receiver, tag): messages of one stream arrive in the order in which they were sent.
Stream = tuple[int, int, int]
#: Builds the communicator of a stream, unless the function it is given says that nobody wants it any more.
Connect = Callable[[Stream, Callable[[], bool]], Communicator]


class PointToPoint:
    """Sends and receives of one process group.

    A stream is opened when its first message is sent or received: both ends then meet and build a communicator. They
    do that in a thread of the stream's own, because two ranks that send to each other before they receive must not
    wait for each other.

    Args:
        rank: of this process in the group.
        size: of the group.
        connect: builds the communicator of a stream; called by both ends. The sender has rank 0 in it.
    """

    def __init__(self, rank: int, size: int, connect: Connect) -> None:
        self._rank = rank
        self._size = size
        self._connect = connect
        self._streams: dict[Stream, _Messages] = {}
        #: Also when Python ends: a thread that is inside torch's store at that moment would crash the process.
        self.close = weakref.finalize(self, _close, self._streams)

    def send(self, tensor: torch.Tensor, receiver: int, tag: int) -> RingWork:
        """Start to send a tensor, which must stay unchanged until the work is done."""
        return self._start("send", tensor, (self._rank, receiver, tag), receiver)

    def receive(self, tensor: torch.Tensor, sender: int, tag: int) -> RingWork:
        """Start to receive into a tensor of the size and type that was sent."""
        return self._start("receive", tensor, (sender, self._rank, tag), sender)

    def _start(self, verb: str, tensor: torch.Tensor, stream: Stream, peer: int) -> RingWork:
        if not 0 <= peer < self._size or peer == self._rank:
            whom = "itself" if peer == self._rank else f"rank {peer} of a group of {self._size}"
            raise ArgumentError(f"rank {self._rank} cannot {verb} {'to' if verb == 'send' else 'from'} {whom}.")
        sending = verb == "send"
        check_dense(tensor, "tensor")
        target = ThroughHost(tensor, sending) if is_on_gpu(tensor) else Target(tensor, "tensor", keep=sending)
        work = RingWork(f"{verb} with rank {peer}, tag {stream[2]}", [tensor])
        messages = self._streams.get(stream)
        if messages is None:
            messages = self._streams[stream] = _Messages(
                functools.partial(self._connect, stream), f"ring:messages-{stream}"
            )

        def move(communicator: Communicator) -> None:
            communicator.broadcast(cast(HostMemory, target.memory), root=0)
            if not sending:
                target.store()

        messages.give(work, move)
        return work


def _close(streams: dict[Stream, _Messages]) -> None:
    for messages in streams.values():
        messages.close()
    for messages in streams.values():
        messages.join()
    streams.clear()


class _Messages:
    """One stream's thread: connects, then moves one message after the other."""

    def __init__(self, connect: Callable[[Callable[[], bool]], Communicator], name: str) -> None:
        self._connect = connect
        self._closed = False
        self._queue: queue.SimpleQueue[tuple[RingWork, Callable[[Communicator], None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def give(self, work: RingWork, move: Callable[[Communicator], None]) -> None:
        self._queue.put((work, move))

    def close(self) -> None:
        """Finish what both ends have begun, give up what only this one has."""
        self._closed = True
        self._queue.put(None)

    def join(self) -> None:
        self._thread.join(timeout=0.1)

    def _serve(self) -> None:
        communicator: Communicator | None = None
        failure: BaseException | None = None
        while (item := self._queue.get()) is not None:
            work, move = item
            try:
                if failure is not None:
                    raise failure
                communicator = communicator or self._connect(lambda: self._closed)
                move(communicator)
            except BaseException as error:  # crosses to whoever waits for the work
                # After these, the two ends are out of step or will never meet.
                failure = error if isinstance(error, RingError) and not isinstance(error, ArgumentError) else failure
                work.finish(error)
            else:
                work.finish()
        if communicator is not None:
            communicator.close()
