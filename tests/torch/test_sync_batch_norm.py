"""Batch norm over all ranks is that of one process with their batches, gradients included.

Ranks are threads of one process; those of a launch are last.
"""

import copy
import pickle
import threading

import pytest
import torch
from torch import nn

import ring_plugins as ring
from ring_plugins import ArgumentError, MismatchError
from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.arrays.memory import host_memory
from ring_plugins.core.collectives.fingerprint import purpose
from ring_plugins.torch import SyncBatchNorm, sync_batch_norm
from tests.core.collectives.thread_ranks import on_thread_ranks
from tests.launch import run_ranks

_here = threading.local()


class World:
    """Of a rank that is a thread."""

    def refuse_to_recover(self, what):
        pass


def on_ranks(size, function, monkeypatch):
    """Call `function(rank)` on threads."""

    def add_up(numbers, meaning, _):
        with purpose(meaning):
            _here.communicator.all_reduce(host_memory(numbers.view(-1)), Op.SUM)
        return numbers

    def call(rank, communicator):
        _here.communicator = communicator
        return function(rank)

    monkeypatch.setattr(sync_batch_norm.world, "current", World)
    monkeypatch.setattr(sync_batch_norm.world, "is_initialized", lambda: True)
    monkeypatch.setattr(sync_batch_norm, "communicator_of", lambda _: _here.communicator)
    monkeypatch.setattr(sync_batch_norm, "_sum_over_ranks", add_up)
    return on_thread_ranks(size, call)


def trained(layer, batches):
    """Outputs, gradients of inputs and parameters, and statistics of two steps, of which the second is odd."""
    found = []
    for batch in batches:
        x = batch.clone().requires_grad_()
        y = layer(x)
        (y.square() * torch.arange(1.0, 1 + y.shape[1], dtype=y.dtype).view(1, -1, *[1] * (y.dim() - 2))).sum().add(
            y.pow(3).sum()
        ).backward()
        found.append((y.detach(), x.grad))
    parameters = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return found, parameters, dict(layer.named_buffers())


