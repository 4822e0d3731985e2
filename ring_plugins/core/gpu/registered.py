"""Memory of a GPU that NCCL allocates and has registered, off unless RING_NCCL_REGISTER=1.

**Why.** NCCL copies what it sends through buffers of its own, by kernels that take multiprocessors from backward. From
memory that all ranks have registered it sends directly, and NVLink's switches can add it up on the way (NVLS). That
takes memory of `ncclMemAlloc`, and every rank must use the same offset in it. Two interfaces register memory:

- `ncclCommWindowRegister` (NCCL 2.27) with NCCL_WIN_COLL_SYMMETRIC: each rank's memory appears at the same offset of a
  table that all ranks share. It is a collective of NCCL's own. Where GPUs cannot do that, it succeeds with no window.
- `ncclCommRegister` (2.19) is local, and NCCL uses it only if all ranks have called it.

**All ranks do the same.** `allocate` is collective. The ranks agree over the host after each step, so a rank whose NCCL
lacks a function, or has no memory left, takes all others to the next lesser way with it: a window, a registration,
NCCL's memory alone, and the framework's memory. A rank on which NCCL fails inside the window's own collective is the
exception: NCCL's communicator is of no use after that, so that is an error on all ranks.

**When memory is freed.** Gradients are views of it, and outlive buckets, optimizers, even the communicator. So it goes
back to NCCL only after the communicator has deregistered it, which happens when that closes, *and* the framework's last
tensor has gone; then, since the GPU has to be idle, when the next communicator closes. Allocating does not wait for
the GPU: another rank may send what it still receives only after its own allocation.
Until the communicator closes, memory whose tensors have gone is handed out again, if that is so on all ranks. What an
aborted communicator registered, or a captured one, is never freed: NCCL may still use it.
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections import deque
from typing import Any

from ring_plugins.core.base.errors import DeviceError, MismatchError, RingError, name_ranks
from ring_plugins.core.base.log import logger
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.gpu.connection import NcclConnection
from ring_plugins.core.gpu.cuda import Driver
from ring_plugins.core.gpu.nccl import Nccl

#: Bytes in which a GPU maps memory. Rounded up to these, buckets of other sizes for the same gradients take one block.
_GRANULARITY = 2 << 20
#: Kinds of registration, the best last.
_ALLOCATED, _REGISTERED, _WINDOW = 0, 1, 2
_KINDS = ("not registered", "registered (ncclCommRegister)", "registered as a symmetric window")


class RegisteredMemory:
    """A stretch of a GPU's memory for a framework's tensors, which keep this object alive and with it the memory.

    Attributes:
        pointer: its address on the device.
        nbytes: its size.
        device: number of the GPU in this process.
    """

    def __init__(self, pointer: int, nbytes: int, device: int) -> None:
        self.pointer, self.nbytes, self.device = pointer, nbytes, device

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """What torch, CuPy, JAX and Numba read to make an array over the memory (version 3 of Numba's protocol)."""
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.pointer, False), "version": 3}


class _Block:
    """An allocation of NCCL's.

    Attributes:
        pointer, nbytes: see `RegisteredMemory`.
        kind: how it is registered.
        handle: of its registration, 0 for none.
        is_registered: whether NCCL may use it.
    """

    def __init__(self, pointer: int, nbytes: int) -> None:
        self.pointer, self.nbytes = pointer, nbytes
        self.kind, self.handle, self.is_registered = _ALLOCATED, 0, True
        self._user: weakref.ref[RegisteredMemory] | None = None

    @property
    def is_used(self) -> bool:
        """Whether a tensor lies in it."""
        return self._user is not None and self._user() is not None

    def hand_out(self, nbytes: int, device: int) -> RegisteredMemory:
        memory = RegisteredMemory(self.pointer, nbytes, device)
        self._user = weakref.ref(memory)
        return memory


