"""The last rank is killed while the others' devices wait for it: they raise PeerFailed, and none hangs."""

import os
import signal
import time

import torch

import ring_plugins as ring
import ring_plugins.torch
from tests.worker import report

ring.init(ranks=int(os.environ["TEST_RANKS"]))
DEVICE = torch.device("cuda", ring.local_rank())
torch.cuda.set_device(DEVICE)
x = torch.ones(1 << 16, device=DEVICE)
ring.all_reduce(x)
torch.cuda.synchronize()
ring.barrier()
if ring.rank() == ring.size() - 1:
    os.kill(os.getpid(), signal.SIGKILL)
began = time.monotonic()
try:
    while time.monotonic() - began < 60:
        ring.all_reduce(x)
        torch.cuda.synchronize()
    report("heard", "nothing")
except ring.PeerFailed as error:
    report("heard", str(error))