@pytest.mark.parametrize("rows", [(4, 4), (3, 1), (5, 0, 2)], ids=str)
@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({}, ()),
        ({"momentum": None}, (3,)),
        ({"affine": False, "momentum": 0.5}, (2, 3)),
        ({"track_running_stats": False, "eps": 0.1}, (2, 1, 2)),
    ],
    ids=str,
)
def test_ranks_compute_what_one_process_computes_with_all_their_batches(rows, options, shape, monkeypatch):
    torch.manual_seed(5)
    kind = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[len(shape)]
    plain = kind(4, dtype=torch.float64, **options)
    for parameter in plain.parameters():
        nn.init.normal_(parameter)
    batches = [torch.randn(sum(rows), 4, *shape, dtype=torch.float64) * 3 + 1000 for _ in range(2)]
    own = [copy.deepcopy(plain) for _ in rows]
    found = on_ranks(
        len(rows),
        lambda rank: trained(
            SyncBatchNorm.convert_sync_batchnorm(own[rank]), [batch.split(rows)[rank] for batch in batches]
        ),
        monkeypatch,
    )
    expected, gradients, buffers = trained(plain, batches)
    for step, (output, by_input) in enumerate(expected):
        torch.testing.assert_close(torch.cat([one[0][step][0] for one in found]), output, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(torch.cat([one[0][step][1] for one in found]), by_input, rtol=1e-6, atol=1e-8)
    for name, gradient in gradients.items():
        torch.testing.assert_close(sum(one[1][name] for one in found), gradient, rtol=1e-9, atol=1e-8)
    for name, buffer in buffers.items():
        torch.testing.assert_close(found[0][2][name], buffer, rtol=1e-11, atol=1e-11)
        assert all(torch.equal(one[2][name], found[0][2][name]) for one in found)
    x = torch.randn(3, 4, *shape, dtype=torch.float64)
    assert torch.equal(own[0].eval()(x), kind.forward(own[0], x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inputs_keep_their_type_and_layout(dtype, monkeypatch):
    x = torch.randn(4, 3, 2, 2).to(dtype, memory_format=torch.channels_last)
    layer = nn.BatchNorm2d(3)
    expected = layer(x.float())

    def rank_of(rank):
        return SyncBatchNorm(3)(x[2 * rank : 2 * rank + 2])

    found = on_ranks(2, rank_of, monkeypatch)
    assert all(one.dtype == dtype and one.is_contiguous(memory_format=torch.channels_last) for one in found)
    torch.testing.assert_close(torch.cat(found).float(), expected, rtol=1e-2, atol=1e-2)


def test_a_job_without_samples_learns_nothing_and_one_value_is_an_error(monkeypatch):
    def rank_of(rank):
        layer = SyncBatchNorm(2)
        layer(torch.ones(0, 2))
        assert layer.running_mean.tolist() == [0, 0] and layer.running_var.tolist() == [1, 1]
        with pytest.raises(ArgumentError, match="one value per channel"):
            layer(torch.ones(1 - rank, 2))

    on_ranks(2, rank_of, monkeypatch)


def test_ranks_in_different_layers_are_told(monkeypatch):
    def rank_of(rank):
        model = SyncBatchNorm.convert_sync_batchnorm(nn.ModuleDict({"a": nn.BatchNorm1d(2), "b": nn.BatchNorm1d(2)}))
        return model["b" if rank else "a"](torch.randn(3, 2))

    with pytest.raises(MismatchError, match=r"batch normalization of a.*batch normalization of b"):
        on_ranks(2, rank_of, monkeypatch)


def test_a_second_derivative_is_refused(monkeypatch):
    def rank_of(rank):
        x = torch.randn(3, 2, requires_grad=True)
        (gradient,) = torch.autograd.grad(SyncBatchNorm(2)(x).pow(3).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            gradient.sum().backward()

    on_ranks(2, rank_of, monkeypatch)


def test_converted_layers_are_the_same_objects_and_files():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Sequential(nn.BatchNorm2d(2, affine=False)), nn.SyncBatchNorm(1))
    model.append(model[0])
    before, layers = model.state_dict(), list(model.modules())
    assert SyncBatchNorm.convert_sync_batchnorm(model) is model and list(model.modules()) == layers
    assert [type(layer) for layer in (*model[::2], model[1][0])] == [SyncBatchNorm] * 3
    assert (model[0].place, model[1][0].place) == ("0", "1.0")
    assert model.state_dict().keys() == before.keys()
    again = pickle.loads(pickle.dumps(copy.deepcopy(SyncBatchNorm.convert_sync_batchnorm(model))))
    assert again[0].place == "0" and isinstance(again[1][0], SyncBatchNorm)
    nn.BatchNorm2d(3).load_state_dict(SyncBatchNorm(3).state_dict())
    x = torch.randn(4, 3)
    assert torch.equal(SyncBatchNorm(3)(x), nn.BatchNorm1d(3)(x))  # there is no job


def test_a_copied_layer_has_the_same_group():
    group = object.__new__(ring.Group)
    assert copy.deepcopy(SyncBatchNorm(3, group=group)).group is group
    assert SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(3)), group)[0].group is group


class _WithActivation(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x).relu()


def test_layers_that_would_lose_something_are_refused():
    convert = SyncBatchNorm.convert_sync_batchnorm
    with pytest.raises(ArgumentError, match=r"the layer '1', a _WithActivation, does more"):
        convert(nn.Sequential(nn.ReLU(), _WithActivation(3)))
    with pytest.raises(ArgumentError, match="has no parameters yet"):
        convert(nn.Sequential(nn.LazyBatchNorm1d()))
    with pytest.raises(ArgumentError, match="does more"):
        convert(nn.utils.parametrizations.weight_norm(nn.BatchNorm1d(3), dim=None))
    with pytest.raises(ArgumentError, match="has a process_group"):
        convert(nn.SyncBatchNorm(3, process_group=object()))


def test_inputs_of_other_shapes_are_refused(monkeypatch):
    def rank_of(rank):
        with pytest.raises(ArgumentError, match=r"should be its 3 channels"):
            SyncBatchNorm(3)(torch.ones(2, 4))
        with pytest.raises(ArgumentError, match=r"of shape \(3,\); it takes"):
            SyncBatchNorm(3)(torch.ones(3))

    on_ranks(2, rank_of, monkeypatch)


TRAINING = """
import os
import torch
import ring_plugins as ring
from ring_plugins.torch import DistributedOptimizer, SyncBatchNorm, broadcast_parameters
from tests.worker import report

SIZE = int(os.environ["TEST_RANKS"])
ring.init(ranks=SIZE)


def trained(rows, synchronized):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3, bias=False), torch.nn.BatchNorm2d(4), torch.nn.Flatten(),
        torch.nn.Linear(16, 4, bias=False), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1),
    ).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if synchronized:
        SyncBatchNorm.convert_sync_batchnorm(model)
        optimizer = DistributedOptimizer(optimizer, model.named_parameters())
    for step in range(6):
        x = torch.randn(12, 1, 4, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        optimizer.zero_grad()
        (model(x[rows]) - x[rows].sum((1, 2, 3), keepdim=True)[:, :, 0, 0]).square().mean().backward()
        optimizer.step()
    return torch.cat([value.double().flatten() for value in model.state_dict().values()])


found = trained(slice(ring.rank(), None, SIZE), True)
report("equal", bool(torch.equal(found, torch.as_tensor(ring.broadcast(found)))))
report("error", float((found - trained(slice(None), False)).abs().max()))
"""


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_training_is_that_of_one_process(size):
    run = run_ranks(TRAINING, size)
    assert run.values("equal") == [True] * size
    assert max(run.values("error")) < 1e-9
