"""Messages between two ranks of a process group, each stream of them over a two-member communicator.

A message between GPUs as torch.distributed knows it.
"""

from __future__ import annotations

import functools
import queue
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple, cast

import torch

from ring_plugins.core.arrays.memory import DeviceMemory, HostMemory
from ring_plugins.core.base.errors import ArgumentError, RingError
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.collectives.api import Work as CoreWork
from ring_plugins.core.gpu.communicator import DeviceCommunicator
from ring_plugins.torch import device
from ring_plugins.torch.device import index_of, is_on_gpu
from ring_plugins.torch.tensors import Target, check_dense
from ring_plugins.torch.work import RingWork


class MessageWork(RingWork):
    """A message that another thread queues on a GPU, as soon as both ends have met.

    Args:
        description, outputs: as `RingWork`.
        index: the GPU.
    """

    def __init__(self, description: str, outputs: list[torch.Tensor], index: int) -> None:
        super().__init__(description, outputs)
        self._index = index
        self._communicator: DeviceCommunicator | None = None
        self._queued: CoreWork[None] | None = None

    def is_queued(self, communicator: DeviceCommunicator, queued: CoreWork[None]) -> None:
        """It is on the GPU's stream; `finish` comes next."""
        self._communicator, self._queued = communicator, queued

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Let what this thread queues next come after it; waits on the host only until it is on the GPU's stream.

        Raises:
            TimeoutExceeded: it was not there within `timeout` (zero: no limit of its own).
        """
        super().wait(timeout)
        assert self._queued is not None
        self._queued.wait()
        return True

    def is_completed(self) -> bool:
        """Whether the GPU is done with it, or it failed."""
        return self._finished.is_set() and (self._queued is None or self._queued.done())

    def is_success(self) -> bool:
        """Whether the GPU is done with it."""
        return self._error is None and self.is_completed()

    def _new_trigger(self) -> torch.futures.Future[Any]:
        return device.future_on_gpu(self._index)

    def _fire(self, trigger: torch.futures.Future[Any]) -> None:
        if self._communicator is None:
            trigger.set_result(None)
        else:
            device.complete(trigger, None, self._communicator)


class Stream(NamedTuple):
    """Messages of one stream arrive in the order in which they were sent.

    Attributes:
        sender, receiver: ranks in the group.
        tag: as torch was given it.
        between_gpus: whether they go from the memory of one GPU to that of another.
    """

    sender: int
    receiver: int
    tag: int
    between_gpus: bool


#: Builds the communicator of a stream, in which the sender has rank 0. Takes this rank's GPU, None for the CPU, and a
#: function that says when nobody wants the communicator any more.
Connect = Callable[[Stream, int | None, Callable[[], bool]], Communicator[Any]]


class PointToPoint:
    """Sends and receives of one process group.

    A stream is opened when its first message is sent or received: both ends then meet and build a communicator. They
    do that in a thread of the stream's own, because two ranks that send to each other before they receive must not
    wait for each other. For the same reason each has a stream of the GPU's to itself, so that nothing needs to be
    grouped: torch does not tell a process group written in Python which messages belong to one `batch_isend_irecv`.

    Args:
        rank: of this process in the group.
        size: of the group.
        connect: builds the communicator of a stream; called by both ends.
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
        return self._start("send", tensor, Stream(self._rank, receiver, tag, is_on_gpu(tensor)), receiver)

    def receive(self, tensor: torch.Tensor, sender: int, tag: int) -> RingWork:
        """Start to receive into a tensor of the size and type that was sent, on a GPU if it was sent from one."""
        return self._start("receive", tensor, Stream(sender, self._rank, tag, is_on_gpu(tensor)), sender)

    def _start(self, verb: str, tensor: torch.Tensor, stream: Stream, peer: int) -> RingWork:
        if not 0 <= peer < self._size or peer == self._rank:
            whom = "itself" if peer == self._rank else f"rank {peer} of a group of {self._size}"
            raise ArgumentError(f"rank {self._rank} cannot {verb} {'to' if verb == 'send' else 'from'} {whom}.")
        sending = verb == "send"
        check_dense(tensor, "tensor")
        description = f"{verb} with rank {peer}, tag {stream.tag}"
        target = Target(tensor, "tensor", keep=sending)
        index = index_of(tensor) if stream.between_gpus else None
        messages = self._streams.get(stream)
        if messages is None:
            connect = functools.partial(self._connect, stream, index)
            messages = self._streams[stream] = _Messages(connect, f"ring:messages-{tuple(stream)}")
        if index is not None:
            work = MessageWork(description, [tensor], index)
            messages.give(work, _on_gpu(work, description, target, sending, index))
            return work
        on_host = RingWork(description, [tensor])
        messages.give(on_host, _on_host(target, sending))
        return on_host


def _on_host(target: Target, sending: bool) -> Callable[[Communicator[Any]], None]:
    def move(communicator: Communicator[Any]) -> None:
        communicator.broadcast(cast(HostMemory, target.memory), root=0)
        if not sending:
            target.store()

    return move


def _on_gpu(
    work: MessageWork, description: str, target: Target, sending: bool, index: int
) -> Callable[[Communicator[Any]], None]:
    """The message comes after what the caller's stream was given when it called, and not after what it gets since.

    Later work of the caller's may wait for the answer to this message.
    """
    called = device.Moment(index)

    def move(communicator: Communicator[Any]) -> None:
        assert isinstance(communicator, DeviceCommunicator)

        def queue_it() -> None:
            if sending:
                communicator.send(cast(DeviceMemory, target.memory), 1)
            else:
                communicator.receive(cast(DeviceMemory, target.memory), 0)
                target.store()

        called.precedes(communicator.stream, index)
        with device.streams(index).using(communicator.stream):  # this thread's own stream has nothing to do with it
            work.is_queued(communicator, communicator.start(description, queue_it))

    return move


def _close(streams: dict[Stream, _Messages]) -> None:
    for messages in streams.values():
        messages.close()
    for messages in streams.values():
        messages.join()
    streams.clear()


class _Messages:
    """One stream's thread: connects, then moves one message after the other."""

    def __init__(self, connect: Callable[[Callable[[], bool]], Communicator[Any]], name: str) -> None:
        self._connect = connect
        self._closed = False
        self._queue: queue.SimpleQueue[tuple[RingWork, Callable[[Communicator[Any]], None]] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def give(self, work: RingWork, move: Callable[[Communicator[Any]], None]) -> None:
        self._queue.put((work, move))

    def close(self) -> None:
        """Finish what both ends have begun, give up what only this one has."""
        self._closed = True
        self._queue.put(None)

    def join(self) -> None:
        self._thread.join(timeout=0.1)

    def _serve(self) -> None:
        communicator: Communicator[Any] | None = None
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
