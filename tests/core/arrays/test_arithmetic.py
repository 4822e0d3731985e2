import numpy as np
import pytest
import torch

from ring_plugins.core.arrays.arithmetic import PIECE_BYTES, narrow, reduce_into, widen
from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.arrays.memory import host_memory

MANY = PIECE_BYTES // 4 + 17


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("count", [0, 1, MANY])
def test_sixteen_bit_floats_are_summed_in_float32_and_rounded_once(dtype, count):
    torch.manual_seed(0)
    inputs = [torch.randn(count).to(getattr(torch, dtype)) for _ in range(3)]
    out = torch.empty_like(inputs[0])
    reduce_into(host_memory(out).array, [host_memory(x).array for x in inputs], Op.AVERAGE, dtype, 3)
    expected = ((inputs[0].float() + inputs[1].float() + inputs[2].float()) / 3).to(out.dtype)
    assert torch.equal(out, expected)


def test_bfloat16_keeps_infinities_and_not_a_number():
    x = torch.tensor([float("inf"), float("-inf"), float("nan"), 3.39e38, -0.0], dtype=torch.bfloat16)
    out = torch.empty_like(x)
    reduce_into(host_memory(out).array, [host_memory(x).array, host_memory(x).array], Op.SUM, "bfloat16")
    expected = x + x
    assert torch.equal(out.nan_to_num(7), expected.nan_to_num(7))
    assert torch.equal(out.isnan(), expected.isnan())


def test_sum_in_float16_does_not_overflow_before_the_division():
    x = np.full(10, 60000, np.float16)
    out = np.empty_like(x)
    reduce_into(out, [x, x, x, x], Op.AVERAGE, "float16", 4)
    assert np.all(out == 60000)


@pytest.mark.parametrize("divisor", [1, 2, 3, 7, 8])
def test_average_of_equal_values_is_exact_in_every_position(divisor):
    x = np.random.default_rng(0).standard_normal(MANY).astype(np.float64)
    doubled = x.copy()
    reduce_into(doubled, [doubled], Op.AVERAGE, "float64", divisor)
    assert np.array_equal(doubled, x / divisor)


def test_target_may_be_the_first_source():
    a, b, c = (np.full(MANY, value, np.float32) for value in (1, 2, 4))
    reduce_into(a, [a, b, c], Op.SUM, "float32")
    assert np.all(a == 7)


def test_a_single_term_of_16_bits_is_not_even_widened():
    bits, target = np.array([0x7F81, 1, 0x8000], np.uint16), np.zeros(3, np.uint16)
    reduce_into(target, [bits], Op.SUM, "bfloat16")
    assert target.tolist() == bits.tolist()


def test_float16_is_converted_as_numpy_does():
    """Every float16, and of float32 those around each float16 and halfway between two, where rounding decides."""
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    wide = np.empty(halves.size, np.float32)
    widen(halves, wide, "float16")
    np.testing.assert_array_equal(wide, halves.astype(np.float32))
    assert np.array_equal(np.signbit(wide), np.signbit(halves))
    finite = wide[np.isfinite(wide)]
    halfway = (finite[:-1] + finite[1:]) / 2
    near = [np.nextafter(values, side) for values in (finite, halfway) for side in (-np.inf, np.inf)]
    limits = np.array([65519.996, 65520, 1e38, np.inf, np.nan, 2.0**-25, 1e-45, 0], np.float32)
    values = np.concatenate([finite, halfway, *near, limits, -limits]).astype(np.float32)
    rounded = np.empty(values.size, np.float16)
    narrow(values, rounded, "float16")
    with np.errstate(over="ignore"):
        expected = values.astype(np.float16)
    np.testing.assert_array_equal(rounded, expected)
    is_number = ~np.isnan(values)
    np.testing.assert_array_equal(np.signbit(rounded)[is_number], np.signbit(expected)[is_number])
