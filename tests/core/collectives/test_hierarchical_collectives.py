"""Collectives between simulated hosts: what crosses each wire, and how all ranks learn of a mismatch."""

import numpy as np
import pytest

from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.arrays.memory import HostMemory
from ring_plugins.core.base.errors import ArgumentError, MismatchError
from ring_plugins.core.net import tcp
from tests.core.collectives.simulated_hosts import simulated_communicators

#: The host of each rank: 2 to 4 hosts, ranks of a host apart, unequal numbers of ranks.
LAYOUTS = [(0, 0, 1, 1), (0, 1, 0, 1, 0), (2, 0, 1, 1, 2, 0, 2), (0, 1, 2, 3, 3, 1, 0, 2), (0, 1, 1, 2, 3)]
HEADER = 512
SMALL, LARGE = 5, 300_001


@pytest.fixture(params=LAYOUTS, ids=lambda hosts: "".join(map(str, hosts)))
def hosts(request):
    return request.param


def memory(count, rank=0, dtype="float32"):
    return HostMemory((np.arange(count) % 7 + rank).astype(dtype), dtype)


def moved(job, hosts, call):
    """The bytes of every message between two hosts, after checking that nothing else is sent: {(from, to): [bytes]}."""
    for transport in job.transports:
        transport.sent.clear()
    assert job.on_all(call) == [None] * len(hosts)
    messages = {(a, b): [] for a in set(hosts) for b in set(hosts) if a != b}
    for rank, transport in enumerate(job.transports):
        for receiver, nbytes in transport.sent:
            messages[hosts[rank], hosts[receiver]].append(nbytes)  # KeyError: sent to a rank of the same host
    return messages


