import itertools

import numpy as np
import pytest

from ring_plugins.core.arrays.codec import Compression
from ring_plugins.core.arrays.memory import DeviceMemory
from ring_plugins.core.collectives.single import SingleCommunicator
from ring_plugins.core.gradients.fusion import BucketSizes, Entry, FusionBuffer, FusionPlan
from ring_plugins.core.gradients.reducer import GradientReducer, SavedInputs
from ring_plugins.core.gradients.trials import ALWAYS, Choice


class Recorder(SingleCommunicator):
    """Writes down which bucket was filled and which was reduced, in order."""

    def __init__(self):
        super().__init__("recorder")
        self.log = []

    def start(self, description, function, repeats=False):
        self.log.append(description.split(" of ")[0])
        return super().start(description, function)

    def run_synchronously(self, description, function):
        self.log.append(description.split(" of ")[0] + " synchronously")
        return super().run_synchronously(description, function)


class Filling(GradientReducer):
    """Has its buckets filled by one function."""

    def __init__(self, communicator, fill, buckets, **options):
        plan = FusionPlan([Entry(str(i), "float32", 16) for i in range(buckets)], BucketSizes(64, 64))
        super().__init__(FusionBuffer(plan, communicator), communicator, **options)
        self.fill = fill

    def mark_ready(self, entry):
        return super().mark_ready(entry, self.fill)

    def launch_rest(self, fill=None):
        super().launch_rest(fill or self.fill)

    def finish(self):
        super().finish(self.fill)

    def abandon(self):
        super().abandon(lambda bucket: None)


def reducer(entries=4, overlap=ALWAYS):
    recorder = Recorder()
    made = Filling(recorder, lambda bucket: recorder.log.append(f"fill {bucket.index}"), entries, overlap=overlap)
    return made, recorder.log


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_buckets_go_out_in_the_order_of_the_plan_whatever_order_gradients_come_in(order):
    made, log = reducer()
    for entry in order:
        made.mark_ready(entry)
    made.finish()
    assert log == [said for i in range(4) for said in (f"fill {i}", f"bucket {i}")]


def test_a_bucket_goes_out_as_soon_as_it_and_all_before_it_are_ready():
    made, log = reducer()
    made.mark_ready(2)
    assert log == []
    made.mark_ready(3)
    assert log == ["fill 0", "bucket 0", "fill 1", "bucket 1"]


def test_what_never_became_ready_goes_out_at_the_end():
    made, log = reducer()
    made.mark_ready(0)
    made.finish()
    assert [said for said in log if said.startswith("bucket")] == [f"bucket {i}" for i in range(4)]


def test_marking_twice_changes_nothing():
    made, log = reducer()
    made.mark_ready(3)
    made.mark_ready(3)
    assert log == ["fill 0", "bucket 0"]
    assert made.has_left(made.bucket_of[3])
    assert not made.has_left(made.bucket_of[2])


def test_a_gradient_that_comes_again_after_its_bucket_has_left_is_told():
    made, _ = reducer()
    assert made.mark_ready(2)
    assert made.mark_ready(2)  # bucket 1 waits for bucket 0
    assert made.mark_ready(3)
    assert not made.mark_ready(2)


def test_the_last_bucket_waits_if_told_to_and_so_do_all():
    recorder = Recorder()
    made = Filling(recorder, lambda bucket: None, 3, holds_last=True)
    for entry in (2, 1, 0):
        made.mark_ready(entry)
    assert recorder.log == ["bucket 0", "bucket 1"]
    made.launch_rest()
    made.finish()
    made.holds = True
    for entry in (2, 1, 0):
        made.mark_ready(entry)
    assert len(recorder.log) == 3
    made.finish()
    assert len(recorder.log) == 6


def test_a_pass_that_could_not_be_filled_is_still_under_way():
    def fill(bucket):
        raise MemoryError("no room")

    made = Filling(recorder := Recorder(), fill, 1)
    with pytest.raises(MemoryError):
        made.finish()
    assert made.is_under_way
    made.abandon()
    assert not made.is_under_way
    assert recorder.log == ["bucket 0"]


def test_a_pass_starts_anew_after_the_last_and_counts():
    made, log = reducer(2)
    for _ in range(3):
        assert not made.is_under_way
        made.mark_ready(1)
        assert made.is_under_way
        made.finish()
    assert (made.passes, made.reduced_bytes) == (3, 3 * made._buffer.plan.nbytes)
    assert len(log) == 12


def test_an_abandoned_pass_sends_the_rest_without_filling():
    made, log = reducer()
    made.mark_ready(3)
    made.abandon()
    assert log == ["fill 0", "bucket 0", "bucket 1", "bucket 2", "bucket 3"]
    assert not made.is_under_way


