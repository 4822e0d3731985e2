"""How the state of a sharded optimizer is cut and joined; checks_sharded_optimizer.py has ranks that update slices."""

import pytest
import torch

from ring_plugins.core.base.errors import ArgumentError, RingError
from ring_plugins.core.gradients.slices import Piece
from ring_plugins.torch import sliced_updates


class Slices:
    """Of one parameter, which is entry 0."""

    def __init__(self, parameter):
        self.parameters, self.names = [parameter], ["layer.weight"]


def joined(parameter, *parts):
    ((_, state),) = sliced_updates._join(Slices(parameter), [{0: part} for part in parts])
    return state


@pytest.mark.parametrize(
    "parameter",
    [torch.zeros(3, 4), torch.zeros(2, 3, 2, 2).to(memory_format=torch.channels_last), torch.zeros(4, 3).t()],
    ids=["contiguous", "channels last", "transposed"],
)
@pytest.mark.parametrize("is_contiguous", [False, True], ids=["laid out alike", "contiguous state"])
def test_a_state_that_is_cut_and_joined_is_whole_again_in_its_parameters_order(parameter, is_contiguous):
    values = torch.arange(parameter.numel(), dtype=torch.float64).view(parameter.shape)
    state = values if is_contiguous else torch.empty_like(parameter, dtype=torch.float64).copy_(values)
    pieces = [Piece(0, 0, 5, 0), Piece(0, 5, 7, 0), Piece(0, 7, parameter.numel(), 0)]
    parts = [
        (piece.start, piece.stop, {"step": 3, "mean": sliced_updates._cut(state, parameter, piece)}) for piece in pieces
    ]
    found = joined(parameter, *parts)
    assert found["step"] == 3 and torch.equal(found["mean"], values)
    assert found["mean"].stride() == parameter.stride()


def test_only_tensors_of_the_parameters_shape_are_cut_and_they_share_no_memory():
    parameter, state = torch.zeros(6), torch.arange(6.0)
    piece = sliced_updates._cut(state, parameter, Piece(0, 2, 4, 0))
    piece += 10
    assert state.tolist() == [0, 1, 2, 3, 4, 5]
    for other in (torch.tensor(3.0), torch.zeros(2, 3), 7, None):
        assert sliced_updates._cut(other, parameter, Piece(0, 2, 4, 0)) is other
    assert sliced_updates._cut(state, parameter, Piece(0, 0, 6, 0)) is state


@pytest.mark.parametrize(
    "parts",
    [
        [(0, 4, {"mean": torch.zeros(4)})],
        [(0, 4, {"mean": torch.zeros(4)}), (4, 6, {})],
        [(0, 4, {}), (4, 6, {"mean": torch.zeros(2)})],
    ],
    ids=["a rank is missing", "the last has another state", "the first has another state"],
)
def test_a_state_that_a_rank_lacks_is_an_error_that_names_the_parameter(parts):
    with pytest.raises(RingError, match="some ranks have no state for their slice of layer.weight"):
        joined(torch.zeros(6), *parts)


def test_a_state_of_another_shape_than_its_slice_is_an_error_with_the_remedy():
    with pytest.raises(RingError, match=r"state mean of layer.weight has shape \(3,\) .* needs shard='tensors'"):
        joined(torch.zeros(6), (0, 4, {"mean": torch.zeros(3)}), (4, 6, {"mean": torch.zeros(2)}))


def test_parameters_in_the_same_memory_are_rejected_and_neighbors_are_not():
    memory = torch.zeros(10)
    sliced_updates._reject_shared_memory([("a", memory[:4]), ("b", memory[4:]), ("none", torch.zeros(0))])
    with pytest.raises(ArgumentError, match="a and b lie in the same memory"):
        sliced_updates._reject_shared_memory([("b", memory[3:]), ("a", memory[:4])])


def test_options_are_compared_if_they_read_alike_on_all_ranks():
    group = {"params": [1], "lr": 0.1, "betas": (0.9, 0.99), "foreach": None, "names": {"a"}, "schedule": object()}
    assert sliced_updates._comparable(group) == {"lr": 0.1, "betas": (0.9, 0.99), "foreach": None}
