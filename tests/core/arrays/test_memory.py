import numpy as np
import pytest
import torch

from ring_plugins.core.arrays.memory import host_array, host_memory, slices
from ring_plugins.core.base.errors import ArgumentError

DTYPES = ["float16", "bfloat16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool",
          "complex64", "complex128", "uint16", "uint32", "uint64"]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_memory_is_shared_not_copied(dtype):
    tensor = torch.ones(5, dtype=getattr(torch, dtype))
    memory = host_memory(tensor)
    assert memory.dtype == dtype
    memory.array[:] = 0
    assert not tensor.to(torch.complex128).any()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3).t(),
        torch.tensor(3),
        torch.zeros(0, 4),
        torch.ones(4, dtype=torch.complex64).conj() * 2j,
        torch.ones(2, requires_grad=True),
        torch.arange(20, dtype=torch.bfloat16).reshape(4, 5)[1:, ::2],
        torch.zeros(3, 0, dtype=torch.bfloat16),
    ],
)
def test_shape_strides_and_values_survive(tensor):
    array, dtype = host_array(tensor)
    assert array.shape == tuple(tensor.shape)
    back = torch.from_numpy(np.ascontiguousarray(array)).view(getattr(torch, dtype))
    assert torch.equal(back.reshape(tensor.shape), tensor.detach().resolve_conj())


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(4), torch.ones(4, 4, dtype=torch.bfloat16)[1:, ::2], torch.nn.Parameter(torch.ones(3)), torch.ones(0)],
)
def test_a_tensor_can_be_resized_after_its_memory_was_read(tensor):
    host_array(tensor)
    assert tensor.untyped_storage().resizable()  # FSDP frees and restores parameters that way


def test_memory_outlives_the_tensor_it_came_from():
    array = host_memory(torch.full((1000,), 7, dtype=torch.bfloat16)).array
    torch.full((1000,), 1, dtype=torch.bfloat16)
    assert np.all(array == array[0])


@pytest.mark.parametrize(
    ("x", "said"),
    [
        (np.array(["a"]), "cannot be sent"),
        (np.ones((4, 4))[:, ::2], "not contiguous"),
        (torch.ones(4, device="meta"), "cannot be read"),
        (np.ones(3, ">f4"), "cannot be sent, since its byte order"),
        ([[1], [1, 2]], "not an array"),
    ],
)
def test_unsupported_memory_is_rejected_by_name(x, said):
    with pytest.raises(ArgumentError, match=said) as error:
        host_memory(x, "gradient")
    assert "gradient" in str(error.value) or "dtype" in str(error.value)


def test_read_only_memory_cannot_take_a_result():
    x = np.ones(3)
    x.flags.writeable = False
    host_memory(x)
    with pytest.raises(ArgumentError, match="read-only"):
        host_memory(x, writable=True)


@pytest.mark.parametrize("x", [torch.ones(4, dtype=torch.complex64).conj(), [1.0, 2.0], 3.0])
def test_memory_that_is_a_copy_takes_no_results(x):
    with pytest.raises(ArgumentError, match="x is read-only"):
        host_memory(x, writable=True)


class Wrapper(torch.Tensor):
    """Wraps another tensor, as a quantized one does; has a shape, and no memory."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        result = function(*(x.inner if isinstance(x, Wrapper) else x for x in args), **(kwargs or {}))
        return Wrapper(result) if function is torch.ops.aten.detach.default else result


class Distributed(Wrapper):
    def to_local(self):
        return self.inner


class Plain(torch.Tensor):
    """A class of its own, with memory of its own."""


@pytest.mark.parametrize(
    ("x", "said"),
    [
        (Wrapper(torch.ones(4)), "x is a Wrapper, which has no memory of its own: pass the plain tensor"),
        (Distributed(torch.ones(4)), r"x is a Distributed, .*pass x.to_local\(\) .* or x.full_tensor\(\)"),
        (torch._efficientzerotensor(4), "has no memory of its own"),
        (torch.ones(4).to_sparse(), r"cannot be read as memory: .* Pass x.to_dense\(\)"),
    ],
)
def test_a_tensor_without_memory_of_its_own_is_rejected(x, said):
    for _ in range(2):
        with pytest.raises(ArgumentError, match=said):
            host_array(x)


@pytest.mark.parametrize("kind", [Plain, torch.nn.Parameter, torch.nn.Buffer])
def test_a_class_of_tensors_with_memory_of_its_own_is_taken(kind):
    x = torch.ones(4).as_subclass(Plain) if kind is Plain else kind(torch.ones(4)).requires_grad_(False)
    assert host_array(kind(torch.zeros(0)) if kind is not Plain else x[:0])[0].size == 0
    assert host_array(x)[0].tolist() == [1] * 4


class Unchanging:
    """An array of a framework whose arrays do not change, so that several may share memory."""

    def __init__(self, array):
        self._array = array
        self.__dlpack__, self.__dlpack_device__ = array.__dlpack__, array.__dlpack_device__


def test_arrays_of_frameworks_that_never_change_them_take_no_results():
    x = Unchanging(np.ones(3))
    assert host_memory(x).array.tolist() == [1, 1, 1]
    with pytest.raises(ArgumentError, match="x is read-only memory"):
        host_memory(x, writable=True)


@pytest.mark.parametrize("itemsize", [1, 4, 8, 16])
@pytest.mark.parametrize("count", [0, 1, 63, 64, 1000, 12345])
@pytest.mark.parametrize("parts", [1, 2, 3, 16])
def test_slices_cover_everything_once_and_start_on_cache_lines(count, parts, itemsize):
    cuts = slices(count, parts, itemsize)
    assert len(cuts) == parts
    assert [i for cut in cuts for i in range(count)[cut]] == list(range(count))
    assert all(cut.start * itemsize % 64 == 0 or cut.start == count for cut in cuts)
