"""A peer is killed while this rank's GPU waits for it: this rank raises PeerFailed and ends."""

import os
import signal
import time

from tests.gpu.card import DEVICE, RANK, fact, ring, synchronize, torch

x = torch.ones(1 << 20, device=DEVICE)
ring.all_reduce(x)
synchronize()
ring.barrier()
if RANK == 1:
    os.kill(os.getpid(), signal.SIGKILL)
began = time.monotonic()
try:
    while time.monotonic() - began < 20:
        ring.all_reduce(x, out=x)
        synchronize()  # with a kernel that waits for the dead peer
    fact(check="killed peer", heard_after=None, said="")
except ring.PeerFailed as error:
    fact(check="killed peer", heard_after=round(time.monotonic() - began, 2), said=str(error)[:80])
