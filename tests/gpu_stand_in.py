"""A stand-in for the CUDA driver and for NCCL, which keeps the contracts that our code must honor.

It is injected as the loaded libraries, below the declared C functions, so that all of our own code runs:

- A stream is a thread that does its work in order while the caller goes on; only events order two streams. Stream 1 is
  the caller's own: work of torch or numpy on the CPU is done when it returns, so making that stream wait for an event
  blocks.
- NCCL is nonblocking: a group of calls reaches the stream only after some calls of `ncclCommGetAsyncError`, or when a
  thread has taken its time, so an event that is recorded too early stands before the work.
- An event that is recorded again stays where it was for those who wait for it already.
- A kernel that waits for a dead peer ends only when its communicator is aborted.
- A CUDA graph that captured a communicator's operations refers to it until the graph is destroyed. Until then
  finalizing never ends, and destroying or aborting blocks the calling thread, after it has ended the kernels.

Ranks are threads of one process, so NCCL can read the others' memory; where they meet is a host communicator.
"""

# ruff: noqa: N802  # the functions have the names of the libraries' functions

import contextlib
import ctypes
import functools
import itertools
import os
import queue
import threading
import time
from pathlib import Path

import numpy as np

from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.collectives.host import HostCommunicator
from ring_plugins.core.collectives.single import SingleCommunicator
from ring_plugins.core.control.wait import Wait
from ring_plugins.core.gpu import cuda, nccl
from ring_plugins.core.gpu.communicator import DeviceCommunicator
from ring_plugins.core.gpu.executor import DeviceExecutor
from tests.core.collectives.thread_ranks import on_thread_ranks

CALLERS_STREAM = 1
SUCCESS, SYSTEM_ERROR, INVALID_ARGUMENT, IN_PROGRESS = 0, 2, 4, 7
NOT_READY = 600
COLLECTED = {"ncclAllReduce": "all_reduce", "ncclBroadcast": "broadcast", "ncclReduce": "reduce", "ncclSend": "send"}
COLLECTED |= {"ncclAllGather": "all_gather", "ncclReduceScatter": "reduce_scatter", "ncclRecv": "receive"}
DTYPES = {kind: name for name, (kind, width) in nccl.TYPES.items() if width == 1 and name != "bool"}


class CFunctions:
    """Methods of a class as C functions, converted by ctypes as a real library's would be."""

    def __init__(self, declared):
        for name, arguments in declared.items():
            if method := getattr(self, f"_{name}", None):
                prototype = ctypes.CFUNCTYPE(ctypes.c_int, *arguments)
                setattr(self, name, prototype(self._safely(method)))

    @staticmethod
    def _safely(method):
        def function(*arguments):
            try:
                return method(*arguments) or 0
            except BaseException:  # C knows no exceptions
                import traceback

                traceback.print_exc()
                return 3

        return function


class Stream(threading.Thread):
    def __init__(self):
        super().__init__(daemon=True)
        self.work = queue.SimpleQueue()
        self.start()

    def run(self):
        while True:
            self.work.get()()

    def drain(self):
        if threading.current_thread() is not self:
            done = threading.Event()
            self.work.put(done.set)
            done.wait()


class Happened(threading.Event):
    """What an event waits for, and when it came."""

    at = 0.0
    is_captured = False

    def set(self):
        self.at = self.at or time.monotonic()
        super().set()


