"""The rest of an epoch is divided among the ranks that there are when the training begins again."""

from types import SimpleNamespace

import pytest

from ring_plugins.horovod.torch.elastic import sampler as module
from ring_plugins.horovod.torch.elastic.sampler import ElasticSampler


@pytest.fixture
def job(monkeypatch):
    topology = SimpleNamespace(rank=0, size=1)
    monkeypatch.setattr(module, "current", lambda: SimpleNamespace(topology=topology))
    return topology


def of_all_ranks(job, size, make):
    found = []
    for job.rank in range(size):
        job.size = size
        one = make()
        found.append([*one])
        assert len(one) == len(found[-1])
    return found


def test_each_sample_comes_once_and_all_ranks_have_equally_many(job):
    found = of_all_ranks(job, 3, lambda: ElasticSampler(range(10)))
    assert [len(one) for one in found] == [4, 4, 4]
    assert {*found[0], *found[1], *found[2]} == {*range(10)}
    other = of_all_ranks(job, 3, lambda: ElasticSampler(range(10), seed=1))
    assert other != found


def test_after_a_change_the_rest_is_divided_anew(job):
    trained, states = [], []
    for job.rank in range(3):
        job.size = 3
        one = ElasticSampler(range(20))
        trained += [*one][:4]
        for batch in range(2):
            one.record_batch(batch, 2)
        states.append(one.state_dict())
    assert states == [{"epoch": 0, "processed_num": 12}] * 3

    def resumed():
        one = ElasticSampler(range(20))
        one.load_state_dict(states[0])
        return one

    left = of_all_ranks(job, 2, resumed)
    assert sorted([*trained, *left[0], *left[1]]) == [*range(20)]


def test_another_epoch_has_another_order_unless_it_is_not_shuffled(job):
    one, plain = ElasticSampler(range(8)), ElasticSampler(range(8), shuffle=False)
    first = [*one]
    one.record_batch(0, 8)
    one.reset()
    assert [*one] == [] and len(one) == 0
    one.set_epoch(1)
    assert sorted(one) == sorted(first) and [*one] != first
    assert [*plain] == [*range(8)]


def test_fewer_samples_than_ranks_come_several_times(job):
    assert of_all_ranks(job, 5, lambda: ElasticSampler(range(2), shuffle=False)) == [[0], [1], [0], [1], [0]]
