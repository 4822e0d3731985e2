import numpy as np
import pytest

from ring_plugins.core.base.errors import ArgumentError, MismatchError
from ring_plugins.core.collectives.single import SingleCommunicator
from ring_plugins.core.gradients.fusion import BucketSizes, Entry, FusionBuffer, FusionPlan, _difference

SIZES = BucketSizes()


def plan(*counts, dtype="float32", **sizes):
    return FusionPlan([Entry(f"p{i}", dtype, count) for i, count in enumerate(counts)], BucketSizes(**sizes))


def test_buckets_fill_from_the_last_layer_and_close_at_their_size():
    made = plan(100, 100, 100, 100, bucket_bytes=800, first_bucket_bytes=400)
    assert [bucket.entries for bucket in made.buckets] == [(3,), (2, 1), (0,)]


def test_every_tensor_has_a_place_of_its_own_on_a_cache_line():
    made = plan(3, 1, 17, 0, 5)
    for bucket in made.buckets:
        taken = np.zeros(bucket.count, int)
        for entry, offset in zip(bucket.entries, bucket.offsets, strict=True):
            assert offset % 16 == 0
            taken[offset : offset + made.entries[entry].count] += 1
        taken[bucket.flags : bucket.flags + len(bucket.entries)] += 1
        assert taken.max() == 1
        assert bucket.flags + len(bucket.entries) <= bucket.count


def test_types_do_not_share_a_bucket():
    entries = [Entry("a", "float32", 4), Entry("b", "bfloat16", 4), Entry("c", "float32", 4)]
    made = FusionPlan(entries)
    assert sorted((bucket.dtype, bucket.entries) for bucket in made.buckets) == [
        ("bfloat16", (1,)),
        ("float32", (2, 0)),
    ]


def test_a_model_without_parameters_has_no_buckets():
    assert plan().buckets == ()
    assert plan().nbytes == 0


def test_fingerprint_tells_plans_apart():
    assert plan(1, 2).fingerprint == plan(1, 2).fingerprint
    assert len({plan(1, 2).fingerprint, plan(2, 1).fingerprint, plan(1, 2, bucket_bytes=1).fingerprint}) == 3


def test_the_first_difference_is_named_with_its_ranks():
    same, other = plan(1, 2).entries, plan(1, 3).entries
    said = _difference([(same, SIZES), (same, SIZES), (other, SIZES)], (0, 1, 2))
    assert "parameter 1: ranks 0, 1: p1 (2 x float32); rank 2: p1 (3 x float32)" in said
    assert said.endswith("Build the same model on all ranks.")
    rounded = [Entry("p0", "float32", 1, "shape (1,), sent as int8")]
    assert "model on all ranks, with the same compression and error_feedback." in _difference(
        [(same, SIZES), (rounded, SIZES)], (0, 1)
    )
    assert "no such parameter" in _difference([(same, SIZES), (same[:1], SIZES)], (0, 1))
    assert "direct_bytes" in _difference([(same, SIZES), (same, BucketSizes(direct_bytes=7))], (0, 1))
    assert "1: (26214400, 1048576, 7)" in _difference([(same, SIZES), (same, BucketSizes(direct_bytes=7))], (0, 1))


def test_different_plans_are_an_error():
    class Two(SingleCommunicator):
        def all_gather_object(self, item, purpose=""):
            return [item, "different" if isinstance(item, str) else (plan(9).entries, SIZES)]

    two = Two("two")
    two.ranks = (0, 1)
    with pytest.raises(MismatchError, match="the models differ"):
        plan(1).check_equal(two)


@pytest.mark.parametrize("size", [0, "25"])
def test_sizes_must_be_positive_numbers(size):
    with pytest.raises(ArgumentError, match=f"bucket_bytes={size!r} is not a positive number of bytes"):
        plan(1, bucket_bytes=size)


def test_buffer_gives_each_bucket_its_memory():
    made = plan(10, 20, 30, bucket_bytes=64, first_bucket_bytes=64)
    buffer = FusionBuffer(made, SingleCommunicator("alone"))
    for i, memory in enumerate(buffer.memories):
        memory.array[:] = i
    assert [int(memory.array[0]) for memory in buffer.memories] == [0, 1, 2]
    assert [memory.array.size for memory in buffer.memories] == [bucket.count for bucket in made.buckets]


def test_an_order_of_arrival_decides_which_tensors_share_a_bucket():
    entries = [Entry(f"p{i}", "float32", 100) for i in range(4)]
    sizes = BucketSizes(800, 400)
    made = FusionPlan(entries, sizes, order=(1, 3, 0, 2))
    assert [bucket.entries for bucket in made.buckets] == [(1,), (3, 0), (2,)]
    assert made.buckets_with(BucketSizes(1600, 1600))[0].entries == (1, 3, 0, 2)
    assert made.fingerprint != FusionPlan(entries, sizes).fingerprint
    assert made.fills_as((1, 0, 3, 2))
    assert not made.fills_as((3, 1, 0, 2))