class StandInDriver(CFunctions):
    def __init__(self, card="0000:01:00.0", devices=1):
        super().__init__(cuda.FUNCTIONS)
        self.card, self.devices = card, devices
        self.uuid = b"0123456789abcdef"  # of the card, or of a slice of it
        self.capturing = False
        self.waits_at_once = True  # False: the script never asks for a result
        self.streams, self.events, self.created_events = {}, {}, 0
        self.timed = set()  # events that note the time
        self.numbers = itertools.count(10)
        self.contexts = threading.local()

    def _cuInit(self, flags):
        pass

    def _cuGetErrorString(self, status, text):
        text[0] = b"stand-in error"

    def _cuDeviceGetCount(self, count):
        count[0] = self.devices

    def _cuDeviceGet(self, device, index):
        device[0] = index

    def _cuDeviceGetPCIBusId(self, text, length, device):
        ctypes.memmove(text, self.card.encode() + b"\0", len(self.card) + 1)

    def _cuDeviceGetUuid_v2(self, uuid, device):
        ctypes.memmove(uuid, self.uuid, 16)

    def _cuPointerGetAttribute(self, found, attribute, pointer):
        assert attribute == 9 and pointer
        ctypes.cast(found, ctypes.POINTER(ctypes.c_int))[0] = 0

    def _cuDevicePrimaryCtxRetain(self, context, device):
        context[0] = 0xC0 + device

    def _cuCtxPushCurrent_v2(self, context):
        self.contexts.depth = getattr(self.contexts, "depth", 0) + 1

    def _cuCtxPopCurrent_v2(self, context):
        self.contexts.depth -= 1

    def in_context(self):
        assert getattr(self.contexts, "depth", 0) > 0, "a call outside of any device's context"

    def _cuCtxSynchronize(self):
        self.in_context()
        assert not self.capturing, "the context was waited for during a capture"
        for stream in list(self.streams.values()):
            stream.drain()

    def _cuCtxGetStreamPriorityRange(self, least, greatest):
        self.in_context()
        least[0], greatest[0] = 0, -5

    def _cuStreamCreateWithPriority(self, stream, flags, priority):
        self.in_context()
        assert (flags, priority) == (1, -5)
        handle = next(self.numbers)
        self.streams[handle] = Stream()
        stream[0] = handle

    def _cuStreamDestroy_v2(self, stream):
        del self.streams[stream]

    def _cuStreamIsCapturing(self, stream, status):
        status[0] = int(self.capturing)

    def _cuThreadExchangeStreamCaptureMode(self, mode):
        before, self.contexts.mode = getattr(self.contexts, "mode", 0), mode[0]
        mode[0] = before

    def _cuEventCreate(self, event, flags):
        self.in_context()
        assert flags in (0, 2)
        handle = next(self.numbers)
        if flags == 0:
            self.timed.add(handle)
        else:
            self.created_events += 1
        self.events[handle] = threading.Event()
        event[0] = handle

    def _cuEventRecord(self, event, stream):
        self.in_context()
        assert not (self.capturing and event in self.timed), "a captured event has no time"
        happened = self.events[event] = Happened()
        happened.is_captured = self.capturing
        if stream == CALLERS_STREAM:
            happened.set()
        else:
            self.streams[stream].work.put(happened.set)

    def _cuStreamWaitEvent(self, stream, event, flags):
        happened = self.events[event]
        if stream == CALLERS_STREAM:
            if self.waits_at_once:
                happened.wait()
        else:
            self.streams[stream].work.put(happened.wait)

    def _cuEventQuery(self, event):
        assert not self.events[event].is_captured, "an event that belongs to a graph was asked about"
        assert getattr(self.contexts, "mode", 0) == 2, "asking would invalidate a graph that is being captured"
        return 0 if self.events[event].is_set() else NOT_READY

    def _cuEventElapsedTime(self, milliseconds, begin, end):
        assert getattr(self.contexts, "mode", 0) == 2, "asking would invalidate a graph that is being captured"
        if not {begin, end} <= self.timed:
            return INVALID_ARGUMENT
        if not (self.events[begin].is_set() and self.events[end].is_set()):
            return NOT_READY
        milliseconds[0] = (self.events[end].at - self.events[begin].at) * 1e3
        return SUCCESS

    def _cuEventDestroy_v2(self, event):
        self.timed.discard(event)
        del self.events[event]