class RegisteredPool:
    """The registered memory of one communicator.

    Used by one thread at a time.

    Args:
        name: of the communicator, for error texts.
        device: this rank's GPU.
        host: a communicator among the same ranks.
        connection: the communicator's connection.
        nccl, driver: the libraries of this process.

    Attributes:
        blocks: what was allocated.
    """

    def __init__(
        self,
        name: str,
        device: int,
        host: Communicator[Any],
        connection: NcclConnection,
        nccl: Nccl,
        driver: Driver,
    ) -> None:
        self._name, self._device, self._host, self._connection = name, device, host, connection
        self._nccl, self._driver = nccl, driver
        self.blocks: list[_Block] = []

    def allocate(self, nbytes: int) -> RegisteredMemory | None:
        """Memory of this size, registered as well as all ranks can, with the device current; collective.

        Args:
            nbytes: its size, equal on all ranks.

        Returns:
            The memory, with arbitrary contents; None if a rank cannot have any.

        Raises:
            MismatchError: the sizes differ.
            DeviceError, TimeoutExceeded: NCCL failed in a way that ends the communicator.
        """
        size = -(-nbytes // _GRANULARITY) * _GRANULARITY
        free = next((i for i, block in enumerate(self.blocks) if not block.is_used and block.nbytes == size), -1)
        found = self._host.all_gather_object((nbytes, free), "allocate on GPUs")
        if len({wanted for wanted, _ in found}) > 1:
            raise MismatchError(
                f"{self._name}: {name_ranks(self._host.ranks)} allocate {[wanted for wanted, _ in found]} bytes of "
                "registered memory; pass the same bucket sizes on all ranks."
            )
        if free >= 0 and {place for _, place in found} == {free}:
            return self.blocks[free].hand_out(nbytes, self._device)
        block, error = self._new_block(size)
        registers = self._nccl.has("ncclCommRegister")
        best = _WINDOW if self._nccl.has("ncclCommWindowRegister") else _REGISTERED if registers else _ALLOCATED
        offers = self._host.all_gather_object((block is not None, best, error), "allocate on GPUs")
        if block is None or not all(has for has, _, _ in offers):
            if block is not None:
                self._nccl.call("ncclMemFree", block.pointer)
            self._tell(
                [has for has, _, _ in offers],
                [text for _, _, text in offers],
                "so all ranks use the framework's memory",
            )
            return None
        self.blocks.append(block)
        self._register(block, min(kind for _, kind, _ in offers))
        return block.hand_out(nbytes, self._device)

    def _new_block(self, nbytes: int) -> tuple[_Block | None, str]:
        """New memory, or why there is none."""
        pointer = ctypes.c_void_p()
        try:
            if not self._nccl.has("ncclMemAlloc"):
                return None, f"{self._nccl} has no ncclMemAlloc, which came with 2.19"
            self._nccl.call("ncclMemAlloc", ctypes.byref(pointer), nbytes)
        except DeviceError as error:
            return None, str(error)
        return _Block(int(pointer.value or 0), nbytes), ""

    def _register(self, block: _Block, best: int) -> None:
        """Register memory in the best way that works on all ranks."""
        for kind in range(best, _ALLOCATED, -1):
            block.kind, error = kind, ""
            if kind == _WINDOW:
                block.handle = self._connection.register_window(block.pointer, block.nbytes)
            else:
                handle = ctypes.c_void_p()
                try:
                    self._connection.call_own("ncclCommRegister", block.pointer, block.nbytes, ctypes.byref(handle))
                except DeviceError as raised:
                    error = str(raised)
                block.handle = int(handle.value or 0)
            outcomes = self._host.all_gather_object((bool(block.handle), error), "register with NCCL")
            haves = [bool(has) for has, _ in outcomes]
            if all(haves):
                self._tell(haves, [], "")
                return
            self._deregister(block)
        self._tell(haves, [text for _, text in outcomes], "so NCCL copies gradients through buffers of its own")

    def _deregister(self, block: _Block) -> None:
        handle, block.handle = block.handle, 0
        kind, block.kind = block.kind, _ALLOCATED
        if handle:
            name = "ncclCommWindowDeregister" if kind == _WINDOW else "ncclCommDeregister"
            self._connection.call_own(name, handle)

    def _tell(self, haves: list[bool], errors: list[str], consequence: str) -> None:
        """Log what became of it, once a process."""
        if self._host.rank != 0 or consequence in _told:
            return
        _told.add(consequence)
        if not consequence:
            logger.info(f"gradients lie in memory of NCCL's that is {_KINDS[self.blocks[-1].kind]}.")
            return
        missing = [rank for rank, has in zip(self._host.ranks, haves, strict=True) if not has]
        why = next(filter(None, errors), "NCCL declined without a reason; NCCL_DEBUG=INFO may show one")
        logger.warning(f"RING_NCCL_REGISTER=1 has no effect on {name_ranks(missing)}, {consequence}: {why}")

    def deregister(self) -> None:
        """Undo the registrations before the communicator is destroyed, once its operations are done."""
        for block in self.blocks:
            with contextlib.suppress(RingError):
                self._deregister(block)
                block.is_registered = False

    def close(self) -> None:
        """Leave the memory to `release_unused`, after the communicator has ended."""
        _waiting.extend(
            (self._nccl, self._driver, self._device, block) for block in self.blocks if not block.is_registered
        )
        self.blocks = []
        release_unused()

    def detach_after_fork(self) -> None:
        """In a forked child: forget all memory, which is the parent's."""
        self.blocks = []
        _waiting.clear()


#: What this process has logged.
_told: set[str] = set()
#: Memory of closed communicators, in which tensors may still lie.
_waiting: deque[tuple[Nccl, Driver, int, _Block]] = deque()


def release_unused() -> None:
    """Free memory of closed communicators whose last tensor has gone; waits for the GPU if there is any.

    Unmapping does not wait for kernels, unlike `cudaFree`. If the GPU cannot be waited for now, the memory stays for
    the next call.
    """
    for _ in range(len(_waiting)):
        try:
            item = _waiting.popleft()  # at once, since another thread may do the same
        except IndexError:
            return
        nccl, driver, device, block = item
        is_free = False
        if not block.is_used:
            with contextlib.suppress(DeviceError), driver.device(device):
                driver.synchronize()
                is_free = True
        if is_free:
            with contextlib.suppress(DeviceError), driver.device(device):
                nccl.call("ncclMemFree", block.pointer)
        else:
            _waiting.append(item)
