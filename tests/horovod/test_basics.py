"""Arguments of Horovod's functions mean what they mean there, or are rejected with what to write instead."""

import numpy as np
import pytest

from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.horovod import basics
from ring_plugins.horovod.basics import Average, Compression, Sum


@pytest.mark.parametrize(
    ("average", "op", "found"),
    [(None, None, Average), (True, None, Average), (False, None, Sum), (None, Sum, Sum)],
)
def test_the_older_and_the_newer_argument_name_one_reduction(average, op, found):
    assert basics.op_of(average, op) is found


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: basics.op_of(True, Sum), "say the same thing; pass only op"),
        (lambda: basics.op_of("yes", None), "neither True nor False"),
        (lambda: basics.op_of(None, "sum"), "must be hvd.Average, hvd.Sum"),
        (lambda: basics.op_of(None, basics.Adasum), "op=hvd.Adasum is not built here"),
        (lambda: basics.gradient_factor(basics.Max, 1.0, 2), "pass hvd.Average or hvd.Sum"),
        (lambda: basics.gradient_factor(Sum, 2.0, 2), "leave it out with op=hvd.Sum"),
        (lambda: basics.compressor_of("bf16"), "or a class with their methods"),
        (lambda: basics.gradient_factor(Average, 0.0, 2), "is not a positive number"),
        (lambda: basics.check_compression("bf16"), "must be hvd.Compression.none, .fp16 or .int8"),
    ],
)
def test_what_does_not_exist_here_is_rejected_with_the_remedy(call, said):
    with pytest.raises(ArgumentError, match=said):
        call()


def test_what_exists_is_passed_on():
    assert basics.check_compression(Compression.none) is None
    assert basics.check_compression(Compression.fp16) == "fp16"
    assert basics.check_compression(Compression.int8) == "int8"
    assert [basics.gradient_factor(op, 1.0, 3) for op in (Average, Sum)] == [1, 3]
    assert [basics.gloo_built(), basics.ddl_built()] == [True, False]


class Halving(basics.NoneCompressor):
    """A script's own, which buckets would not use."""

    @staticmethod
    def compress(tensor):
        return tensor / 2, None


def test_a_compressor_of_ones_own_is_for_tensors_and_not_for_buckets():
    assert basics.compressor_of(Halving) is Halving
    with pytest.raises(ArgumentError, match="works in hvd.allreduce"):
        basics.check_compression(Halving)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int8, np.int64])
def test_compression_to_16_bits_is_of_floats_only(dtype):
    sent, context = Compression.fp16.compress(np.ones(3, dtype))
    assert sent.dtype == (np.float16 if np.issubdtype(dtype, np.floating) else dtype)
    assert Compression.fp16.decompress(sent, context).dtype == dtype
    x = np.ones(3, dtype)
    assert Compression.none.compress(x)[0] is Compression.none.decompress(x, None) is x


def test_integers_are_scaled_and_averaged_towards_zero():
    x = np.array([7, -7])
    assert basics.scaled(x, 0.5, is_whole=True).tolist() == [3, -3]
    assert basics.scaled(x.astype(np.float32), 0.5, is_whole=False).tolist() == [3.5, -3.5]
    assert basics.reduction_of(Average, 0.5, 4, is_whole=True) == (Sum, 0.125)
    assert basics.reduction_of(Average, 0.5, 4, is_whole=False) == (Average, 0.5)
    assert basics.reduction_of(basics.Max, 0.5, 4, is_whole=True) == (basics.Max, 0.5)
