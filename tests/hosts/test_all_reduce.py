"""All-reduce over two to four hosts: right sums, the same bits on every rank, and no more bytes than needed."""

import pytest

from tests.hosts import find_mpich, hosts

CHECK = """
import numpy as np
import ring_plugins as ring
from ring_plugins.core.world import current
from tests.worker import report, transport

ring.init()
size, rank = ring.size(), ring.rank()


def inputs(count, dtype, of):
    return ((np.arange(count) * 7 + of * 3) % 11).astype(dtype)


def check(count, dtype, op, memory=None):
    x = inputs(count, dtype, rank)
    if memory is not None:
        memory[:count] = x
        x = memory[:count]
    got = ring.all_reduce(x, op, out=x)
    total = sum(inputs(count, np.float64, of) for of in range(size))
    expected = total / size if op is ring.AVERAGE else total
    assert np.allclose(got, expected, rtol=1e-3 if dtype == "float16" else 1e-6), (count, dtype, op)
    assert len(set(ring.all_gather_object(got.tobytes()))) == 1, (count, dtype, op)


bucket = current().communicator.allocate(8 * 1_000_003).array
# The count decides how the data is cut into chunks, the dtype how chunks are added; neither depends on the other.
cases = [(count, "float32", op) for count in (1, 5, 4097, 1_000_003) for op in (ring.AVERAGE, ring.SUM)]
cases += [(100_003, dtype, op) for dtype in ("float16", "float64") for op in (ring.AVERAGE, ring.SUM)]
cases += [(100_003, "int32", ring.SUM)]
for count, dtype, op in cases:
    check(count, dtype, op)
    check(count, dtype, op, bucket[: count * np.dtype(dtype).itemsize].view(dtype))
for count in (8, 50_000):
    largest = np.full(count, 65504, np.float16)
    assert (ring.all_reduce(largest) == 65504).all(), "the average of the largest float16 overflowed"


def sent_bytes():
    with open("/sys/class/net/eth0/statistics/tx_bytes") as file:
        return int(file.read())


data = np.ones(5_000_000, np.float32)
ring.barrier()
before = sent_bytes()
ring.barrier()
ring.all_reduce(data, out=data)
ring.barrier()
report("sent", (sent_bytes() - before) / data.nbytes)
report("transport", transport().name)
report("place", [ring.node_rank(), ring.local_rank()])
"""


@pytest.fixture(scope="module", params=[2, 3, pytest.param(4, marks=pytest.mark.slow)])
def cluster(request):
    with hosts(request.param) as cluster:
        yield cluster


def check_sent_bytes(cluster, launch, transport):
    """Run the checks, and look at what each host's network card has sent for one all-reduce."""
    result = launch.run()
    number = len(cluster.hosts)
    assert set(result.values("transport")) == {transport}
    sent = result.values("sent")
    assert len(sent) == 2 * number
    least = 2 * (number - 1) / number
    assert all(least <= one < 1.12 * least for one in sent), sent  # headers, acknowledgments, the barriers


def test_all_reduce_over_sockets_is_right_and_sends_no_more_than_it_must(cluster):
    check_sent_bytes(cluster, cluster.environment(CHECK, 2), "tcp")


@pytest.mark.mpi
@pytest.mark.parametrize("cluster", [2], indirect=True)
def test_all_reduce_over_open_mpi_is_right_and_sends_no_more_than_it_must(cluster):
    check_sent_bytes(cluster, cluster.mpirun(CHECK, 2, env={"RING_TRANSPORT": "mpi"}), "mpi")


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize("cluster", [2], indirect=True)
@pytest.mark.skipif(find_mpich() is None, reason="MPICH's wheel is not installed beside this environment")
def test_all_reduce_over_mpich_is_right_and_sends_no_more_than_it_must(cluster):
    check_sent_bytes(cluster, cluster.mpich(CHECK, 2, env={"RING_TRANSPORT": "mpi"}), "mpi")


UNEVEN = """
import numpy as np
import ring_plugins as ring
from tests.worker import report

ring.init()
mean = ring.all_reduce(np.arange(200_001.0) + ring.rank())
report("right", bool((mean == np.arange(200_001.0) + (ring.size() - 1) / 2).all()))
report("nodes", [ring.num_nodes(), ring.local_size()])
"""


@pytest.mark.mpi
@pytest.mark.parametrize("cluster", [2], indirect=True)
def test_hosts_with_different_numbers_of_ranks(cluster):
    result = cluster.mpirun(UNEVEN, [1, 2]).run()
    assert result.values("right") == [True] * 3
    assert result.values("nodes") == [[2, 1], [2, 2], [2, 2]]
