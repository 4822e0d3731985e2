"""Sends and receives of a process group.

torch lets any two ranks exchange messages at any time, in any number. Each direction of a pair of ranks is a channel: a
communicator of two members with a thread of its own. The first message opens it: both ends then connect through the
group's store, on that thread. So `isend` and `irecv` return at once, two ranks may both start to send before they
receive, whatever the sizes, and everything that a collective has is there: the transport, checks of sizes and types,
errors when a peer fails, stall reports and deadlock detection.

Messages of a channel are matched in the order in which they were sent, and a message is sent once its receiver has
come to it. Nothing is buffered, so two ranks that both call the blocking `send` first are in a deadlock, as with gloo
and NCCL. Between CPUs both ends compare their tags. NCCL cannot, so between GPUs each tag is a channel with a stream,
and an answer may overtake an earlier message that its receiver has not fetched yet. (NCCL would want messages that
depend on each other in one group call, but torch does not tell a process group written in Python which messages belong
to one `batch_isend_irecv`.)

Considered and rejected: matching by tag and from any rank, as MPI has it. That took 2,000 lines, with a protocol, a
progress thread and bounded buffers, for what gloo does well.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol, cast

import torch

from ring_plugins.core.arrays.memory import DeviceMemory
from ring_plugins.core.base.errors import ArgumentError, RingError, is_rejection
from ring_plugins.core.collectives.pair_executor import PairExecutor
from ring_plugins.core.gpu.communicator import DeviceCommunicator
from ring_plugins.torch import device
from ring_plugins.torch.device import index_of, is_on_gpu
from ring_plugins.torch.tensors import Target
from ring_plugins.torch.work import GpuWork, RingWork

#: The communicator's rank of either end.
_SENDER, _RECEIVER = 0, 1
#: Seconds for which closing lets messages finish that both ends have started, and lets two ends connect.
_FINISH, _CONNECT = 5.0, 0.5


class Ends(NamedTuple):
    """Messages of one channel arrive in the order in which they were sent.

    Attributes:
        sender, receiver: ranks in the group.
        tag: torch's, between GPUs; None between CPUs, where a channel has messages of all tags.
    """

    sender: int
    receiver: int
    tag: int | None = None


class Opener(Protocol):
    """Makes what a channel consists of."""

    def executor(self, ends: Ends) -> PairExecutor:
        """A new executor, on whose thread the channel connects."""

    def connect(self, ends: Ends, index: int | None, executor: PairExecutor) -> Any:
        """The communicator, in which the sender has rank 0; called by both ends.

        Args:
            ends: of the channel.
            index: this rank's GPU; None between CPUs.
            executor: of the channel.
        """


class PointToPoint:
    """Sends and receives of one process group.

    Args:
        rank: of this process in the group.
        size: of the group.
        opener: makes its channels.
    """

    def __init__(self, rank: int, size: int, opener: Opener) -> None:
        self._rank, self._size, self._opener = rank, size, opener
        self._channels: dict[Ends, _Channel] = {}
        self._lock = threading.Lock()
        #: Called at the latest when Python exits: a thread that is inside torch's store by then crashes the process.
        self.close = weakref.finalize(self, _close, self._channels, self._lock)

    def send(self, tensor: torch.Tensor, receiver: int, tag: int) -> RingWork:
        """Start to send a tensor, which must stay unchanged until the work is done."""
        return self._start("send", tensor, receiver, tag)

    def receive(self, tensor: torch.Tensor, sender: int, tag: int) -> RingWork:
        """Start to receive into a tensor of the size and type that was sent, on a GPU if it was sent from one."""
        return self._start("receive", tensor, sender, tag)

    def _start(self, verb: Literal["send", "receive"], tensor: torch.Tensor, peer: int, tag: int) -> RingWork:
        sending = verb == "send"
        if not 0 <= peer < self._size or peer == self._rank:
            whom = "itself" if peer == self._rank else f"rank {peer} of a group of {self._size}"
            raise ArgumentError(f"rank {self._rank} cannot {verb} {'to' if sending else 'from'} {whom}.")
        description = f"{verb} {'to' if sending else 'from'} rank {peer}, tag {tag}"
        ends, source = (Ends(self._rank, peer), -1) if sending else (Ends(peer, self._rank), peer)
        try:
            target = Target([tensor], "tensor", keep=sending)
        except Exception as error:
            if is_rejection(error) and not is_on_gpu(tensor):  # NCCL has no message for that
                self._channel(ends, None, description).reject(description, error)
            raise
        if is_on_gpu(tensor):
            index = index_of(tensor)
            on_gpu = GpuWork(description, [tensor], index, source)
            channel = self._channel(ends._replace(tag=tag), index, description)
            return channel.start(on_gpu, _move_on_gpu(on_gpu, description, target, sending, index))

        def move(communicator: Any) -> None:
            communicator.transfer(target.memory, _SENDER, tag)
            if not sending:
                target.store()

        work = RingWork(description, [tensor], source)
        return self._channel(ends, None, description).start(work, move)

    def _channel(self, ends: Ends, index: int | None, description: str) -> _Channel:
        with self._lock:
            if not self.close.alive:
                raise RingError(f"rank {self._rank}: the process group of {description} has been closed.")
            channel = self._channels.get(ends)
            if channel is None:
                executor = self._opener.executor(ends)
                channel = _Channel(executor, index, partial(self._opener.connect, ends, index, executor))
                self._channels[ends] = channel
            return channel


def _move_on_gpu(
    work: GpuWork, description: str, target: Target, sending: bool, index: int
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


def _close(channels: dict[Ends, _Channel], lock: threading.Lock) -> None:
    with lock:
        ending = list(channels.values())
        channels.clear()
    end = time.monotonic() + _FINISH
    for channel in ending:
        channel.close(end - time.monotonic())


class _Channel:
    """Connects one channel, then moves its messages one after the other.

    Args:
        executor: runs all of it on its thread.
        index: this rank's GPU; None between CPUs.
        connect: makes the communicator.
    """

    def __init__(self, executor: PairExecutor, index: int | None, connect: Callable[[], Any]) -> None:
        self._executor, self._index, self._connect = executor, index, connect
        self._communicator: Any = None

    def start(self, work: RingWork, move: Callable[[Any], None]) -> RingWork:
        """Move a message behind those that were started before."""
        return work.run_on(self._executor, lambda: self._run(move))

    def reject(self, description: str, error: BaseException) -> None:
        """Tell the other end that this one rejected the arguments of a send or receive."""

        def reject(communicator: Any) -> None:
            raise error

        self._executor.start(description, lambda: self._run(reject))

    def _run(self, move: Callable[[Any], None]) -> None:
        self._executor.failure.check()
        try:
            if self._index is not None:
                # A thread starts on GPU 0. If its rank has another one, leaving a stream's context would switch back
                # to GPU 0 and create a CUDA context there, of hundreds of megabytes for each rank.
                device.set_device(self._index)
            if self._communicator is None:
                self._communicator = self._connect()
            move(self._communicator)
        except BaseException as error:
            if not is_rejection(error):  # the two ends are out of step, or will never meet
                self._executor.interrupt("a message", error)
            raise

    def close(self, seconds: float) -> None:
        """Finish messages that both ends have started; drop those that only this end has.

        Args:
            seconds: after which the others are dropped, too.
        """
        self._executor.finish(min(seconds, _CONNECT) if self._communicator is None else seconds)
        self._executor.failure.close()
        self._executor.close()
        if self._communicator is not None:
            self._communicator.close()
