"""ElasticSampler, with ranks that take turns in this process and are lost between steps, and with killed ranks."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader

from ring_plugins.torch import ElasticSampler, loaders
from ring_plugins.torch.order import position_of, resumed
from tests.launch import run_ranks


class Job:
    """Ranks whose loaders are advanced one after the other, one batch a step."""

    def __init__(self, monkeypatch, ranks, samples, batch_size):
        self._now = SimpleNamespace(shard=None)
        monkeypatch.setattr(loaders, "current", lambda: self._now)
        self.left = list(range(ranks))
        self.samplers = [ElasticSampler(range(samples)) for _ in range(ranks)]
        self._loaders = [DataLoader(range(samples), batch_size, sampler=one, drop_last=True) for one in self.samplers]
        self._batches = [iter(loader) for loader in self._loaders]

    def be(self, rank):
        self._now.shard = self.left.index(rank), len(self.left)

    def step(self):
        """The batches of all ranks that are left; empty ones at the end."""
        found = []
        for rank in self.left:
            self.be(rank)
            found.append(next(self._batches[rank], []))
        return [[int(index) for index in batch] for batch in found]


@pytest.mark.parametrize("losses", [{}, {2: [0]}, {1: [3], 3: [0, 1]}, {0: [1, 2, 3]}, {5: [2]}])
def test_the_rest_of_an_epoch_is_dealt_to_the_ranks_that_remain_and_no_sample_twice(monkeypatch, losses):
    job, seen, step, batch_size = Job(monkeypatch, 4, samples=101, batch_size=3), Counter(), 0, 3
    while any(batches := job.step()):
        assert {len(batch) for batch in batches} == {batch_size}  # ranks end their epoch in the same step
        seen.update(index for batch in batches for index in batch)
        for rank in losses.get(step, ()):
            job.left.remove(rank)
        step += 1
    assert set(seen.values()) == {1}
    assert len(seen) > 101 - batch_size * len(job.left)  # not even one more batch for each was there


def test_epochs_have_different_orders_that_ranks_share(monkeypatch):
    job = Job(monkeypatch, 2, samples=20, batch_size=1)
    orders = []
    for epoch in range(2):
        shares = []
        for rank in job.left:
            job.be(rank)
            job.samplers[rank].set_epoch(epoch)
            assert len(job.samplers[rank]) == 10
            shares.append(list(job.samplers[rank]))
        assert sorted(shares[0] + shares[1]) == list(range(20))
        orders.append(shares[0])
    assert orders[0] != orders[1]


KILLED = """
    import os, sys
    import torch
    from torch.utils.data import DataLoader
    import ring_plugins as ring
    from ring_plugins.torch import DistributedOptimizer, ElasticSampler, broadcast_parameters
    from tests.mortal import die, die_in_barrier
    from tests.passes import members_of_passes
    from tests.worker import report

    ring.init(ranks=4, on_failure="continue")
    me, model = ring.rank(), torch.nn.Linear(1, 1)
    broadcast_parameters(model)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
    sampler = ElasticSampler(range(101))
    loader = DataLoader(torch.arange(101.0), 3, sampler=sampler, num_workers=int(os.environ["TEST_WORKERS"]))
    for epoch in range(2):
        sampler.set_epoch(epoch)
        averaged_over = []
        passes = members_of_passes()
        for step, batch in enumerate(loader):
            report(f"drawn {epoch} {step}", batch.int(), me)
            if (me, epoch, step) == (0, 0, 2):
                die()
            if (me, epoch, step) == (2, 0, 5):
                die_in_barrier(2, "in")
            optimizer.zero_grad()
            model(batch[:, None]).sum().backward()
            averaged_over.append(list(passes[-1]))
            optimizer.step()
        report(f"averaged over {epoch}", averaged_over, me)
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_killed_ranks_cost_their_last_batch_and_no_sample_is_trained_on_twice(workers):
    result = run_ranks(KILLED, 4, env={"TEST_WORKERS": str(workers)}, timeout=90)
    survivors = [result.reports[rank] for rank in (1, 3)]
    for epoch in range(2):
        averaged_over = survivors[0][f"averaged over {epoch}"]
        assert averaged_over == survivors[1][f"averaged over {epoch}"]
        trained = Counter(
            sample
            for step, ranks in enumerate(averaged_over)
            for rank in ranks
            for sample in result.reports[rank][f"drawn {epoch} {step}"]
        )
        assert set(trained.values()) == {1} and trained.keys() <= set(range(101)) and averaged_over[-1] == [1, 3]
        # One batch of each: that in which rank 0 died, and the one after that in which rank 2 died, which counted.
        # Loaders had fetched two further batches per worker. One sample is left that two ranks cannot share.
        least, most = (2 * 3, 2 * 3 * (1 + 2 * workers)) if epoch == 0 else (0, 0)
        assert least <= 101 - len(trained) <= most + 1


def test_the_order_of_an_epoch_is_drawn_on_the_cpu_whatever_the_default_device(monkeypatch):
    monkeypatch.setattr(loaders, "current", lambda: SimpleNamespace(shard=(0, 1)))
    with torch.device("meta"):
        assert sorted(ElasticSampler(range(5))) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_rest_of_an_epoch_is_divided_by_a_checkpoint_s_number_on_any_number_of_ranks(monkeypatch, shuffle):
    def ranks(count):
        for rank in range(count):
            monkeypatch.setattr(loaders, "current", lambda at=rank: SimpleNamespace(shard=(at, count)))
            sampler = ElasticSampler(range(20), shuffle, seed=3)
            sampler.set_epoch(1)
            yield DataLoader(range(20), 2, sampler=sampler)

    read, positions = [], []
    for loader in ranks(2):
        batches = iter(loader)
        read += [*next(batches).tolist(), *next(batches).tolist()]
        positions.append(position_of(loader, 2, 2))
    assert positions[0] == positions[1] and positions[0]["consumed"] == 8
    left = []
    for loader in ranks(3):
        rest = resumed(loader, positions[0], 3)
        left += [one for batch in rest.loader for one in batch.tolist()]
        assert position_of(loader, 2, 3)["consumed"] == 20 and sum(map(len, loader)) == 6
    assert sorted(read + left) == list(range(20))


def test_what_was_consumed_follows_the_number_of_shards(monkeypatch):
    shards = [4]
    monkeypatch.setattr(loaders, "current", lambda: SimpleNamespace(shard=(0, shards[0])))
    draws = iter(sampler := ElasticSampler(range(20), shuffle=False))
    drawn = [next(draws), next(draws)]
    shards[0] = 2
    assert [*drawn, *draws] == [0, 4, 8, 10, 12, 14, 16, 18]
    assert [sampler.consumed(count) for count in range(5)] == [0, 4, 8, 10, 12]
