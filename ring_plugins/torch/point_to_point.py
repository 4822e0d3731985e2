"""Sends and receives of a process group.

torch lets any two ranks exchange messages at any time, in any number, under any tag. Messages between CPUs go through
the core's messenger (core/collectives/messages.py), which has one connection for each direction of a pair, whatever the
tags.

Messages between GPUs go through NCCL, which knows only collectives among fixed members. So each channel (sender,
receiver, tag) gets a communicator of two members, a thread and a CUDA stream. Its first message opens it: both ends
then connect through the group's store. The thread is needed because two ranks that both send before they receive must
not wait for each other, neither for the connection nor for the data. The stream is needed because an answer may have to
overtake an earlier message that its receiver has not fetched yet. NCCL would want messages that depend on each other in
one group call, but torch does not tell a process group written in Python which messages belong to one
`batch_isend_irecv`.
"""

from __future__ import annotations

import functools
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Literal, NamedTuple, cast

import numpy as np
import torch

from ring_plugins.core.arrays.memory import DeviceMemory, HostMemory
from ring_plugins.core.base.errors import ArgumentError, RingError, is_rejection
from ring_plugins.core.base.threads import HelperThread
from ring_plugins.core.collectives.messages import MessageGroup
from ring_plugins.core.gpu.communicator import DeviceCommunicator
from ring_plugins.torch import device
from ring_plugins.torch.device import index_of, is_on_gpu
from ring_plugins.torch.tensors import Target, check_dense
from ring_plugins.torch.work import GpuMessageWork, MessageWork, RingWork

#: The communicator's rank of either end.
_SENDER, _RECEIVER = 0, 1
#: Seconds that closing waits for a thread whose messages both ends have started.
_JOIN = 5.0


class Channel(NamedTuple):
    """Messages of one channel between GPUs arrive in the order in which they were sent.

    Attributes:
        sender, receiver: ranks in the group.
        tag: torch's.
    """

    sender: int
    receiver: int
    tag: int


#: Builds the communicator of a channel, in which the sender has rank 0. Takes this rank's GPU, and a function that
#: returns True once the communicator is no longer wanted.
Connect = Callable[[Channel, int, Callable[[], bool]], DeviceCommunicator]


class PointToPoint:
    """Sends and receives of one process group.

    Args:
        rank: of this process in the group.
        size: of the group.
        messages: between CPUs; None in a group of one rank.
        connect: builds the communicator of a channel between GPUs; called by both ends.
    """

    def __init__(self, rank: int, size: int, messages: MessageGroup | None, connect: Connect) -> None:
        self._rank = rank
        self._size = size
        self._messages = messages
        self._connect = connect
        self._threads: dict[Channel, _ChannelThread] = {}
        self._lock = threading.Lock()
        #: Called at the latest when Python exits: a thread that is inside torch's store by then crashes the process.
        self.close = weakref.finalize(self, _close, self._threads, self._lock, messages)

    def send(self, tensor: torch.Tensor, receiver: int, tag: int) -> RingWork:
        """Start to send a tensor, which must stay unchanged until the work is done."""
        return self._start("send", tensor, receiver, tag)

    def receive(self, tensor: torch.Tensor, sender: int | None, tag: int) -> RingWork:
        """Start to receive into a tensor of the size and type that was sent, on a GPU if it was sent from one.

        A sender of None stands for whichever rank sends first.
        """
        return self._start("receive", tensor, sender, tag)

    def _start(self, verb: Literal["send", "receive"], tensor: torch.Tensor, peer: int | None, tag: int) -> RingWork:
        if peer is not None and (not 0 <= peer < self._size or peer == self._rank):
            whom = "itself" if peer == self._rank else f"rank {peer} of a group of {self._size}"
            raise ArgumentError(f"rank {self._rank} cannot {verb} {'to' if verb == 'send' else 'from'} {whom}.")
        if self._size == 1:
            raise ArgumentError(f"rank {self._rank} cannot {verb}: it is the only rank of its group.")
        sending = verb == "send"
        try:
            check_dense(tensor, "tensor")
            if is_on_gpu(tensor):
                return self._start_on_gpu(sending, tensor, peer, tag)
            target = Target(tensor, "tensor", keep=sending)
            memory = cast(HostMemory, target.memory)
        except Exception as error:
            if is_rejection(error) and self._messages is not None and peer is not None and not is_on_gpu(tensor):
                self._messages.reject(verb, peer, tag)  # NCCL has no message for that
            raise
        assert self._messages is not None
        whom = "any rank" if peer is None else f"rank {peer}"
        work = MessageWork(f"{verb} with {whom}, tag {tag}", [tensor], self._messages)
        data = memory.array.view(np.uint8)
        if sending:
            assert peer is not None
            work.message = self._messages.send(data, memory.dtype, peer, tag, functools.partial(_sent, work, target))
        else:
            finished = functools.partial(_received, work, target)
            work.message = self._messages.receive(data, memory.dtype, peer, tag, finished)
        return work

    def _start_on_gpu(self, sending: bool, tensor: torch.Tensor, peer: int | None, tag: int) -> RingWork:
        if peer is None:
            raise ArgumentError(
                f"src=None on rank {self._rank}: NCCL cannot receive from any rank; name the source rank, or move the "
                "tensor to the CPU."
            )
        index = index_of(tensor)
        target = Target(tensor, "tensor", keep=sending)
        channel = Channel(self._rank, peer, tag) if sending else Channel(peer, self._rank, tag)
        description = f"{'send' if sending else 'receive'} with rank {peer}, tag {tag}"
        with self._lock:
            if not self.close.alive:
                raise RingError(f"rank {self._rank}: the process group of {description} has been closed.")
            thread = self._threads.get(channel)
            if thread is None:
                connect = functools.partial(self._connect, channel, index)
                thread = self._threads[channel] = _ChannelThread(connect, f"ring:messages-{tuple(channel)}", index)
        work = GpuMessageWork(description, [tensor], index)
        thread.put(work, _move_on_gpu(work, description, target, sending, index))
        return work


