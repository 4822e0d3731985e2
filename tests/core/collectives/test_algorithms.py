"""The ways of chunks between hosts: the right sums, and the same bits on all ranks, whichever way they go."""

import pytest

from ring_plugins.core.collectives.algorithms import RING_FROM, Direct, PairExchange, Ring, choose_algorithm
from tests.launch import run_ranks

SUMS = """
import os
import numpy as np
import ring_plugins as ring
from ring_plugins.core.collectives import algorithms as stream
from ring_plugins.core.arrays.codec import Compression, HalfCodec
from ring_plugins.core.arrays.memory import HostMemory
from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.world import current

stream.RING_FROM, stream.PAIR_EXCHANGE_BYTES = int(os.environ["RING_FROM"]), int(os.environ["PAIR_EXCHANGE_BYTES"])
ring.init(ranks=int(os.environ["TEST_RANKS"]))
size, rank = ring.size(), ring.rank()
random = np.random.default_rng(0)
for count in (70_001, 300_007, 1_500_003):
    whole = random.standard_normal((size, count)).astype(np.float32)
    for op, expected in ((ring.AVERAGE, whole.mean(0)), (ring.SUM, whole.sum(0)), (ring.MAX, whole.max(0))):
        got = ring.all_reduce(whole[rank], op)
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
        assert len(set(ring.all_gather_object(got.tobytes()))) == 1, (count, op)
    got, wire = whole[rank].copy(), HalfCodec(Compression("float16", False))
    wire.begin(got)
    current().communicator.all_reduce(HostMemory(got, "float32"), Op.AVERAGE, wire)
    np.testing.assert_allclose(got, whole.mean(0), atol=1e-2)
    assert len(set(ring.all_gather_object(got.tobytes()))) == 1, count
"""


def test_the_way_depends_on_how_many_hosts_there_are_and_how_much_there_is():
    assert choose_algorithm(2, 1 << 20) == (PairExchange, 1)
    assert choose_algorithm(2, 25 << 20) == (Direct, 2)
    assert choose_algorithm(RING_FROM - 1, 1 << 20) == (Direct, 2)
    assert choose_algorithm(RING_FROM, 1 << 20) == (Ring, 2 * (RING_FROM - 1))


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("members", "hosts", "ring_from", "pair_up_to"),
    [(4, 2, 16, 1 << 30), (3, 2, 16, 0), (3, 3, 3, 0)],
    ids=["pair", "straight", "ring"],
)
def test_every_way_gives_the_right_sums_and_the_same_bits(members, hosts, ring_from, pair_up_to):
    own = {"RING_VIRTUAL_NODES": str(hosts), "RING_FROM": str(ring_from), "PAIR_EXCHANGE_BYTES": str(pair_up_to)}
    run_ranks(SUMS, members, "mpirun", env=own)


# The kernel takes so little at once that most of a message waits in the process that sends it, and ranks come late.
NARROW = """
import os, random, socket, time
import numpy as np
import ring_plugins as ring
from ring_plugins.core.net import listener
from ring_plugins.core.collectives import hierarchical as lockstep

ready, step = listener._ready, lockstep._StagedMemory.step

class Narrow(socket.socket):
    def setsockopt(self, level, option, *value):
        if option != socket.SO_RCVLOWAT:  # which would widen it again
            super().setsockopt(level, option, *value)

def narrow(line):
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        line.setsockopt(socket.SOL_SOCKET, option, 20_000)
    return ready(Narrow(fileno=line.detach()))

def late(self, new, old):
    if chance.random() < 0.2:
        time.sleep(chance.random() * 0.01)
    step(self, new, old)

listener._ready, lockstep._StagedMemory.step = narrow, late
ring.init()
chance = random.Random(ring.rank())
for i in range(10):
    x = np.full(600_000, ring.rank() + i, np.float32)
    ring.all_reduce(x, ring.SUM, out=x)
    assert (x == 6 + 4 * i).all()
"""


def test_who_waits_for_its_mates_keeps_sending():
    run_ranks(NARROW, 4, "torchrun", env={"RING_VIRTUAL_NODES": "2", "RING_TIMEOUT": "40"}, timeout=150)
