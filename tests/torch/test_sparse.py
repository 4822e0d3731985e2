"""Averages of sparse gradients; a fake communicator of two ranks repeats this rank's rows as the other's."""

import pytest
import torch
from torch import nn

from ring_plugins.core.collectives.single import SingleCommunicator
from ring_plugins.torch.sparse import average_sparse, sparse_parameters


class Doubled:
    """Both ranks hold the same gradient."""

    size = 2

    def all_gather_object(self, item, purpose=""):
        return [item, item]

    def all_gather(self, source, target, counts):
        assert counts == [source.array.size] * 2
        target.array[: counts[0]] = target.array[counts[0] :] = source.array


def embedding():
    table = nn.Embedding(6, 2, sparse=True)
    table(torch.tensor([1, 4, 4])).sum().backward()
    return table


def test_equal_gradients_are_their_own_average():
    table = embedding()
    before = table.weight.grad.to_dense().clone()
    average_sparse(table.weight, Doubled())
    assert table.weight.grad.is_sparse
    assert table.weight.grad._nnz() == 2
    assert torch.equal(table.weight.grad.to_dense(), before)


def test_a_dense_gradient_becomes_sparse():
    weight = nn.Parameter(torch.ones(3, 2))
    weight.grad = torch.arange(6.0).view(3, 2)
    average_sparse(weight, SingleCommunicator("test"))
    assert weight.grad.is_sparse
    assert weight.grad.to_dense().tolist() == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("rows", [[], [4]])
@pytest.mark.parametrize("communicator", [Doubled(), SingleCommunicator("test")])
def test_the_next_backward_adds_to_an_average_of_few_rows(rows, communicator):
    table = nn.Embedding(6, 2, sparse=True)
    table(torch.tensor(rows, dtype=torch.long)).sum().backward()
    average_sparse(table.weight, communicator)
    table(torch.tensor([1, 4])).sum().backward()
    assert table.weight.grad.to_dense().sum(1).tolist() == [0, 2, 0, 0, 2 + 2 * len(rows), 0]


def test_a_gradient_that_no_rank_has_stays_none():
    weight = nn.Parameter(torch.ones(3, 2))
    average_sparse(weight, SingleCommunicator("test"))
    assert weight.grad is None


def test_embeddings_say_that_they_are_sparse():
    model = nn.ModuleList([nn.Embedding(3, 2), nn.Embedding(3, 2, sparse=True), nn.EmbeddingBag(3, 2, sparse=True)])
    assert sparse_parameters(model) == {model[1].weight, model[2].weight}