def _sent(work: MessageWork, target: Target, error: BaseException | None) -> None:
    """Complete a send. Holding `target` keeps its memory alive until then."""
    work.finish(error)


def _received(work: MessageWork, target: Target, error: BaseException | None) -> None:
    if error is None:
        try:
            target.store()
        except BaseException as failed:  # raised by the work's `wait`
            error = failed
    work.finish(error)


def _move_on_gpu(
    work: GpuMessageWork, description: str, target: Target, sending: bool, index: int
) -> Callable[[DeviceCommunicator], None]:
    """Order the message after what the caller's stream was given before the call, but not after what it gets later.

    The caller's later work may wait for the answer to this very message.
    """
    called = device.Moment(index)

    def move(communicator: DeviceCommunicator) -> None:

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


def _close(threads: dict[Channel, _ChannelThread], lock: threading.Lock, messages: MessageGroup | None) -> None:
    with lock:
        ending = list(threads.values())
        threads.clear()
    for thread in ending:
        thread.close()
    if messages is not None:
        messages.close()
    for thread in ending:
        thread.join()


class _ChannelThread:
    """Connects one channel, then moves its messages one after the other.

    A thread starts on GPU 0. If its rank has another one, leaving a stream's context would switch back to GPU 0 and
    create a CUDA context there, of hundreds of megabytes for each rank. So the thread first switches to its rank's GPU.

    Args:
        connect: builds the communicator; see `Connect`.
        name: of the thread.
        index: this rank's GPU.
    """

    def __init__(self, connect: Callable[[Callable[[], bool]], DeviceCommunicator], name: str, index: int) -> None:
        self._connect, self._index = connect, index
        self._closed = False
        self._queue: queue.SimpleQueue[tuple[RingWork, Callable[[DeviceCommunicator], None]] | None] = (
            queue.SimpleQueue()
        )
        self._thread = HelperThread(self._serve, name)
        self._thread.start()

    def put(self, work: RingWork, move: Callable[[DeviceCommunicator], None]) -> None:
        self._queue.put((work, move))

    def close(self) -> None:
        """Finish messages that both ends have started; drop those that only this end has."""
        self._closed = True
        self._queue.put(None)

    def join(self) -> None:
        self._thread.join(timeout=_JOIN)

    def _serve(self) -> None:
        communicator: DeviceCommunicator | None = None
        failure: BaseException | None = None
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
