"""How tensors lie in memory, and what has no memory that a collective could use."""

import pytest
import torch
from torch import nn

from ring_plugins import ArgumentError
from ring_plugins.torch.tensor_memory import (
    are_pairs,
    check_plain,
    dense_memory,
    gradient_dtype,
    host_memory_of,
    is_dense,
    is_shared,
    memory_like,
)


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.zeros(3, 4), True),
        (torch.zeros(3, 4).t(), True),
        (torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last), True),
        (torch.zeros(3, 1, 4).transpose(0, 1), True),
        (torch.zeros(0, 4), True),
        (torch.zeros(()), True),
        (torch.zeros(6)[::2], False),
        (torch.zeros(3, 4)[:, :2], False),
        (torch.zeros(1).expand(3), False),
    ],
)
def test_dense_is_what_has_neither_gaps_nor_overlaps_in_any_order(tensor, expected):
    if tensor.numel():
        assert is_dense(tensor) is expected


@pytest.mark.parametrize("of", [lambda x: x, lambda x: x.t()])
def test_a_dense_tensors_memory_is_written_in_place(of):
    tensor = of(torch.arange(6.0).view(2, 3))
    memory = dense_memory(tensor)
    memory.array[:] = 7
    assert torch.equal(tensor, torch.full_like(tensor, 7))
    assert host_memory_of(tensor, "float32").array.ctypes.data == tensor.data_ptr()


def test_memory_for_a_gradient_has_its_parameters_order_unless_that_has_gaps():
    ordered = nn.Parameter(torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last))
    assert memory_like(ordered).stride() == ordered.stride()
    assert memory_like(nn.Parameter(torch.zeros(6)[::2])).stride() == (1,)


@pytest.mark.parametrize(
    ("tensor", "remedy"),
    [
        (torch.zeros(2).to_sparse(), r"pass w.to_dense\(\)"),
        (torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)]), "to_padded_tensor"),
        (torch._efficientzerotensor(2), r"pass w.clone\(\)"),
        (nn.LazyLinear(2).weight, "run a forward"),
    ],
)
def test_what_has_no_memory_of_its_own_is_rejected_with_what_to_pass(tensor, remedy):
    with pytest.raises(ArgumentError, match=remedy):
        check_plain(tensor, "w")


def test_lazily_conjugated_memory_is_read_and_not_written():
    lazy = torch.ones(2, dtype=torch.complex64).conj()
    check_plain(lazy, "x")
    with pytest.raises(ArgumentError, match="x is conjugated or negated lazily"):
        check_plain(lazy, "x", is_written=True)


def test_a_gradient_that_others_see_is_shared():
    alone = torch.zeros(4)
    assert not is_shared(alone)
    view = alone.view(2, 2)
    assert is_shared(alone) and is_shared(view)


@pytest.mark.skipif(not hasattr(nn.Parameter(torch.zeros(1)), "grad_dtype"), reason="torch before 2.10")
def test_a_gradients_type_is_its_parameters_unless_the_script_says_otherwise():
    parameter = nn.Parameter(torch.zeros(2))
    assert gradient_dtype(parameter) is torch.float32
    parameter.grad_dtype = torch.float64
    assert gradient_dtype(parameter) is torch.float64
    parameter.grad_dtype = None
    with pytest.raises(ArgumentError, match="grad_dtype of w is None"):
        gradient_dtype(parameter, "w")


def test_pairs_are_names_and_objects_of_a_kind():
    assert are_pairs([("a", torch.zeros(1)), ["b", torch.zeros(1)]], torch.Tensor)
    for other in (torch.zeros(1), ("a",), (1, torch.zeros(1)), ("a", 1)):
        assert not are_pairs([other], torch.Tensor)
