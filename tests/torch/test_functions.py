"""The public functions for tensors on a GPU, with the stand-in of one GPU and one rank."""

from types import SimpleNamespace

import pytest
import torch

from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.torch import functions


@pytest.fixture(autouse=True)
def communicator(gpu, monkeypatch):
    world = SimpleNamespace(device_communicator=lambda index, streams: gpu.communicator)
    monkeypatch.setattr(functions, "current", lambda: world)
    return gpu.communicator


def test_results_are_new_tensors_or_those_that_are_given():
    x = torch.arange(6.0).view(2, 3)
    result = functions.all_reduce(x, Op.SUM, None, True)
    assert torch.equal(result, x)
    assert result.data_ptr() != x.data_ptr()
    out = torch.zeros(2, 3)
    assert functions.broadcast(x, 0, out, True) is out
    assert torch.equal(out, x)
    assert functions.all_reduce(x, Op.AVERAGE, x, True) is x


def test_a_result_that_is_not_dense_is_copied_back():
    wide = torch.zeros(3, 4)
    out = wide[:, ::2]
    functions.all_reduce(torch.ones(3, 2), Op.SUM, out, True)
    assert wide.sum(0).tolist() == [3, 0, 3, 0]


@pytest.mark.parametrize("out", [torch.zeros(3), torch.zeros(2, dtype=torch.float64), [0.0, 0.0]])
def test_out_has_the_shape_and_type_of_what_is_reduced(out):
    with pytest.raises(ArgumentError, match=r"out must be a tensor on the GPU with x's shape \(2,\)"):
        functions.all_reduce(torch.ones(2), Op.SUM, out, True)


def test_rows_of_all_ranks_are_gathered_scattered_and_exchanged():
    x = torch.arange(8.0).view(4, 2)
    assert torch.equal(functions.all_gather(x, True), x)
    assert torch.equal(functions.reduce_scatter(x, Op.SUM, True), x)
    assert torch.equal(functions.all_to_all(x, [4], True), x)
    assert functions.all_gather(torch.tensor(3.0), True).tolist() == [3.0]
    with pytest.raises(ArgumentError, match="splits"):
        functions.all_to_all(x, [3], True)


def test_an_operation_that_is_begun_is_waited_for():
    x = torch.ones(3)
    work = functions.all_gather(x, False)
    assert work.wait().tolist() == [1, 1, 1]
    assert functions.all_reduce(x, Op.SUM, None, False).wait().tolist() == [1, 1, 1]
    with pytest.raises(ArgumentError, match="x has layout torch.sparse_coo"):
        functions.all_reduce(x.to_sparse(), Op.SUM, None, True)
