"""What is broadcast is checked before anything is sent; checks_process_group.py and others have several ranks."""

import sys

import pytest
import torch
from torch import nn

import ring_plugins as ring
from ring_plugins import ArgumentError, MismatchError
from ring_plugins.torch import broadcast_optimizer_state, broadcast_parameters

module = sys.modules["ring_plugins.torch.broadcast"]  # the package has a function of that name


@pytest.fixture(scope="module", autouse=True)
def _job_of_one():
    ring.init(ranks=1)
    yield
    ring.shutdown()


class Communicator:
    """Rank 0 of two, of which the other one describes other tensors."""

    rank, size, ranks = 0, 2, (0, 1)

    def __init__(self, theirs):
        self.theirs = theirs

    def all_gather_object(self, own, _):
        return [own, self.theirs]


@pytest.mark.parametrize(
    ("parameters", "remedy"),
    [
        (torch.optim.SGD([torch.zeros(1)], lr=1), "call broadcast_optimizer_state"),
        (torch.zeros(2), "is one tensor"),
        (iter([]), "can be read only once"),
        (nn.Linear(1, 1).parameters(), "pass the model, its named_parameters"),
        ({"w": torch.zeros(2).to_sparse()}, "w has layout torch.sparse_coo: pass w.to_dense"),
        ({"w": torch.ones(2, dtype=torch.complex64).conj()}, "use w.resolve_conj"),
    ],
)
def test_what_cannot_be_broadcast_is_named_with_what_to_pass(parameters, remedy):
    with pytest.raises(ArgumentError, match=remedy):
        broadcast_parameters(parameters)


def test_weights_of_one_rank_stay():
    model = nn.Linear(2, 2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    broadcast_parameters(model)
    broadcast_parameters(model.state_dict())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_no_optimizer_has_no_state_to_broadcast():
    with pytest.raises(ArgumentError, match="Linear is no optimizer; for models, use broadcast_parameters"):
        broadcast_optimizer_state(nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("theirs", "named"),
    [
        ([("w", "torch.float32", (2,), "cpu")], r"number 1: rank 0 has \('b', .*rank 1 has no such tensor"),
        ([("w", "torch.float32", (2,), "cuda")], r"number 0: rank 0 has .*'cpu'\), rank 1 has .*'cuda'\)"),
        ([("w", "torch.float32", (3,), "cpu")], r"number 0: .*\(3,\)"),
    ],
)
def test_the_first_tensor_that_differs_is_named(theirs, named):
    ours = [("w", "torch.float32", (2,), "cpu"), ("b", "torch.float32", (1,), "cpu")]
    with pytest.raises(MismatchError, match=named):
        module._check_equal(ours, Communicator(theirs))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(3, 4),
        torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.zeros(4, 3).t(),
        torch.zeros(4, 3, dtype=torch.float64)[::2],
        torch.zeros(()),
    ],
    ids=["contiguous", "channels last", "transposed", "with gaps", "a number"],
)
def test_a_placeholder_has_the_tensors_order_in_memory_without_its_gaps(tensor):
    empty = module.Placeholder(tensor).empty()
    assert (empty.dtype, empty.shape) == (tensor.dtype, tensor.shape)
    gaps = tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()
    assert empty.stride() == (tensor.contiguous() if gaps else tensor).stride()


def test_state_of_the_roots_cpu_comes_to_the_cpu_whatever_device_is_the_default():
    """Elsewhere the ranks would wait for each other in two communicators."""
    described = module.Placeholder(torch.ones(2))
    with torch.device("meta"):
        assert described.empty().device.type == "cpu"
