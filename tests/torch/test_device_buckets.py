"""Buckets in torch's memory; tensors of the CPU stand for those of a GPU."""

import pytest
import torch

from ring_plugins.core.arrays.codec import Compression
from ring_plugins.core.gradients.fusion import Entry, FusionPlan
from ring_plugins.torch.device_buckets import DeviceBuckets, HalfBuckets

PLAN = FusionPlan([Entry("a", "float32", 4), Entry("b", "int64", 3)])


def test_memories_are_those_of_the_tensors():
    buckets = DeviceBuckets(PLAN, torch.device("cpu"))
    assert [str(tensor.dtype) for tensor in buckets.tensors] == ["torch.int64", "torch.float32"]
    buckets.tensors[1][0] = 7
    assert buckets.memories[1].array[0] == 7


@pytest.mark.parametrize("feedback", [False, True])
def test_rounding_errors_are_added_to_the_next_step_with_feedback(feedback):
    buckets = DeviceBuckets(PLAN, torch.device("cpu"))
    half = HalfBuckets(PLAN, buckets.tensors, Compression.named("bf16", feedback))
    value, total = 1.0 + 2**-10, 0.0  # bfloat16 has 8 bits
    for _ in range(1024):
        buckets.tensors[1].fill_(value)
        half.pack(PLAN.buckets[1], [])
        half.unpack()
        total += float(buckets.tensors[1][0])
    assert total == pytest.approx(1024 * value if feedback else 1024, abs=0.01)


def test_integers_are_not_rounded_and_direct_gradients_are():
    buckets = DeviceBuckets(PLAN, torch.device("cpu"))
    half = HalfBuckets(PLAN, buckets.tensors, Compression.named("fp16", False))
    assert half.memories[0].dtype == "int64"
    assert half.memories[1].dtype == "float16"
    direct = torch.full((5,), 1 + 2**-12)
    (memory,) = half.pack(PLAN.buckets[0], [direct])
    assert memory.dtype == "float16"
    half.unpack()
    assert direct.tolist() == [1.0] * 5
