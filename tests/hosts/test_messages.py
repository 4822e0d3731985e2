"""Messages of torch.distributed between hosts, by the transport that moves collectives, too."""

import pytest

from tests.hosts import hosts

CHECK = """
import torch, torch.distributed as dist
import ring_plugins as ring, ring_plugins.torch
from ring_plugins.core.world import current
from ring_plugins.torch.rendezvous import store_from_world
from tests.worker import report, transport

ring.init()
dist.init_process_group("ring")
rank, size = dist.get_rank(), dist.get_world_size()


def exchange(count, tag):
    right, left = (rank + 1) % size, (rank - 1) % size
    sent = dist.isend(torch.full((count,), float(rank)), right, tag=tag)
    found = torch.zeros(count)
    dist.recv(found, left, tag=tag)
    sent.wait()
    return bool((found == left).all())


report("right", all(exchange(count, tag) for tag, count in enumerate([1, 0, 1000, 3_000_000] * 3)))
report("addresses", len(current().addresses()))
both = [dist.P2POp(dist.isend, torch.ones(3_000_000), 1 - rank % 2 + rank // 2 * 2),
        dist.P2POp(dist.irecv, torch.zeros(3_000_000), 1 - rank % 2 + rank // 2 * 2)]
for work in dist.batch_isend_irecv(both):  # within a host
    work.wait()
report("both", both[1].tensor.sum().item())
report("transport", transport().name)
store, *_ = store_from_world()
if rank == 0:
    listening = [line.split() for line in open("/proc/net/tcp") if line.split()[3] == "0A"]
    at = [fields[1].split(":")[0] for fields in listening if int(fields[1].split(":")[1], 16) == store.port]
    report("everywhere", at == ["00000000"])
if rank == 0:  # a rank may leave as soon as it has sent
    dist.send(torch.ones(1000), size - 1, tag=99)
elif rank == size - 1:
    import time
    time.sleep(0.5)
    found = torch.zeros(1000)
    dist.recv(found, 0, tag=99)
    report("last", found.sum().item())
"""


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize("transport", ["tcp", "mpi"])
def test_messages_between_hosts(transport):
    with hosts(2) as cluster:
        if transport == "tcp":
            result = cluster.environment(CHECK, 2).run()
        else:
            result = cluster.mpirun(CHECK, 2, env={"RING_TRANSPORT": "mpi"}).run()
    assert result.values("right") == [True] * 4
    assert result.values("both") == [3_000_000] * 4
    assert result.values("last") == [1000]
    assert set(result.values("transport")) == {transport}
    # Over sockets the store's port is open on the job's network alone; MPI does not tell which network that is.
    assert result.values("everywhere") == [max(result.values("addresses")) > 1]
    assert all(count == 1 if transport == "tcp" else count >= 1 for count in result.values("addresses"))