def test_an_exception_while_buckets_are_under_way_breaks_the_communicator():
    made, log = reducer(3)

    class UnderWay:
        def __init__(self, description, is_done):
            self.description, self.done = description, lambda: is_done

        def wait(self):
            if not self.done():
                raise KeyboardInterrupt

    made._communicator.start = lambda text, function, repeats: UnderWay(text, text.startswith("bucket 0"))
    made._communicator.interrupt = lambda operation, cause: log.append((operation, type(cause)))
    with pytest.raises(KeyboardInterrupt):
        made.finish()
    assert log[-1] == ("bucket 1 of 3 (1)", KeyboardInterrupt)
    made._communicator.start = lambda text, function, repeats: UnderWay(text, True)
    made.finish()
    assert log[-1] == "fill 2"  # nothing is under way any more


def test_an_exception_after_buckets_were_reduced_synchronously_is_raised_as_it_is():
    overlap = Choice(False)
    made, _ = reducer(3, overlap)
    overlap.finished, overlap.pass_ended = False, lambda now: 1 / 0
    with pytest.raises(ZeroDivisionError):
        made.finish()


FILLED = [f"fill {i}" for i in range(4)]


def test_without_overlap_all_buckets_are_reduced_synchronously_in_the_end_by_one_operation():
    made, log = reducer(overlap=Choice(False))
    for entry in range(4):
        made.mark_ready(entry)
    assert log == []
    made.finish()
    assert log == [*FILLED, "buckets 0 to 3 synchronously"]
    assert made.passes == 1
    assert made.reduced_bytes == made._buffer.plan.nbytes


def test_without_overlap_buckets_can_still_be_launched_or_abandoned_as_the_one_operation_of_the_other_ranks():
    made, log = reducer(overlap=Choice(False))
    made.mark_ready(3)
    made.launch_rest()
    assert log == [*FILLED, "buckets 0 to 3"]
    made.finish()
    made.abandon()
    assert log[5:] == ["buckets 0 to 3"]


def test_a_pass_keeps_its_way_until_it_ends():
    choice = Choice(False)
    made, log = reducer(2, choice)
    made.mark_ready(1)
    choice.now = True
    made.mark_ready(0)
    assert log == []
    made.finish()
    assert log == ["fill 0", "fill 1", "buckets 0 to 1 synchronously"]
    made.mark_ready(1)
    assert log[3:] == ["fill 0", "bucket 0"]


def test_a_bucket_that_could_not_be_filled_synchronously_is_still_under_way():
    made, log = reducer(2, Choice(False))

    def fill(bucket):
        if bucket.index == 1:
            raise MemoryError("no room")

    made.fill = fill
    with pytest.raises(MemoryError):
        made.finish()
    assert made.is_under_way
    made.abandon()
    assert log == ["buckets 0 to 1"]


def test_an_exception_before_a_bucket_begins_synchronously_leaves_it_to_be_abandoned():
    made, log = reducer(2, Choice(False))
    made._communicator.run_synchronously = lambda description, function: 1 / 0
    with pytest.raises(ZeroDivisionError):
        made.finish()
    assert made.is_under_way
    made.abandon()
    assert log[2:] == ["buckets 0 to 1"]


def test_memory_of_a_gpu_is_restored_by_who_filled_it():
    (bucket,) = FusionPlan([Entry("weight", "float32", 4)]).buckets
    memories, restored, kept = [DeviceMemory(64, 4, "float32", 0)], [], SavedInputs()
    assert kept.restored(bucket) is None
    kept.refill_by(bucket.index, lambda: restored.append(bucket.index))
    kept.keep(bucket, memories)
    assert restored == []
    assert kept.restored(bucket) is memories
    assert restored == [bucket.index]


class Rounding(SingleCommunicator):
    """Rounds what it is given, as hosts that send each other compressed numbers do."""

    def all_reduce_coalesced(self, memories, op, codecs=None):
        for memory, codec in zip(memories, codecs, strict=True):
            codec.round(memory.array)


@pytest.mark.parametrize("name", ["int8", "bf16"])
def test_what_is_no_number_in_one_pass_is_gone_in_the_next_though_a_codec_rounds_lines_alike(name):
    communicator = Rounding("rounding")
    plan = FusionPlan([Entry("bias", "float32", 5), Entry("weight", "float32", 20), Entry("large", "float32", 16)])
    buffer = FusionBuffer(plan, communicator)
    (bucket,), (memory,) = plan.buckets, buffer.memories
    made = GradientReducer(buffer, communicator, compression=Choice(Compression.named(name)))
    places = zip(bucket.entries, bucket.offsets, strict=True)
    gradients = [memory.array[offset : offset + plan.entries[i].count] for i, offset in places]

    def passed(value):
        def fill(bucket):
            for gradient in gradients:
                gradient[:] = value

        made.finish(fill)
        return [gradient.copy() for gradient in gradients]

    assert all(np.isnan(gradient).all() for gradient in passed(np.nan))
    assert all((gradient == 1).all() for gradient in passed(1))
