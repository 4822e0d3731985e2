"""Horovod's operations on torch's tensors, in a job of one; tests/horovod/test_torch.py has several ranks."""

import importlib
import warnings
from types import SimpleNamespace

import pytest
import torch

import ring_plugins as ring
import ring_plugins.horovod.torch as hvd
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.horovod.torch import collectives


@pytest.fixture(scope="module", autouse=True)
def _job_of_one():
    ring.init(ranks=1)
    yield
    ring.shutdown()


def test_all_functions_are_horovods_and_named_so():
    for name in collectives.__all__:
        function = getattr(hvd, name)
        assert function.__name__ == name
        assert function.__doc__


def test_factors_come_before_and_after_and_integers_are_cut_off():
    x = torch.tensor([3, 5])
    assert hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5).tolist() == [1, 2]
    assert hvd.allreduce(x.float(), op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0).tolist() == [6, 10]
    assert hvd.allreduce(x.float(), compression=hvd.Compression.fp16).dtype == torch.float32


def test_in_place_operations_return_the_tensor_itself():
    x = torch.ones(2)
    assert hvd.allreduce_(x, op=hvd.Sum, postscale_factor=3.0) is x
    assert x.tolist() == [3, 3]
    assert hvd.broadcast_(x, 0) is x
    assert hvd.grouped_allreduce_([x, x.clone()], op=hvd.Sum)[0] is x


def test_a_handle_is_polled_and_waited_for_as_often_as_wanted():
    handle = hvd.allgather_async(torch.ones(2, 2))
    result = hvd.synchronize(handle)
    assert hvd.poll(handle)
    assert hvd.synchronize(handle) is result
    first, second = hvd.grouped_allgather([torch.ones(1), torch.zeros(2)])
    assert (first.tolist(), second.tolist()) == ([1], [0, 0])


def test_rows_that_came_are_told_with_splits_only():
    x = torch.arange(3.0)
    assert hvd.alltoall(x).tolist() == [0, 1, 2]
    rows, received = hvd.alltoall(x, torch.tensor([3]))
    assert (rows.tolist(), received.tolist()) == ([0, 1, 2], [3])
    _, received = hvd.synchronize(hvd.alltoall_async(x))
    assert received.dtype == torch.int32


@pytest.mark.parametrize(
    "operation",
    [
        hvd.allreduce,
        hvd.allgather,
        lambda x: hvd.broadcast(x, 0),
        hvd.alltoall,
        lambda x: hvd.reducescatter(x, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5),
    ],
    ids=["allreduce", "allgather", "broadcast", "alltoall", "reducescatter"],
)
def test_operations_pass_gradients(operation):
    x = torch.ones(2, 2, requires_grad=True)
    (operation(x) * torch.arange(4.0).view(2, 2)).sum().backward()
    assert x.grad.tolist() == [[0, 1], [2, 3]]
    assert not operation(x.detach()).requires_grad


def test_sparse_tensors_are_combined_by_their_entries():
    x = torch.sparse_coo_tensor([[1, 1]], [2.0, 3.0], (3,))
    handle = hvd.sparse_allreduce_async(x, "rows", hvd.Average)
    assert handle().to_dense().tolist() == [0, 5, 0]
    with pytest.raises(ArgumentError, match=r"call hvd.allreduce_async\(tensor\)"):
        hvd.sparse_allreduce_async(x.to_dense(), "rows", hvd.Sum)
    with pytest.raises(ArgumentError, match="must be hvd.Average or hvd.Sum"):
        hvd.sparse_allreduce_async(x, "rows", hvd.Max)


def test_the_optimizer_has_what_scripts_read_of_horovods():
    layers = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(layers.parameters(), lr=0.1))
    names = optimizer._parameter_names
    assert [names[p] for p in layers.parameters()] == [f"parameter {i}" for i in range(4)]
    optimizer.synchronize()
    with pytest.warns(UserWarning, match=r"without optimizer\.skip_synchronize\(\) context"):
        optimizer.step()
    optimizer.synchronize()
    with optimizer.skip_synchronize(), warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
    optimizer.close()


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("mpi_ops", "allreduce_async_ synchronize poll rank size Average global_process_set ProcessSet join"),
        ("compression", "Compression Compressor NoneCompressor FP16Compressor"),
        ("functions", "broadcast_parameters broadcast_optimizer_state broadcast_object allgather_object"),
        ("optimizer", "DistributedOptimizer"),
        ("sync_batch_norm", "SyncBatchNorm"),
    ],
)
def test_horovods_submodules_have_its_names(module, names):
    found = importlib.import_module(f"ring_plugins.horovod.torch.{module}")
    assert [name for name in names.split() if not hasattr(found, name)] == []


def test_an_error_while_optimizers_take_part_is_raised_in_join(monkeypatch):
    def follow(weight):
        raise ValueError("no pass")

    monkeypatch.setattr(hvd, "_optimizers", [lambda: SimpleNamespace(waits_in_join=lambda: True)])
    monkeypatch.setattr(hvd.ring_plugins.torch, "join", lambda *parts: SimpleNamespace(follow=follow, settle=None))
    monkeypatch.setattr(hvd.basics, "join", lambda device: 0)
    with pytest.raises(ValueError, match="no pass"):
        hvd.join()
