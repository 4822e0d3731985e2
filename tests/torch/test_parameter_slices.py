"""Each rank updates its slice of parameters, and all have the whole afterwards; ranks are threads."""

import pytest
import torch
from torch import nn

from ring_plugins.core.base.errors import ArgumentError, RingError
from ring_plugins.core.collectives.single import SingleCommunicator
from ring_plugins.torch.parameter_slices import ParameterSlices
from tests.core.collectives.thread_ranks import on_thread_ranks

#: Small ones, one that lies in another order, one without elements, and one that is gathered where it lies.
SHAPES = ((3, 5), (2, 3, 4, 4), (0, 2), (7,), (300_000,))


def parameters():
    numbers = torch.Generator().manual_seed(0)  # ranks are threads
    made = [nn.Parameter(torch.randn(shape, generator=numbers)) for shape in SHAPES]
    made[1] = nn.Parameter(made[1].detach().to(memory_format=torch.channels_last))
    return made


def slices_of(those, communicator, whole_tensors=False):
    return ParameterSlices([(f"p{i}", one) for i, one in enumerate(those)], communicator, whole_tensors)


@torch.no_grad()
def step(slices):
    gradients = slices.gradients()
    slices.take_gradients(gradients)
    for tensor in slices.tensors:
        if tensor.grad is not None:
            tensor.sub_(tensor.grad.view(tensor.shape))
    slices.drop_gradients()
    slices.gather(gradients)


@pytest.mark.parametrize("whole_tensors", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_updates_of_slices_are_those_of_whole_parameters(size, whole_tensors):
    def rank_of(rank, communicator):
        those = parameters()
        slices = slices_of(those, communicator, whole_tensors)
        for one in those[:3] + those[4:]:  # one has no gradient on any rank
            one.grad = torch.full_like(one, 0.5) if one.dim() != 2 else torch.full(one.shape[::-1], 0.5).t()
        step(slices)
        assert all(tensor.grad is None for tensor in slices.tensors)
        return [one.detach().clone() for one in those], sum(piece.stop - piece.start for piece in slices.pieces)

    results = on_thread_ranks(size, rank_of)
    expected = [one.detach() - 0.5 * (i != 3) for i, one in enumerate(parameters())]
    for found, _ in results:
        assert all(map(torch.equal, found, expected))
    assert sum(count for _, count in results) == sum(one.numel() for one in expected)


def test_slices_follow_parameters_whose_data_a_script_replaces():
    those = parameters()
    slices = slices_of(those, SingleCommunicator("alone"))
    assert not slices.follow_parameters()
    those[0].data = torch.zeros(3, 5)
    assert slices.follow_parameters()
    those[0].grad = torch.ones(3, 5)
    step(slices)
    assert those[0].tolist() == [[-1.0] * 5] * 3
    those[3].data = torch.zeros(8)
    with pytest.raises(RingError, match=r"p3 was torch.float32 of shape \(7,\).* and is torch.float32 of shape \(8,\)"):
        slices.follow_parameters()


def test_the_state_of_this_ranks_slice_is_listed_by_round():
    those = parameters()
    slices = slices_of(those, SingleCommunicator("alone"))
    tensors = {piece.entry: tensor for piece, tensor, _ in slices.parts()}
    listed = slices.state_by_round({tensors[0]: {"step": 1}, tensors[4]: {"step": 2}})
    assert {entry: found for one in listed for entry, found in one.items()} == {
        0: (0, 15, {"step": 1}),
        4: (0, 300_000, {"step": 2}),
    }


def test_a_parameter_with_gaps_has_no_slices():
    with pytest.raises(ArgumentError, match="parameter p0 of shape .* has gaps in its memory"):
        slices_of([torch.zeros(4, 4)[:, ::2]], SingleCommunicator("alone"))