class StandInNccl(CFunctions):
    """
    Args:
        cuda: whose streams it works on.
        host: where its ranks meet.
        polls: how often `ncclCommGetAsyncError` says "in progress" after each group; 0 if groups are done at once.
        blocks: whether a communicator may block; else it is as with NCCL_COMM_BLOCKING=0.
        held: what a blocking one waits for in each call.

    Attributes:
        group_seconds: if not 0, a thread takes so long for each group, however often it is asked.
    """

    def __init__(self, cuda, host, polls=3, blocks=False, held=None):
        for function, name in COLLECTED.items():
            setattr(self, f"_{function}", functools.partial(self._collect, name))
        super().__init__(nccl.FUNCTIONS)
        self.ncclGetErrorString = lambda status: f"stand-in status {status}".encode()
        self.ncclGetLastError = lambda communicator: b"what the stand-in says"
        self.cuda, self.host, self.blocks, self.held = cuda, host, blocks, held
        self.polls = 0 if blocks else polls
        self.delay = 0.0  # of each kernel
        self.group_seconds = 0.0
        self.asked = 0  # how often `ncclCommGetAsyncError` was called
        self.async_error = 0
        self.communicators = {}
        self.reductions = []  # numbers of operations, by call
        self.aborts_end = True  # False: `ncclCommAbort` ends kernels and then deadlocks, as in NCCL 2.25.1
        self.numbers = itertools.count(1000)
        self.group = threading.local()
        self.log = []
        self.allocated = {}  # pointer -> bytes
        self.registered = {}  # handle -> pointer
        self.has_windows = True  # False: these GPUs have no symmetric windows

    def _ncclGetVersion(self, version):
        version[0] = 23203

    def _ncclGetUniqueId(self, identity):
        pass

    def _ncclCommInitRankConfig(self, communicator, size, identity, rank, config):
        self.cuda.in_context()
        self.write_log()
        assert (config[0].magic, config[0].version) == (0xCAFEBEEF, 21400)
        self.block()
        handle = next(self.numbers)
        made = self.communicators[handle] = Communicator(self, rank, size)
        made.begin(lambda: None)
        communicator[0] = handle
        return SUCCESS if self.blocks else IN_PROGRESS

    def block(self):
        if self.held is not None:
            self.held.wait()

    def write_log(self):
        """At its first call NCCL reads these variables, and from then on writes there what it does."""
        path = os.environ.get("NCCL_DEBUG_FILE")
        if os.environ.get("NCCL_DEBUG") == "INFO" and path:
            Path(path).write_text(
                "NCCL INFO Using network Socket\nNCCL INFO Channel 00 : 0[0] -> 1[1] via SHM/direct\n"
            )

    def _ncclCommGetAsyncError(self, communicator, state):
        self.asked += 1
        state[0] = self.async_error or self.communicators[communicator].poll()

    def _ncclCommAbort(self, communicator):
        self.log.append("abort")
        aborted = self.communicators.pop(communicator)
        aborted.abort()
        aborted.wait_for_graphs()
        if not self.aborts_end:
            threading.Event().wait()

    def _ncclCommFinalize(self, communicator):
        self.log.append("finalize")
        self.block()
        self.communicators[communicator].finalize()
        return SUCCESS if self.blocks else IN_PROGRESS

    def _ncclCommDestroy(self, communicator):
        self.log.append("destroy")
        destroyed = self.communicators.pop(communicator)
        destroyed.abort()
        destroyed.wait_for_graphs()

    def _ncclGroupStart(self):
        assert getattr(self.group, "calls", None) is None, "groups are not nested here"
        self.group.calls = []

    def _ncclGroupEnd(self):
        self.cuda.in_context()
        self.block()
        collected, self.group.calls = self.group.calls, None
        if not collected:
            return SUCCESS
        (handle,), (stream,) = {call[0] for call in collected}, {call[1] for call in collected}
        made = self.communicators[handle]
        self.log.append([call[2] for call in collected])
        self.reductions += [call[7] for call in collected if call[2] in ("all_reduce", "reduce_scatter", "reduce")]
        if self.cuda.capturing:
            made.unreferenced.clear()
        made.begin(lambda: self.cuda.streams[stream].work.put(lambda: made.kernel([call[2:] for call in collected])))
        return IN_PROGRESS if made.left else SUCCESS

    def fail(self, function):
        """Let a function return an error from now on."""
        prototype = ctypes.CFUNCTYPE(ctypes.c_int, *nccl.FUNCTIONS[function])
        setattr(self, function, prototype(lambda *arguments: SYSTEM_ERROR))

    def without(self, *functions):
        """Lack some functions, as an older or a stripped library."""
        for name in functions:
            delattr(self, name)

    def _ncclMemAlloc(self, pointer, nbytes):
        self.cuda.in_context()
        data = (ctypes.c_char * nbytes)()
        pointer[0] = ctypes.addressof(data)
        self.allocated[pointer[0]] = data
        return SUCCESS

    def _ncclMemFree(self, pointer):
        self.cuda.in_context()
        self.log.append("free")
        assert pointer not in self.registered.values(), "memory was freed while it was registered"
        del self.allocated[pointer]

    def _register(self, what, communicator, pointer, handle):
        assert communicator in self.communicators and not self.communicators[communicator].finalizing
        handle[0] = next(self.numbers)
        self.registered[handle[0]] = pointer
        self.log.append(what)

    def _ncclCommRegister(self, communicator, pointer, nbytes, handle):
        self._register("register", communicator, pointer, handle)

    def _ncclCommDeregister(self, communicator, handle):
        made = self.communicators[communicator]
        assert not made.finalizing and made.left == 0, "NCCL has stopped what deregistration needs"
        for stream in list(self.cuda.streams.values()):
            assert stream.work.empty(), "memory was deregistered while the GPU works on it"
        del self.registered[handle]
        self.log.append("deregister")

    def _ncclCommWindowDeregister(self, communicator, handle):
        self._ncclCommDeregister(communicator, handle)

    def _ncclCommWindowRegister(self, communicator, pointer, nbytes, handle, flags):
        """Collective, in a thread of NCCL's that meets the others': the handle is written when all have come."""
        self.cuda.in_context()
        self.block()
        assert flags == 1
        made = self.communicators[communicator]
        made.begin(lambda: None)
        made.is_meeting = True
        address = ctypes.addressof(handle.contents)

        def meet():
            self.host.all_gather_object(nbytes)
            if self.has_windows:
                self._register("window", communicator, pointer, ctypes.cast(address, ctypes.POINTER(ctypes.c_void_p)))
            made.is_meeting = False

        if self.blocks:
            return meet()
        threading.Thread(target=meet, daemon=True).start()
        return IN_PROGRESS

    def _collect(self, name, *arguments):
        if self.group.calls is None:
            return INVALID_ARGUMENT
        *call, communicator, stream = arguments
        if name in ("send", "receive"):
            call.insert(name == "send", None)  # for the other buffer
        self.group.calls.append((communicator, stream, name, *call))
        return SUCCESS


