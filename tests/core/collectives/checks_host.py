"""Every collective against numpy on the gathered inputs; holds at any world size. Run by test_host.py.

Sizes are around the thresholds of the implementation (small messages, staging buffers, chunks) and do not divide by the
number of ranks.
"""

import os
import threading
import time
import weakref
from collections.abc import Callable

import numpy as np

import ring_plugins as ring
from ring_plugins.core.arrays.memory import HostMemory
from ring_plugins.core.collectives.shm_group import SMALL_BYTES, STAGING_BYTES
from ring_plugins.core.world import current
from tests.checks import run
from tests.worker import report

ring.init(ranks=int(os.environ["TEST_RANKS"]))
RANK, SIZE = ring.rank(), ring.size()
CHECKS: list[Callable[[], None]] = []

EXACT = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
COUNTS = [0, 1, 7, SMALL_BYTES // 4, SMALL_BYTES // 4 + 1, STAGING_BYTES // 4 + 3, STAGING_BYTES // 4 * 9 + 5]


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS.append(function)
    return function


def values(count: int, dtype: str, rank: int) -> np.ndarray:
    """Small numbers, so that sums are exact in every type; different on every rank."""
    base = (np.arange(count) * 7 + rank * 3) % 5 + 1
    return (base + 1j * (base % 3)).astype(dtype) if dtype.startswith("complex") else base.astype(dtype)


def everyones(count: int, dtype: str) -> list[np.ndarray]:
    return [values(count, dtype, rank) for rank in range(SIZE)]


def combined(inputs: list[np.ndarray], op: ring.Op) -> np.ndarray:
    if op is ring.AVERAGE:
        return (np.sum(inputs, axis=0) / SIZE).astype(inputs[0].dtype)
    function = {ring.SUM: np.add, ring.MIN: np.minimum, ring.MAX: np.maximum, ring.PRODUCT: np.multiply}[op]
    return function.reduce(inputs).astype(inputs[0].dtype)


@check
def all_reduce_every_type_and_operation() -> None:
    for dtype in [*EXACT, "float16", "float32", "float64", "complex64", "complex128", "bool"]:
        for op in ring.Op:
            if op is ring.AVERAGE and (dtype in EXACT or dtype == "bool"):
                continue
            if op in (ring.MIN, ring.MAX) and dtype.startswith("complex"):
                continue
            inputs = everyones(1003, dtype)
            got = ring.all_reduce(inputs[RANK], op)
            assert got.dtype == inputs[0].dtype
            expected = combined(inputs, op)
            assert np.array_equal(got, expected) or np.allclose(got, expected, rtol=1e-6), (dtype, op)


@check
def all_reduce_every_size() -> None:
    for count in COUNTS:
        inputs = everyones(count, "float32")
        x = inputs[RANK].copy()
        assert ring.all_reduce(x, ring.SUM, out=x) is x
        assert np.array_equal(x, combined(inputs, ring.SUM)), count
        assert np.array_equal(ring.all_reduce(inputs[RANK]), combined(inputs, ring.AVERAGE)), count


@check
def all_reduce_gives_the_same_bits_everywhere() -> None:
    rng = np.random.default_rng(RANK)
    for count in COUNTS:
        got = ring.all_reduce(rng.standard_normal(count).astype(np.float32))
        assert len(set(ring.all_gather_object(got.tobytes()))) == 1, count


@check
def average_of_equal_values_is_that_value() -> None:
    x = np.random.default_rng(0).standard_normal(10_001).astype(np.float32)
    for scale in (1e-30, 1.0, 1e30):
        got = ring.all_reduce(x * np.float32(scale))
        assert np.allclose(got, x * np.float32(scale), rtol=2e-7, atol=0)


@check
def all_reduce_in_shared_memory() -> None:
    communicator = current().communicator
    for count in COUNTS:
        buffer = communicator.allocate(4 * count + 64)
        x = buffer.array[64:].view(np.float32)
        inputs = everyones(count, "float32")
        for _ in range(2):
            x[:] = inputs[RANK]
            communicator.all_reduce(HostMemory(x, "float32"), ring.SUM)
            assert np.array_equal(x, combined(inputs, ring.SUM)), count
        communicator.release(buffer)


@check
def all_reduce_only_reads_a_separate_source() -> None:
    communicator = current().communicator
    for dtype in ("float32", "float16", "int64"):
        for count in COUNTS:
            inputs = everyones(count, dtype)
            mine, result = inputs[RANK].copy(), np.full(count, 7, dtype)
            mine.setflags(write=False)
            communicator.all_reduce(HostMemory(result, dtype, mine), ring.SUM)
            assert np.array_equal(mine, inputs[RANK]), (dtype, count)
            expected = combined(inputs, ring.SUM)
            assert np.array_equal(result, expected) or np.allclose(result, expected, rtol=2e-3), (dtype, count)


@check
def not_a_number_and_infinity_travel() -> None:
    x = np.ones(50_000, np.float32)
    if RANK == SIZE - 1:
        x[[0, 49_999]] = np.nan, np.inf
    got = ring.all_reduce(x)
    assert np.isnan(got[0]) and np.isinf(got[-1]) and np.all(got[1:-1] == 1)


@check
def shapes_strides_and_scalars() -> None:
    x = np.full((3, 4, 5), RANK, np.float64)
    assert ring.all_reduce(x, ring.SUM).shape == (3, 4, 5)
    total = sum(range(SIZE))
    assert np.all(ring.all_reduce(x.transpose(2, 0, 1)[::2], ring.SUM) == total)
    strided = np.full((6, 6), RANK, np.float32)
    ring.all_reduce(strided[::2, ::3], ring.SUM, out=strided[::2, ::3])
    assert np.all(strided[::2, ::3] == total) and np.all(strided[1::2] == RANK)
    line = np.arange(60_000, dtype=np.float32)
    ring.all_reduce(line[1:], ring.SUM, out=line[:-1])  # overlapping
    assert np.array_equal(line[:-1], np.arange(1, 60_000) * SIZE) and line[-1] == 59_999
    zero_d = ring.all_reduce(np.array(float(RANK)), ring.MAX)
    assert zero_d.shape == () and float(zero_d) == SIZE - 1
    assert float(ring.all_reduce(float(RANK), ring.SUM)) == total
    assert ring.all_reduce(np.zeros((0, 3), np.float32)).shape == (0, 3)


@check
def read_only_memory_is_an_input_but_no_output() -> None:
    x = np.full(10, RANK, np.float32)
    x.flags.writeable = False
    assert np.all(ring.all_reduce(x, ring.MAX) == SIZE - 1)
    rejected(lambda: ring.all_reduce(x, out=x), "read-only")


def rejected(call: Callable[[], object], said: str, error_type: type[ring.RingError] = ring.ArgumentError) -> None:
    """The call raises our error that says so, and the next check still works."""
    try:
        call()
    except error_type as error:
        assert said in str(error), error
    else:
        raise AssertionError(f"not rejected: {said}")


@check
def bad_arguments_are_rejected_by_name() -> None:
    rejected(lambda: ring.all_reduce(np.ones(3, np.int32)), "op=AVERAGE")
    rejected(lambda: ring.all_reduce(np.ones(3, np.complex64), ring.MIN), "no order")
    rejected(lambda: ring.all_reduce(np.array(["a"])), "dtype=")
    rejected(lambda: ring.all_reduce(object()), "cannot be sent")
    rejected(lambda: ring.all_reduce(np.ones(3), out=np.ones(4)), "out has 4")
    rejected(lambda: ring.all_reduce(np.ones(3), out=np.ones(3, np.float32)), "out has 3")
    rejected(lambda: ring.broadcast(np.ones(3), root=SIZE), f"root={SIZE}")
    rejected(lambda: ring.all_to_all(np.ones(3), [1] * (SIZE + 1)), "splits=")
    rejected(lambda: ring.reduce_scatter(np.array(1.0)), "x is 0-d")


@check
def broadcast_from_every_root() -> None:
    for root in range(SIZE):
        for count in COUNTS:
            got = ring.broadcast(values(count, "int32", RANK), root)
            assert np.array_equal(got, values(count, "int32", root)), (root, count)
    x = np.full((2, 3), RANK)
    ring.broadcast(x, SIZE - 1, out=x)
    assert np.all(x == SIZE - 1)


@check
def all_gather_uneven() -> None:
    for rows in (0, 1, 5, STAGING_BYTES // 12):
        mine = np.full((rows + RANK, 3), RANK, np.float32)
        got = ring.all_gather(mine)
        expected = np.concatenate([np.full((rows + rank, 3), rank, np.float32) for rank in range(SIZE)])
        assert np.array_equal(got, expected), rows
    only_last = ring.all_gather(np.ones(4 if RANK == SIZE - 1 else 0))
    assert only_last.shape == (4,)
    assert ring.all_gather(np.float32(RANK)).tolist() == list(range(SIZE))


@check
def all_gather_of_unequal_shapes_is_rejected() -> None:
    if SIZE > 1:
        rejected(lambda: ring.all_gather(np.ones((2, 3 + RANK))), "trailing dimensions", ring.MismatchError)


@check
def reduce_scatter_uneven() -> None:
    for rows in (0, 1, SIZE * 2 + 1, 100_003):
        inputs = [values(rows * 2, "float32", rank).reshape(rows, 2) for rank in range(SIZE)]
        got = ring.reduce_scatter(inputs[RANK], ring.SUM)
        expected = np.array_split(combined(inputs, ring.SUM), SIZE)[RANK]
        assert np.array_equal(got, expected), rows


@check
def all_to_all_even_and_uneven() -> None:
    got = ring.all_to_all(np.arange(SIZE * 2) + 100 * RANK)
    assert got.tolist() == [100 * other + 2 * RANK + i for other in range(SIZE) for i in range(2)]
    for scale in (1, 50_000):
        send = [(RANK + to) % 3 * scale for to in range(SIZE)]
        data = np.concatenate([np.full(n, RANK * 10 + to, np.float32) for to, n in enumerate(send)])
        got = ring.all_to_all(data, send)
        expected = [np.full((other + RANK) % 3 * scale, other * 10 + RANK, np.float32) for other in range(SIZE)]
        assert np.array_equal(got, np.concatenate(expected)), scale


@check
def objects() -> None:
    said = ring.all_gather_object({"rank": RANK, "text": "x" * RANK * 1000})
    assert [item["rank"] for item in said] == list(range(SIZE))
    big = {"data": list(range(200_000))} if RANK == SIZE - 1 else None
    assert ring.broadcast_object(big, SIZE - 1)["data"][-1] == 199_999


@check
def asynchronous_calls_keep_their_order() -> None:
    inputs = [np.full(60_000, i + RANK, np.float32) for i in range(8)]
    works = [ring.all_reduce(x, ring.SUM, wait=False) for x in inputs]
    ring.barrier()
    assert all(work.done() for work in works)
    total = sum(range(SIZE))
    assert [float(work.wait()[0]) for work in works] == [i * SIZE + total for i in range(8)]
    gathered = ring.all_gather(np.ones(3), wait=False)
    assert gathered.wait().shape == (3 * SIZE,)


@check
def several_communicators_do_not_disturb_each_other() -> None:
    first, second = current().new_communicator("first"), current().new_communicator("second")
    a, b = np.ones(100_000, np.float32), np.ones(100_000, np.float32)
    order = (first, second) if RANK % 2 else (second, first)
    works = [c.start("x", lambda c=c, m=m: c.all_reduce(HostMemory(m, "float32"), ring.SUM)) for c, m in zip(
        order, (a, b) if RANK % 2 else (b, a), strict=True)]  # fmt: skip
    for work in works:
        work.wait()
    assert np.all(a == SIZE) and np.all(b == SIZE)
    first.close()
    second.close()


@check
def nothing_is_left_of_communicators_and_results() -> None:
    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    for i in range(6):
        communicator = current().new_communicator("short-lived")
        communicator.allocate(1000)
        communicator.start("x", communicator.barrier).wait()
        if i % 2:
            communicator.close()
        del communicator
        if i == 1:
            time.sleep(0.02)  # while the threads end
            before = held()
    end = time.monotonic() + 30
    while any(now > then for now, then in zip(held(), before, strict=True)):
        assert time.monotonic() < end, (before, held())
        time.sleep(0.02)
    work = ring.all_reduce(np.ones(3), wait=False)
    result = weakref.ref(work.wait())
    del work
    while result() is not None:
        assert time.monotonic() < end
        time.sleep(0.02)


@check
def a_forked_child_is_no_rank() -> None:
    if SIZE == 1:
        return
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        for call in (ring.init, ring.barrier):
            try:
                call()
            except ring.RingError as error:
                os.write(writing, f"{error}\n".encode())
        os._exit(ring.rank() != RANK)
    _, status = os.waitpid(child, 0)
    said = os.read(reading, 4096).decode()
    assert status == 0 and f"forked from rank {RANK}" in said and f"process {os.getpid()}" in said, said
    ring.barrier()


@check
def a_second_init_is_the_same_world_and_shutdown_starts_anew() -> None:
    assert ring.init() is current()
    before = current()
    ring.barrier()
    ring.shutdown()
    ring.shutdown()
    try:
        ring.rank()
    except ring.NotInitialized as error:
        assert "ring_plugins.init()" in str(error)
    else:
        raise AssertionError("rank() without a world")
    ring.init(ranks=SIZE)
    assert current() is not before and (ring.rank(), ring.size()) == (RANK, SIZE)
    assert float(ring.all_reduce(1.0, ring.SUM)) == SIZE


run(CHECKS)
report("place", vars(current().topology))
