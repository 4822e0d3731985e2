"""Groups of TensorFlow's tensors equal their operations one by one; names match; ranks in `hvd.join` count as zeros."""

import pytest

from tests.launch import run_ranks

GROUPS = """
import os
import numpy as np
import tensorflow as tf
import ring_plugins as ring
from tests.worker import report
ring.init(ranks=int(os.environ["TEST_RANKS"]))
import ring_plugins.horovod.tensorflow as hvd

rank, size = hvd.rank(), hvd.size()


def tensors(rows):
    draw = np.random.default_rng(rank)
    return [
        tf.Variable(draw.normal(size=(rows, 3)).astype("float32")), tf.Variable(draw.normal(size=(size + 1, 2, 2))),
        tf.constant(draw.integers(9, size=(size, 1))), tf.cast(tf.Variable(draw.normal(size=(2, 2))), tf.bfloat16),
        tf.constant(draw.integers(9, size=2 * size + 1)), tf.Variable([1.0 + rank]),
    ]


def with_gradients(grouped, single, rows, compiled):
    found = []
    for call in (grouped, lambda all: [single(x) for x in all]):
        inputs = tensors(rows)

        def step():
            with tf.GradientTape() as tape:
                results = call(inputs)
                loss = sum(tf.reduce_sum(tf.cast(x, tf.float64) ** 2) * (i + 1) for i, x in enumerate(results))
            return results, tape.gradient(loss, [x for x in inputs if isinstance(x, tf.Variable)])

        results, gradients = (tf.function(step) if compiled else step)()
        found.append([*results, *gradients])
    return all(
        one.dtype == other.dtype and np.allclose(tf.cast(one, tf.float64), tf.cast(other, tf.float64), atol=1e-6)
        for one, other in zip(*found, strict=True)
    )


for compiled in (False, True):
    found = [with_gradients(hvd.grouped_allgather, hvd.allgather, rank, compiled)]
    for op in (hvd.Sum, hvd.Average):
        options = dict(op=op, prescale_factor=1.5)
        found += [
            with_gradients(lambda all: hvd.grouped_reducescatter(all, **options),
                           lambda one: hvd.reducescatter(one, **options), 4, compiled),
            with_gradients(lambda all: hvd.grouped_allreduce(all, **options),
                           lambda one: hvd.allreduce(one, **options), 4, compiled),
        ]
    report(f"equal {compiled}", found)
collectives = []
for name in ("all_reduce", "all_gather", "reduce_scatter"):
    setattr(ring, name, lambda *a, _call=getattr(ring, name), **o: collectives.append(1) or _call(*a, **o))
hvd.grouped_allreduce([tf.ones(2), tf.ones(3), tf.zeros(2, tf.float64)])
hvd.grouped_allgather([tf.ones(2), tf.ones(3)])
hvd.grouped_reducescatter([tf.ones(2), tf.ones(3)])
report("collectives", len(collectives))
rows = tf.IndexedSlices(tf.ones((1, 2)), [rank], [size, 2])
dense, slices, other = hvd.grouped_allreduce([tf.ones(2), rows, tf.ones(1)], op=hvd.Sum)
report("slices", [dense.numpy().tolist(), tf.convert_to_tensor(slices).numpy().tolist(), other.numpy().tolist()])
report("none", [hvd.grouped_allreduce([]), hvd.grouped_allgather([]), hvd.grouped_reducescatter([])])
wrong, refused = tf.ones((2, 3)) if rank else tf.ones((3, 2)), []  # of as many elements
for call in (hvd.grouped_allreduce, hvd.grouped_allgather, hvd.grouped_reducescatter):
    try:
        call([tf.ones(2), wrong])
    except ring.MismatchError as error:
        refused.append(str(error))
report("refused", refused)
some = hvd.add_process_set([0, size - 1])
if some.included():
    found = hvd.grouped_reducescatter([tf.ones(3), tf.ones(1)], op=hvd.Sum, process_set=some)
    report("set", [x.numpy().tolist() for x in found], rank)
"""


@pytest.mark.slow
@pytest.mark.ranks(3)
def test_groups_equal_their_operations_one_by_one(ranks):
    run = run_ranks(GROUPS, ranks, env={"KERAS_BACKEND": "tensorflow"}, timeout=120)
    for compiled in (False, True):
        assert run.values(f"equal {compiled}") == [[True] * 5] * ranks
    assert run.values("collectives") == [2 + 2 + 1] * ranks
    assert run.values("slices") == [[[ranks] * 2, [[1, 1]] * ranks, [ranks]]] * ranks
    assert run.values("none") == [[[]] * 3] * ranks
    for texts in run.values("refused"):
        assert [
            text.count(f"grouped_{kind} of 2 tensors") > 0
            for kind, text in zip(("allreduce", "allgather", "reducescatter"), texts, strict=True)
        ] == [True] * 3
    assert run.values("set") == [[[2, 2], [2]], [[2], []]]