class Communicator:
    """The target of an ncclComm_t."""

    def __init__(self, library, rank, size):
        self.library, self.host, self.rank, self.size = library, library.host, rank, size
        self.aborted = threading.Event()
        self.left, self.then = 0, None
        self.finalizing = self.is_meeting = False
        self.unreferenced = threading.Event()  # by graphs
        self.unreferenced.set()

    def finalize(self):
        self.begin(lambda: None)
        self.finalizing = True

    def wait_for_graphs(self):
        self.unreferenced.wait()

    def begin(self, then):
        assert self.left == 0, "a call before the previous one was through"
        self.left, self.then = self.library.polls, then
        if self.library.group_seconds:
            self.left = 1
            threading.Timer(self.library.group_seconds, self.end).start()
        elif self.left == 0:
            then()

    def end(self):
        self.then()
        self.left = 0

    def poll(self):
        if self.library.group_seconds:
            pass
        elif self.left:
            self.left -= 1
            if self.left == 0:
                self.then()
        is_held = self.finalizing and not self.unreferenced.is_set()
        return IN_PROGRESS if self.left or is_held or self.is_meeting else SUCCESS

    def abort(self):
        self.aborted.set()
        for stream in list(self.library.cuda.streams.values()):
            stream.drain()

    def kernel(self, collected):
        if self.aborted.is_set():
            return
        time.sleep(self.library.delay)
        every = self.host.all_gather_object(collected)
        results = [self.result(every, number) for number in range(len(collected))]
        self.host.all_gather_object("read")
        for (_, _, receive, _, kind, *_), numbers in zip(collected, results, strict=True):
            if numbers is not None:
                memory(receive, numbers.size, kind)[:] = numbers

    def result(self, every, number):
        """What one call of a group writes, of what all ranks called."""
        name, send, receive, count, kind, *more = every[self.rank][number]
        is_in_place = self.size == 1 and send == receive  # of memory that a script without waits may have freed
        if is_in_place or name == "send" or (name == "reduce" and more[1] != self.rank):
            return None
        if name == "receive":
            (sent,) = [call for call in every[more[0]] if (call[0], call[5:]) == ("send", (self.rank,))]
            return memory(sent[1], count, kind).copy()
        whole = count * (self.size if name == "reduce_scatter" else 1)
        sent = [memory(calls[number][1], whole, kind) for calls in every]
        if name == "all_gather":
            return np.concatenate(sent)
        if name == "broadcast":
            return sent[more[0]].copy()
        assert DTYPES[kind] != "bfloat16" or self.size == 1 or more[0] in (2, 3), "numpy adds no bfloat16"
        combined = (np.add, np.multiply, np.maximum, np.minimum, np.add)[more[0]].reduce(sent, dtype=sent[0].dtype)
        if more[0] == nccl.REDUCTIONS[Op.AVERAGE]:
            combined = combined / sent[0].dtype.type(self.size)
        return combined[self.rank * count :][:count] if name == "reduce_scatter" else combined


