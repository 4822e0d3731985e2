import numpy as np
import pytest
import torch

from ring_plugins.core.arrays import result_memory
from ring_plugins.core.arrays.memory import CACHE_LINE
from ring_plugins.core.arrays.result_memory import SMALLEST, ResultMemory

SIZE = 2 * SMALLEST


@pytest.fixture
def memory():
    """One that has seen the size before."""
    memory = ResultMemory()
    assert memory.new(SIZE) is None
    return memory


def address(array):
    return array.ctypes.data


def test_memory_that_nobody_refers_to_is_used_again(memory):
    first = memory.new(SIZE)
    assert first.size == SIZE
    assert first.flags.writeable
    seen = address(first)
    assert seen % CACHE_LINE == 0
    second = memory.new(SIZE)
    assert address(second) != seen  # `first` still has it
    del first
    assert address(memory.new(SIZE)) == seen


HOLDERS = {
    "a slice": lambda result: result[100:200],
    "a view of a view": lambda result: result.view(np.float32).reshape(-1, 4)[:, 1],
    "its base": lambda result: result.base,
    "a memoryview": memoryview,
    "a slice of its base's memoryview": lambda result: memoryview(result.base)[100:200],
    "an array over its base": lambda result: np.frombuffer(result.base, np.int32),
    "a tensor": torch.from_numpy,
    "a view of a tensor": lambda result: torch.from_numpy(result)[100:200].view(torch.float32),
    "a tensor through DLPack": torch.from_dlpack,
    "an array through DLPack": np.from_dlpack,
    "a DLPack capsule": lambda result: result.__dlpack__(),
    "a tensor's storage": lambda result: torch.from_numpy(result).untyped_storage(),
    "an array of a tensor": lambda result: torch.from_numpy(result).view(torch.bfloat16).view(torch.int16).numpy(),
    "an iterator": lambda result: result.flat,
}


@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
def test_memory_that_anybody_refers_to_is_not_used(memory, hold):
    result = memory.new(SIZE)
    seen = address(result)
    held = hold(result)
    del result
    others = [memory.new(SIZE) for _ in range(3)]
    assert seen not in map(address, others)
    del held
    assert address(memory.new(SIZE)) == seen


def test_a_size_that_comes_once_is_not_kept():
    memory = ResultMemory()
    assert [memory.new(SIZE + CACHE_LINE * i) for i in range(200)] == [None] * 200
    assert memory.new(SIZE) is None  # its first time is long ago


def test_small_and_huge_results_are_left_to_malloc():
    memory = ResultMemory()
    for _ in range(3):
        assert memory.new(SMALLEST - 1) is None
        assert memory.new(result_memory.LIMIT + 1) is None


def test_what_was_used_longest_ago_goes_first_and_stays_valid(memory, monkeypatch):
    monkeypatch.setattr(result_memory, "LIMIT", 2 * SIZE)
    first, second = memory.new(SIZE), memory.new(SIZE)
    first[:], second[:] = 1, 2
    third = memory.new(SIZE)  # in place of the first, which is only no longer kept
    third[:] = 3
    assert (first == 1).all()
    assert (second == 2).all()
    kept = {address(second), address(third)}
    del first, second, third
    both = [memory.new(SIZE), memory.new(SIZE)]
    assert set(map(address, both)) == kept
    memory.clear()
    assert memory.new(SIZE) is None


def test_memory_is_kept_for_as_many_results_as_are_needed_at_once(memory):
    many = [memory.new(SIZE) for _ in range(8)]  # once, as when several all-reduces are under way
    del many
    for _ in range(64):
        assert memory.new(SIZE) is not None
    assert len(memory._blocks) == 1
    for i in range(64):
        memory.new(SIZE + CACHE_LINE * (1 + i))
    assert memory._blocks == []
