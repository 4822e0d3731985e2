import numpy as np
import pytest

from ring_plugins.core.arrays.dtypes import COMPLEX, FLOATS, SIGNED, STORAGE, Op, check_reducible, itemsize, name_of
from ring_plugins.core.base.errors import ArgumentError


def test_every_type_is_found_by_its_numpy_type():
    assert all(name_of(storage) == name for name, storage in STORAGE.items() if name != "bfloat16")


def test_the_bfloat16_of_jax_is_stored_in_16_bits():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    assert name_of(np.dtype(ml_dtypes.bfloat16)) == "bfloat16"
    assert STORAGE["bfloat16"] == np.uint16


@pytest.mark.parametrize("dtype", ["O", "U3", ">f4", "M8[s]", "f4,i4"])
def test_unsupported_types_are_rejected_with_a_remedy(dtype):
    with pytest.raises(ArgumentError, match=r"cannot be sent.*all_gather_object"):
        name_of(np.dtype(dtype))


def test_sizes_in_bytes():
    assert [itemsize(name) for name in ("float8_e5m2", "bfloat16", "float32", "complex128")] == [1, 2, 4, 16]


def test_only_reductions_with_a_meaning_are_allowed():
    for dtype in STORAGE:
        check_reducible(dtype, Op.SUM)
    for dtype in (*FLOATS, *COMPLEX):
        check_reducible(dtype, Op.AVERAGE)
    for dtype, op in [(SIGNED[0], Op.AVERAGE), ("bool", Op.AVERAGE), (COMPLEX[0], Op.MIN), (COMPLEX[0], Op.MAX)]:
        with pytest.raises(ArgumentError, match=f"op={op.name} of dtype={dtype}"):
            check_reducible(dtype, op)


def test_a_sum_of_booleans_is_no_advice_for_their_average():
    with pytest.raises(ArgumentError, match=r"dtype=bool would round; convert to float32 first\.$"):
        check_reducible("bool", Op.AVERAGE)
    with pytest.raises(ArgumentError, match="or use op=SUM"):
        check_reducible("int64", Op.AVERAGE)
