"""Sends and receives of a process group.

torch lets any two ranks exchange messages at any time, in any number, under any tag; the core has only collectives
among fixed members. So each channel (sender, receiver, tag, kind of memory) gets a communicator of two members and a
separate thread. Its first message opens it: both ends then connect through the group's store.

Why a thread for each channel: two ranks that both send before they receive must not wait for each other, neither for
the connection nor for the data. Why a CUDA stream for each channel between GPUs: an answer may have to overtake an
earlier message that its receiver has not fetched yet. NCCL would want messages that depend on each other in one group
call, but torch does not tell a process group written in Python which messages belong to one `batch_isend_irecv`.
Considered and rejected: one thread for all channels (deadlocks as above), and sockets without a communicator (no
timeouts, no reasons for a failure, and nothing for GPUs).
"""

from __future__ import annotations

import functools
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch

from ring_plugins.core.arrays.memory import DeviceMemory, HostMemory
from ring_plugins.core.base.errors import ArgumentError, RingError
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.gpu.communicator import DeviceCommunicator
from ring_plugins.torch import device
from ring_plugins.torch.device import index_of, is_on_gpu
from ring_plugins.torch.tensors import Target, check_dense
from ring_plugins.torch.work import GpuMessageWork, RingWork

#: The communicator's rank of either end.
_SENDER, _RECEIVER = 0, 1


class Channel(NamedTuple):
    """Messages of one channel arrive in the order in which they were sent.

    Attributes:
        sender, receiver: ranks in the group.
        tag: torch's.
        between_gpus: whether the messages go from the memory of one GPU to that of another.
    """

    sender: int
    receiver: int
    tag: int
    between_gpus: bool


#: Builds the communicator of a channel, in which the sender has rank 0. Takes this rank's GPU, None for the CPU, and a
#: function that returns True once the communicator is no longer wanted.
Connect = Callable[[Channel, int | None, Callable[[], bool]], Communicator[Any]]


class PointToPoint:
    """Sends and receives of one process group.

    Args:
        rank: of this process in the group.
        size: of the group.
        connect: builds the communicator of a channel; called by both ends.
    """

    def __init__(self, rank: int, size: int, connect: Connect) -> None:
        self._rank = rank
        self._size = size
        self._connect = connect
        self._threads: dict[Channel, _ChannelThread] = {}
        #: Called at the latest when Python exits: a thread that is inside torch's store by then crashes the process.
        self.close = weakref.finalize(self, _close, self._threads)

    def send(self, tensor: torch.Tensor, receiver: int, tag: int) -> RingWork:
        """Start to send a tensor, which must stay unchanged until the work is done."""
        return self._start("send", tensor, Channel(self._rank, receiver, tag, is_on_gpu(tensor)), receiver)

    def receive(self, tensor: torch.Tensor, sender: int, tag: int) -> RingWork:
        """Start to receive into a tensor of the size and type that was sent, on a GPU if it was sent from one."""
        return self._start("receive", tensor, Channel(sender, self._rank, tag, is_on_gpu(tensor)), sender)

    def _start(self, verb: str, tensor: torch.Tensor, channel: Channel, peer: int) -> RingWork:
        if not 0 <= peer < self._size or peer == self._rank:
            whom = "itself" if peer == self._rank else f"rank {peer} of a group of {self._size}"
            raise ArgumentError(f"rank {self._rank} cannot {verb} {'to' if verb == 'send' else 'from'} {whom}.")
        sending = verb == "send"
        check_dense(tensor, "tensor")
        description = f"{verb} with rank {peer}, tag {channel.tag}"
        target = Target(tensor, "tensor", keep=sending)
        index = index_of(tensor) if channel.between_gpus else None
        thread = self._threads.get(channel)
        if thread is None:
            connect = functools.partial(self._connect, channel, index)
            thread = self._threads[channel] = _ChannelThread(connect, f"ring:messages-{tuple(channel)}", index)
        if index is not None:
            work = GpuMessageWork(description, [tensor], index)
            thread.put(work, _move_on_gpu(work, description, target, sending, index))
            return work
        on_host = RingWork(description, [tensor])
        thread.put(on_host, _move_on_host(target, sending))
        return on_host


def _move_on_host(target: Target, sending: bool) -> Callable[[Communicator[Any]], None]:
    def move(communicator: Communicator[Any]) -> None:
        communicator.broadcast(cast(HostMemory, target.memory), root=_SENDER)
        if not sending:
            target.store()

    return move


def _move_on_gpu(
    work: GpuMessageWork, description: str, target: Target, sending: bool, index: int
) -> Callable[[Communicator[Any]], None]:
    """Order the message after what the caller's stream was given before the call, but not after what it gets later.

    The caller's later work may wait for the answer to this very message.
    """
    called = device.Moment(index)

    def move(communicator: Communicator[Any]) -> None:
        assert isinstance(communicator, DeviceCommunicator)

        def transfer() -> None:
            if sending:
                communicator.send(cast(DeviceMemory, target.memory), _RECEIVER)
            else:
                communicator.receive(cast(DeviceMemory, target.memory), _SENDER)
                target.store()

        called.precedes(communicator.stream, index)
        with device.streams(index).using(communicator.stream):  # not this thread's own stream
            work.set_queued(communicator, communicator.start(description, transfer))

    return move


def _close(threads: dict[Channel, _ChannelThread]) -> None:
    for thread in threads.values():
        thread.close()
    for thread in threads.values():
        thread.join()
    threads.clear()


class _ChannelThread:
    """Connects one channel, then moves its messages one after the other.

    A thread starts on GPU 0. If its rank has another one, leaving a stream's context would switch back to GPU 0 and
    create a CUDA context there, of hundreds of megabytes for each rank. So the thread first switches to its rank's GPU.

    Args:
        connect: builds the communicator; see `Connect`.
        name: of the thread.
        index: this rank's GPU, None for messages between CPUs.
    """

    def __init__(
        self, connect: Callable[[Callable[[], bool]], Communicator[Any]], name: str, index: int | None = None
    ) -> None:
        self._connect, self._index = connect, index
        self._closed = False
        self._queue: queue.SimpleQueue[tuple[RingWork, Callable[[Communicator[Any]], None]] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def put(self, work: RingWork, move: Callable[[Communicator[Any]], None]) -> None:
        self._queue.put((work, move))

    def close(self) -> None:
        """Finish messages that both ends have started; drop those that only this end has."""
        self._closed = True
        self._queue.put(None)

    def join(self) -> None:
        self._thread.join(timeout=0.1)

    def _serve(self) -> None:
        communicator: Communicator[Any] | None = None
        failure: BaseException | None = None
        if self._index is not None:
            device.set_device(self._index)
        while (item := self._queue.get()) is not None:
            work, move = item
            try:
                if failure is not None:
                    raise failure
                communicator = communicator or self._connect(lambda: self._closed)
                move(communicator)
            except BaseException as error:  # raised by the work's `wait`
                # After any error but a wrong argument the two ends are out of step, or will never meet.
                failure = error if isinstance(error, RingError) and not isinstance(error, ArgumentError) else failure
                work.finish(error)
            else:
                work.finish()
        if communicator is not None:
            communicator.close()
