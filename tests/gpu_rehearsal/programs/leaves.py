"""Rank 1 sends and leaves the job in order, while the GPU of rank 0 still computes what comes before it receives."""

import ctypes
import os
import threading
import time

import torch
import torch.distributed as dist

import ring_plugins as ring
import ring_plugins.torch  # registers the backend
from ring_plugins.core.gpu import connection, stream
from ring_plugins.core.world import current
from tests.worker import report

ring.init(ranks=int(os.environ["TEST_RANKS"]))
DEVICE = torch.device("cuda", ring.local_rank())
torch.cuda.set_device(DEVICE)
connection.FINALIZE_TIMEOUT, stream._IN_FLIGHT = 0.1, 0.1
dist.init_process_group("ring")
x = torch.full((4,), 7.0, device=DEVICE)
(dist.send(x, 0) if ring.rank() else dist.recv(x, 1))  # both are connected
torch.cuda.synchronize()
ring.barrier()
if ring.rank():
    dist.send(x + 1, 0)
    torch.cuda.synchronize()
    ring.shutdown()
    os._exit(0)
computed = threading.Event()
compute = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: computed.wait() and None)
ctypes.CDLL("libcudart.so.13").cudaLaunchHostFunc(
    ctypes.c_void_p(torch.cuda.current_stream().cuda_stream), compute, None
)
work = dist.irecv(x, 1)
detector = current().failure_detector
while not detector.has_ended(1):
    time.sleep(0.01)
time.sleep(1.0)  # for as many looks of the watchdog as it likes
computed.set()
try:
    work.wait()
    report("received", x.cpu().tolist())
except ring.RingError as error:
    report("received", str(error))
os._exit(0)
