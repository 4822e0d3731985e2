"""ElasticSampler, with ranks that take turns in this process and are lost between steps."""

from collections import Counter
from types import SimpleNamespace

import pytest
from torch.utils.data import DataLoader

from ring_plugins.torch import ElasticSampler, sampler


class Job:
    """Ranks whose loaders are advanced one after the other, one batch a step."""

    def __init__(self, monkeypatch, ranks, samples, batch_size):
        self._now = SimpleNamespace(topology=None)
        monkeypatch.setattr(sampler, "current", lambda: self._now)
        self.left = list(range(ranks))
        self.samplers = [ElasticSampler(range(samples)) for _ in range(ranks)]
        self._loaders = [DataLoader(range(samples), batch_size, sampler=one, drop_last=True) for one in self.samplers]
        self._batches = [iter(loader) for loader in self._loaders]

    def be(self, rank):
        self._now.topology = SimpleNamespace(rank=self.left.index(rank), size=len(self.left))

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