NAMES = """
import threading
import tensorflow as tf
import ring_plugins as ring
from tests.worker import report
import ring_plugins.horovod.tensorflow as hvd

ring.init(ranks=2)
hvd.init()
rank, found = hvd.rank(), {}


def call(name):
    found[name] = float(hvd.allreduce(tf.constant(float(ord(name) + rank)), name=name, op=hvd.Sum)) - 2 * ord(name)


threads = [threading.Thread(target=call, args=(name,)) for name in ["a", "b", "c"][:: 1 - 2 * rank]]
for thread in threads:
    thread.start()
    if thread is not threads[-1]:
        thread.join(0.3)  # it waits for the other rank's
for thread in threads:
    thread.join()
report("any order", found)

compiled = tf.function(lambda x: hvd.allreduce(hvd.allgather(x, name="rows"), name="sum", op=hvd.Sum))
report("compiled", [compiled(tf.constant([float(rank)])).numpy().tolist() for _ in range(3)])
rows, received = hvd.alltoall(tf.range(2.0), [1, 1] if rank else [2, 0], name="to all")
report("rows", [rows.numpy().tolist(), received.numpy().tolist()])
report("root", hvd.broadcast(tf.constant(rank), 1, name="root").numpy().tolist())
refused = []


def refuse(function):
    try:
        function()
    except ring.RingError as error:
        refused.append([type(error).__name__, isinstance(error, tf.errors.FailedPreconditionError), str(error)])


refuse(lambda: hvd.allreduce(tf.ones(1 + rank), name="x"))
refuse(lambda: hvd.allreduce(tf.ones(1), name="x", op=hvd.Sum if rank else "sum"))
report("refused", refused)
report("next", float(hvd.allreduce(tf.constant(1.0), name="x")))

last, refused = [], []
compiled_sum = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum))
for first in range(2):
    if rank != first:
        zeros = [
            hvd.allreduce(tf.constant([6, -3])), hvd.allreduce(tf.ones(1), name="q"), compiled_sum(tf.ones(1)),
            *hvd.grouped_allreduce([tf.ones(1), tf.constant([3]), tf.ones(2)], op=hvd.Sum),
            hvd.allreduce(tf.constant([5.0]), prescale_factor=2.0), hvd.allreduce(tf.ones(1, tf.bfloat16)),
        ]
        report("zeros", [tf.cast(one, tf.float32).numpy().tolist() for one in zeros])
        refuse(lambda: hvd.allgather(tf.ones(1)))
        refuse(lambda: hvd.allreduce(tf.ones(1), op=hvd.Max))
    last.append(hvd.join())
report("not while joined", refused)
report("last", last)
report("after", float(hvd.allreduce(tf.constant(1.0 + rank))))
"""


@pytest.mark.slow
def test_names_match_in_threads_and_ranks_that_have_joined_count_as_zeros():
    run = run_ranks(NAMES, 2, env={"KERAS_BACKEND": "tensorflow"}, timeout=120)
    assert run.values("any order") == [{"a": 1, "b": 1, "c": 1}] * 2
    assert run.values("compiled") == [[[0, 2]] * 3] * 2
    assert run.values("rows") == [[[0, 1, 0], [2, 1]], [[1], [0, 1]]]
    assert run.values("root") == [1, 1]
    for rank, ((kind, is_tensorflows, text), (other, _, why)) in enumerate(run.values("refused")):
        assert kind == "MismatchError" and is_tensorflows and "'x' differently" in text
        assert other == ("MismatchError" if rank else "ArgumentError") and (not rank or "rank 0 takes no part" in why)
    assert run.values("next") == [1, 1]
    assert run.values("zeros") == [[[3, -1], [0.5], [1], [1], [3], [1, 1], [5], [0.5]]] * 2
    for rank, refusals in enumerate(run.values("not while joined")):
        assert len(refusals) == 2 and all(f"since rank {1 - rank} is in hvd.join()" in text for _, _, text in refusals)
    assert run.values("last") == [[1, 0]] * 2
    assert run.values("after") == [1.5, 1.5]
