"""The last rank is killed while the others' devices wait for it: they raise PeerFailed, and none hangs.

`killed_peer.py first`: before the first operation, so that the others may be inside NCCL, which connects them there.
"""

import os
import signal
import sys
import time

import torch

import ring_plugins as ring
import ring_plugins.torch
from ring_plugins.core.world import current
from ring_plugins.torch.device import streams
from tests.worker import report

ring.init(ranks=int(os.environ["TEST_RANKS"]))
DEVICE = torch.device("cuda", ring.local_rank())
torch.cuda.set_device(DEVICE)
x = torch.ones(1 << 16, device=DEVICE)
if sys.argv[1:] != ["first"]:
    ring.all_reduce(x)
else:
    current().device_communicator(DEVICE.index, streams(DEVICE.index))
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