def counts_of(hosts, total):
    """An unequal number of elements for each rank, which one of them gets none of."""
    counts = [total // len(hosts) + 3 * rank for rank in range(len(hosts))]
    counts[1] = 0
    return counts


def of_host(hosts, values, host):
    return sum(value for value, its_host in zip(values, hosts, strict=True) if its_host == host)


def test_a_barrier_is_one_message_between_two_hosts(hosts):
    with simulated_communicators(hosts) as job:
        messages = moved(job, hosts, lambda rank, communicator: communicator.barrier())
    assert all(sent == [HEADER] for sent in messages.values())


@pytest.mark.parametrize("count", [SMALL, LARGE])
def test_all_gather_sends_each_hosts_numbers_once_over_each_wire(hosts, count):
    counts = counts_of(hosts, count)

    def gather(rank, communicator):
        out = memory(sum(counts))
        communicator.all_gather(memory(counts[rank], rank), out, counts)
        expected = [memory(n, other).array for other, n in enumerate(counts)]
        assert np.array_equal(out.array, np.concatenate(expected))

    with simulated_communicators(hosts) as job:
        for (sender, _), sent in moved(job, hosts, gather).items():
            assert sum(sent) == HEADER + 4 * of_host(hosts, counts, sender)
            assert len(sent) <= 2 or count == LARGE


@pytest.mark.parametrize("count", [SMALL, LARGE])
def test_a_broadcast_enters_each_host_once(hosts, count):
    with simulated_communicators(hosts) as job:
        for root in (0, len(hosts) - 1):

            def broadcast(rank, communicator, root=root):
                data = memory(count, rank)
                communicator.broadcast(data, root)
                assert np.array_equal(data.array, memory(count, root).array)

            messages = moved(job, hosts, broadcast)
            number = len(set(hosts))
            for host in set(hosts):
                received = sum(sum(sent) - HEADER for (_, to), sent in messages.items() if to == host)
                assert received == (0 if host == hosts[root] else 4 * count)
                sent_bytes = sum(sum(sent) - HEADER for (sender, _), sent in messages.items() if sender == host)
                if host == hosts[root]:
                    assert sent_bytes == 4 * count * (1 if count == LARGE else number - 1)
                else:
                    assert sent_bytes <= 4 * count
            assert all(len(sent) <= 2 or count == LARGE for sent in messages.values())


@pytest.mark.parametrize("count", [SMALL, LARGE])
def test_a_reduce_scatter_sends_each_host_one_sum(hosts, count):
    counts = counts_of(hosts, count)
    total, size = sum(counts), len(hosts)

    def scatter(rank, communicator):
        out = memory(counts[rank])
        communicator.reduce_scatter(memory(total, rank), out, counts, Op.SUM)
        expected = np.sum([memory(total, other).array for other in range(size)], axis=0)
        assert np.array_equal(out.array, expected[sum(counts[:rank]) :][: counts[rank]])

    with simulated_communicators(hosts) as job:
        for (_, receiver), sent in moved(job, hosts, scatter).items():
            assert sum(sent) == HEADER + 4 * of_host(hosts, counts, receiver)
            assert len(sent) <= 2 or count == LARGE


@pytest.mark.parametrize("count", [SMALL, LARGE // 4])
def test_an_all_to_all_sends_one_block_of_small_parts_between_two_hosts(hosts, count):
    size = len(hosts)

    def number(sender, receiver):
        return (3 * sender + 5 * receiver) % 4 * count

    def exchange(rank, communicator):
        sent = [number(rank, other) for other in range(size)]
        received = [number(other, rank) for other in range(size)]
        out = memory(sum(received))
        data = np.repeat([10 * rank + other for other in range(size)], sent).astype(np.float32)
        communicator.all_to_all(HostMemory(data, "float32"), sent, out, received)
        assert np.array_equal(out.array, np.repeat([10 * other + rank for other in range(size)], received))

    with simulated_communicators(hosts) as job:
        for (a, b), sent in moved(job, hosts, exchange).items():
            senders = [rank for rank in range(size) if hosts[rank] == a]
            receivers = [rank for rank in range(size) if hosts[rank] == b]
            data = 4 * sum(number(i, j) for i in senders for j in receivers)
            headers = HEADER * (1 if len(set(hosts)) == 2 else 2) + 16 * len(senders) * len(receivers)
            assert sum(sent) == headers + data
            assert len(sent) <= 4 or count != SMALL


def test_ranks_of_different_local_rank_are_not_connected():
    with simulated_communicators((0, 1, 0, 1, 0, 1)) as job:
        job.on_all(lambda rank, communicator: communicator.barrier())
        for rank, transport in enumerate(job.transports):
            assert connected(transport) == {rank ^ 1}


def connected(transport):
    return {peer for group in transport._groups.values() for peer in group.connections}


@pytest.mark.parametrize(("count", "direct"), [(4 << 10, False), ((4 << 10) + 1, True)])
def test_large_parts_of_an_all_to_all_go_directly_from_rank_to_rank(count, direct):
    """16 KiB still travel in a block; one number more does not."""
    hosts = (0, 1, 0, 1)

    def exchange(rank, communicator):
        data, out = memory(4 * count, rank), memory(4 * count)
        communicator.all_to_all(data, [count] * 4, out, [count] * 4)
        parts = [memory(4 * count, other).array[rank * count : (rank + 1) * count] for other in range(4)]
        assert np.array_equal(out.array, np.concatenate(parts))

    with simulated_communicators(hosts) as job:
        assert job.on_all(exchange) == [None] * 4
        for rank, transport in enumerate(job.transports):
            others = {other for other in range(4) if hosts[other] != hosts[rank]}
            assert connected(transport) == (others if direct else {rank ^ 1})


# One rank makes another call than the others: the last rank, which shares its host, or is its host's only one.
DIFFERENT = {
    "size of a broadcast": lambda c, odd: c.broadcast(memory(SMALL + odd), 0),
    "dtype of a large broadcast": lambda c, odd: c.broadcast(memory(LARGE, 0, "int32" if odd else "float32"), 0),
    "root": lambda c, odd: c.broadcast(memory(LARGE), int(odd)),
    "collective": lambda c, odd: c.barrier() if odd else c.broadcast_object("x"),
    "size of an all-reduce, large here and small there": lambda c, odd: c.all_reduce(
        memory(SMALL if odd else LARGE), Op.SUM
    ),
    "op of a reduce-scatter": lambda c, odd: c.reduce_scatter(
        memory(c.size * LARGE), memory(LARGE), [LARGE] * c.size, Op.MAX if odd else Op.SUM
    ),
    "counts of an all-gather": lambda c, odd: c.all_gather(
        memory(8 if c.rank == 0 else 4),
        memory(4 * c.size + 4),
        [8 if i == (1 if odd and c.rank != 1 else 0) else 4 for i in range(c.size)],
    ),
    "counts of an all-to-all": lambda c, odd: c.all_to_all(
        memory(4 * c.size + odd), [4 + odd, *[4] * (c.size - 1)], memory(4 * c.size), [4] * c.size
    ),
    "counts of a large all-to-all": lambda c, odd: c.all_to_all(
        memory(LARGE * c.size + odd), [LARGE + odd, *[LARGE] * (c.size - 1)], memory(LARGE * c.size), [LARGE] * c.size
    ),
    "counts of an all-to-all inside a host": lambda c, odd: c.all_to_all(
        memory(4 * c.size + odd), [*[4] * (c.size - 1), 4 + odd], memory(4 * c.size), [4] * c.size
    ),
}


@pytest.mark.parametrize(
    "layout",
    [(0, 0, 1), *(pytest.param(one, marks=pytest.mark.slow) for one in ((0, 0, 1, 1), (0, 1, 0, 2, 1), (0, 1, 2)))],
    ids=str,
)
@pytest.mark.parametrize("call", DIFFERENT)
def test_every_rank_learns_of_a_mismatch(layout, call):
    last = len(layout) - 1
    with simulated_communicators(layout) as job:
        errors = job.on_all(lambda rank, communicator: DIFFERENT[call](communicator, rank == last))
    assert [type(error) for error in errors] == [MismatchError] * len(layout), errors
    assert all("ranks disagree in test" in str(error) for error in errors)


@pytest.mark.parametrize("odd", [0, 6, 15])
@pytest.mark.parametrize(
    "call",
    [
        lambda c, odd: c.all_reduce(memory(SMALL + odd), Op.SUM),
        lambda c, odd: c.all_reduce(memory(LARGE), Op.MAX if odd else Op.SUM),
        lambda c, odd: c.all_reduce(memory(LARGE if odd else SMALL), Op.SUM),
        lambda c, odd: c.barrier() if odd else c.all_reduce(memory(LARGE), Op.SUM),
    ],
    ids=["small", "large", "large and small", "barrier"],
)
def test_every_host_of_many_learns_of_a_mismatch_although_it_exchanges_with_few(call, odd, monkeypatch):
    monkeypatch.setattr(tcp, "_LINGER", 0.0)  # sixteen ranks close one after the other here, with data unread
    with simulated_communicators(tuple(range(16))) as job:
        errors = job.on_all(lambda rank, communicator: call(communicator, rank == odd))
    assert [type(error) for error in errors] == [MismatchError] * 16, errors
    assert all("ranks disagree in test" in str(error) for error in errors)


def test_an_all_reduce_among_many_hosts_sends_few_messages():
    """Sixteen hosts exchange in groups of four: with three others, and then with three more."""
    hosts = tuple(range(16))
    with simulated_communicators(hosts) as job:
        for count, messages in ((SMALL, 2 * 3), (1_000_000, 2 * 3)):
            array = memory(count)
            sent = moved(job, hosts, lambda rank, communicator, array=array: communicator.all_reduce(array, Op.MAX))
            for rank in hosts:
                receivers = [b for (a, b), sizes in sent.items() if a == rank and sizes]
                assert len(receivers) == messages
                headers = [b for (a, b), sizes in sent.items() if a == rank and HEADER in sizes]
                assert len(headers) == messages


def test_a_mismatch_between_hosts_names_all_ranks():
    with simulated_communicators((0, 1, 0, 1)) as job:
        errors = job.on_all(lambda rank, communicator: communicator.broadcast(memory(4 + rank % 2), 0))
    assert [type(error) for error in errors] == [MismatchError] * 4
    assert all("ranks 0, 2 call broadcast(4 x float32, root 0), but ranks 1, 3 call" in str(error) for error in errors)


def test_counts_that_do_not_fit_this_ranks_memory_are_rejected_before_anything_is_sent():
    with simulated_communicators((0, 0)) as job:

        def gather(rank, communicator):
            with pytest.raises(ArgumentError, match=rf"counts=\[2, 2\] on rank {rank}.*input has 3 elements"):
                communicator.all_gather(memory(3), memory(4), [2, 2])
            with pytest.raises(ArgumentError, match=rf"counts=\[2, 2\] on rank {rank}.*output has 1 elements"):
                communicator.reduce_scatter(memory(4), memory(1), [2, 2], Op.SUM)
            communicator.barrier()

        assert job.on_all(gather) == [None] * 2


def test_the_result_of_a_reduce_scatter_may_lie_in_its_input():
    with simulated_communicators((0, 1, 0)) as job:

        def scatter(rank, communicator):
            full = memory(3 * LARGE, rank)
            out = full.array[2 * LARGE - rank * LARGE :][:LARGE]
            communicator.reduce_scatter(full, HostMemory(out, "float32"), [LARGE] * 3, Op.SUM)
            expected = np.sum([memory(3 * LARGE, other).array for other in range(3)], axis=0)
            assert np.array_equal(out, expected[rank * LARGE : (rank + 1) * LARGE])

        assert job.on_all(scatter) == [None] * 3


def test_ranks_in_step_have_run_equally_many_operations_wherever_they_are():
    """Rejections and deadlocks are told by that number. The first rank is alone on its host."""

    def several(rank, communicator):
        buffer = communicator.allocate(64)
        communicator.barrier()
        communicator.release(buffer)
        communicator.all_reduce(memory(LARGE), Op.SUM)
        communicator.broadcast_object("x")
        communicator.all_gather(memory(4), memory(4 * communicator.size), [4] * communicator.size)
        return communicator.statistics.operations

    with simulated_communicators((0, 1, 1)) as job:
        numbers = job.on_all(several)
    assert len(set(numbers)) == 1 and numbers[0] >= 6, numbers