def memory(pointer, count, kind):
    """The numbers there."""
    storage = np.dtype("uint16" if DTYPES[kind] == "bfloat16" else DTYPES[kind])
    data = (ctypes.c_char * (count * storage.itemsize)).from_address(pointer) if count else b""
    return np.frombuffer(data, storage)


class Streams:
    """The streams of a framework on the CPU, whose work is done when it returns."""

    def __init__(self, cuda):
        self.cuda = cuda
        self.now = threading.local()

    def current(self):
        return getattr(self.now, "stream", CALLERS_STREAM)

    def scale(self, memory, factor):
        import torch

        data = (ctypes.c_char * memory.nbytes).from_address(memory.pointer)
        tensor = torch.frombuffer(data, dtype=getattr(torch, memory.dtype))
        if self.current() == CALLERS_STREAM:
            tensor.mul_(factor)
        else:
            self.cuda.streams[self.current()].work.put(lambda: tensor.mul_(factor))

    def note(self):
        pass

    catch_up = note

    @contextlib.contextmanager
    def using(self, stream):
        from torch.utils._python_dispatch import TorchDispatchMode

        own = self.cuda.streams[stream]

        class InOrder(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
                own.drain()
                return function(*arguments, **(keywords or {}))

        before, self.now.stream = self.current(), stream
        try:
            with InOrder():
                yield
        finally:
            self.now.stream = before


def alone(name="alone", host=None, data=None, driver=None, streams=None, **options):
    """A communicator without a world, and its NCCL: of one rank, or among the members of `host`, and then of `data`."""
    host, data, driver = host or SingleCommunicator(name), data or SingleCommunicator("NCCL"), driver or StandInDriver()
    library = StandInNccl(driver, data, **options)
    library.streams = streams = streams or Streams(driver)
    made, driver = nccl.Nccl(library, "stand-in"), cuda.Driver(driver)
    executor = DeviceExecutor(name, 0, host, streams, Wait(name, None), made, driver, blocks=library.blocks)
    return DeviceCommunicator(executor), library


def on_gpus(size, function, streams=None):
    """As `on_thread_ranks`, and each rank has a GPU: calls `function(rank, its communicator, its NCCL)`.

    With `streams` ranks have one GPU, which takes RING_SHARE_GPU=1.
    """

    def of_rank(rank, host):
        data = HostCommunicator("NCCL", rank, "host", 0, host.all_gather_object, None, None)
        driver = streams.cuda if streams else StandInDriver(f"0000:{rank + 1:02x}:00.0")
        communicator, library = alone("test", host, data, driver, streams)
        result = function(rank, communicator, library)
        communicator.close()
        data.close()
        return result

    return on_thread_ranks(size, of_rank)


def pass_for_gpu(own, setattr):  # noqa: A002  # as of monkeypatch
    """Make torch's CPU tensors pass for tensors on the stand-in's GPU, by monkeypatch.setattr."""
    import torch

    from ring_plugins.torch import device

    def complete(future, value, communicator):
        def wait():
            own.cuda.streams[communicator.stream].drain()
            future.set_result(value)

        threading.Thread(target=wait, daemon=True).start()

    class Moment:
        """An event on the CPU, which has always passed."""

        def __init__(self, index):
            pass

        def precedes(self, stream, index):
            pass

    def tensor_over(memory):
        data = (ctypes.c_char * memory.nbytes).from_address(memory.pointer)
        data.owner = memory  # which torch keeps alive
        return torch.frombuffer(data, dtype=torch.uint8)

    for name, stand_in in {
        "KIND": "cpu",
        "TorchStreams": lambda index: own,
        "complete": complete,
        "Moment": Moment,
        "tensor_over": tensor_over,
        "set_device": lambda index: None,
        "future_on_gpu": lambda index: torch.futures.Future(),
    }.items():
        setattr(device, name, stand_in)
    device.streams.cache_clear()
