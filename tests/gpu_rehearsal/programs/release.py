"""Collectives and registered memory with some release of NCCL, or one that lacks functions; without torch."""

import ctypes
import os

import ring_plugins as ring
from ring_plugins.core import world
from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.arrays.memory import DeviceMemory
from ring_plugins.core.gpu import load_driver, load_nccl
from ring_plugins.core.gpu.registered import _KINDS
from tests.gpu_rehearsal.programs.bare_streams import Streams
from tests.worker import report

ring.init(ranks=int(os.environ["TEST_RANKS"]))
if ring.rank() == ring.size() - 1:
    os.environ["RING_SIMULATED_FAULTS"] = os.environ.get("TEST_FAULTS_OF_LAST", "")
driver, device = load_driver(), ring.local_rank()
communicator = world.current().new_device_communicator("test", device, Streams(driver.new_stream(device)))
executor = communicator.executor
try:
    memory = communicator.allocate_registered(4096)
except ring.RingError as error:
    report("error", str(error))
    ring.barrier()  # nobody hears of an error because a process has ended
    raise SystemExit from None
report("version", load_nccl().version)
report("blocks", executor.connection._blocks)
report("memory", _KINDS[executor.registered.blocks[-1].kind] if memory else "the framework's")
report("shrinks", load_nccl().has("ncclCommShrink"))
if memory is None:  # NCCL has no memory to give: the driver's, as a framework's would be
    pointer = ctypes.c_void_p()
    with driver.device(device):
        assert not ctypes.CDLL("libcudart.so.13").cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(64))
    address = int(pointer.value or 0)
else:
    address = memory.pointer
numbers = (ctypes.c_float * 4).from_address(address)  # a simulated device's memory is the host's
numbers[:] = [1.0 + ring.rank()] * 4
communicator.all_reduce(DeviceMemory(address, 4, "float32", device, memory), Op.SUM)
communicator.synchronize()
report("sum", list(numbers))
communicator.close()
ring.shutdown()
