"""Random sequences of collectives on random arrays, ranks, hosts and groups give what numpy gives."""

import contextlib
import threading
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ring_plugins.core import functions
from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.collectives import algorithms
from ring_plugins.core.collectives.single import SingleCommunicator
from ring_plugins.core.members.changes import ChangeCallbacks
from tests.core.collectives.simulated_hosts import Job, simulated_communicators

INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool"]
FLOATS = ["float16", "float32", "float64"]
COMPLEX = ["complex64", "complex128"]
UFUNC = {Op.SUM: np.add, Op.MIN: np.minimum, Op.MAX: np.maximum, Op.PRODUCT: np.multiply}
#: How hosts exchange: as few hosts do; in several rounds, as 15 and more do; in a ring, as 17 do.
ALGORITHMS = ["direct", "rounds", "ring"]
KINDS = ["all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "barrier", "objects"]
#: Most elements beside small shapes: around the limits of small messages, and above those of one staging buffer.
LONG = [2_047, 8_193, 16_385, 70_001, 300_007]


class Call(NamedTuple):
    """A collective that every member of a group makes.

    Attributes:
        shape: of the array; the first dimension is uneven among ranks where that is allowed.
        order: how the array lies in memory.
        out: "new", "same" for in place, or "given".
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]
    order: str
    op: Op
    root: int
    out: str
    wait: bool
    uneven: bool


@st.composite
def calls(draw: Any) -> Call:
    dtype = draw(st.sampled_from([*INTEGERS, *FLOATS, *COMPLEX]))
    rejected = {Op.AVERAGE} if dtype in INTEGERS else {Op.MIN, Op.MAX} if dtype in COMPLEX else set()
    ops = [op for op in Op if op not in rejected]
    small = st.lists(st.integers(0, 6), max_size=3).map(tuple)
    kinds = [*KINDS, "all_reduce", "all_reduce"]  # which has the most paths
    long = st.tuples(st.sampled_from(LONG), st.sampled_from([1, 2])).map(lambda shape: shape[: shape[1]])
    return Call(
        draw(st.sampled_from(kinds)),
        dtype,
        draw(st.one_of(small, long)),
        draw(st.sampled_from(["C", "F", "reversed", "strided", "read-only"])),
        draw(st.sampled_from(ops)),
        draw(st.integers(0, 4)),
        draw(st.sampled_from(["new", "same", "given"])),
        draw(st.booleans()),
        draw(st.booleans()),
    )


#: The host of each rank; hosts of one rank, of several, unequal, and in any order.
hosts_of_ranks = st.lists(st.integers(0, 3), min_size=1, max_size=5).map(tuple)


@contextlib.contextmanager
def forced(algorithm: str) -> Any:
    """Let few hosts choose the algorithm that they would only choose if they were many."""
    with pytest.MonkeyPatch.context() as patch:
        if algorithm == "rounds":
            patch.setattr(algorithms, "_MESSAGES_PER_ROUND", 0)
        if algorithm == "ring":
            patch.setattr(algorithms, "LARGEST_GROUP", 1)
        algorithms.radices.cache_clear()
        yield
    algorithms.radices.cache_clear()


def laid_out(values: np.ndarray, order: str) -> np.ndarray:
    """An array with these values that lies in memory as `order` says."""
    if order == "F":
        return values.copy(order="F")
    if values.ndim and order == "reversed":
        return np.ascontiguousarray(values[::-1])[::-1]
    if values.ndim and order == "strided":
        wide = np.zeros((*values.shape[:-1], 2 * values.shape[-1]), values.dtype)
        wide[..., ::2] = values
        return wide[..., ::2]
    array = values.copy()
    array.flags.writeable = order != "read-only"
    return array


def values(shape: tuple[int, ...], dtype: str, rank: int, salt: int) -> np.ndarray:
    """Small numbers, so that all results but averages are exact; different on every rank and in every call."""
    base = (np.arange(int(np.prod(shape))) * 7 + rank * 3 + salt) % 3 + 1
    return (base + 1j * (base % 2) if dtype in COMPLEX else base).astype(dtype).reshape(shape)


def reduced(inputs: list[np.ndarray], op: Op) -> np.ndarray:
    if op is Op.AVERAGE:
        return (np.sum(inputs, axis=0, dtype="complex128" if inputs[0].dtype.kind == "c" else "float64")) / len(inputs)
    return UFUNC[op].reduce(inputs).astype(inputs[0].dtype)


class Expected(NamedTuple):
    """This rank's input, its result, and whether the result is rounded."""

    given: Any
    result: Any
    is_rounded: bool = False


def expected(call: Call, rank: int, size: int, salt: int) -> Expected:
    """What a rank gives, and what numpy says it gets."""
    root = call.root % size
    if call.kind == "objects":
        return Expected({"rank": rank, "salt": "x" * salt * 100}, None)
    shape = call.shape
    if call.kind in ("reduce_scatter", "all_to_all"):
        shape = shape or (size,)
    if call.kind == "all_to_all":
        unit, even = max(1, shape[0] // 9), shape[0] // size
        rows = [[(i + 2 * j + salt) % 3 * unit if call.uneven else even for j in range(size)] for i in range(size)]
        inputs = [values((sum(rows[i]), *shape[1:]), call.dtype, i, salt) for i in range(size)]
        parts = [inputs[i][sum(rows[i][:rank]) :][: rows[i][rank]] for i in range(size)]
        return Expected((inputs[rank], rows[rank]), np.concatenate(parts))
    if call.kind == "all_gather":
        lengths = [shape[0] + (i * salt) % 3 if shape and call.uneven else (shape or (1,))[0] for i in range(size)]
        inputs = [values((lengths[i], *shape[1:]) if shape else (), call.dtype, i, salt) for i in range(size)]
        return Expected(inputs[rank], np.concatenate([np.atleast_1d(x) for x in inputs]))
    inputs = [values(shape, call.dtype, i, salt) for i in range(size)]
    if call.kind == "broadcast":
        return Expected(inputs[rank], inputs[root])
    result = reduced(inputs, call.op)
    if call.kind == "reduce_scatter":
        result = np.array_split(result, size)[rank]
    return Expected(inputs[rank], result, call.op is Op.AVERAGE)


def make(call: Call, rank: int, size: int, salt: int) -> Any:
    """Make the call; returns the result, or a Work."""
    given_, _, _ = expected(call, rank, size, salt)
    if call.kind == "barrier":
        return functions.barrier()
    if call.kind == "objects":
        gathered = functions.all_gather_object(given_)
        assert [item["rank"] for item in gathered] == list(range(size))
        assert functions.broadcast_object(given_, call.root % size) == gathered[call.root % size]
        return None
    if call.kind == "all_to_all":
        array, splits = given_
        return functions.all_to_all(laid_out(array, call.order), splits, wait=call.wait)
    x = laid_out(given_, call.order)
    if call.kind == "all_gather":
        return functions.all_gather(x, wait=call.wait)
    if call.kind == "reduce_scatter":
        return functions.reduce_scatter(x, call.op, wait=call.wait)
    if call.out == "same":
        out = x if x.flags.writeable else None
    else:
        out = (
            laid_out(np.full_like(given_, 9), call.order if x.flags.writeable else "C") if call.out == "given" else None
        )
    if call.kind == "broadcast":
        return functions.broadcast(x, call.root % size, out=out, wait=call.wait)
    return functions.all_reduce(x, call.op, out=out, wait=call.wait)


def check(call: Call, got: Any, rank: int, size: int, salt: int) -> None:
    _, result, is_rounded = expected(call, rank, size, salt)
    if result is None or call.kind in ("barrier", "objects"):
        return
    assert isinstance(got, np.ndarray) and got.shape == result.shape and got.dtype == call.dtype, (got, result)
    if is_rounded:
        tolerance = 2e-3 if call.dtype == "float16" else 1e-6
        np.testing.assert_allclose(got, result, rtol=tolerance, atol=tolerance)
    else:
        np.testing.assert_array_equal(got, result)


class Jobs:
    """Jobs and groups that examples share, since building one takes longer than an example."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._jobs: dict[tuple[int, ...], Job] = {}
        self._groups: dict[Any, dict[int, Any]] = {}

    def group(self, hosts: tuple[int, ...], members: tuple[int, ...], algorithm: str) -> dict[int, Any]:
        """The communicators of a group by rank, in a job of ranks on `hosts`."""
        if (hosts, members, algorithm) not in self._groups:
            if len(members) == 1:
                made: dict[int, Any] = {members[0]: SingleCommunicator("single", members[0])}
            else:
                if hosts not in self._jobs:
                    self._jobs[hosts] = self._stack.enter_context(simulated_communicators(hosts))
                made = self._jobs[hosts].group(members)
            self._groups[hosts, members, algorithm] = made
        return self._groups[hosts, members, algorithm]

    def run(self, hosts: tuple[int, ...], members: tuple[int, ...], algorithm: str, sequence: list[Call]) -> None:
        """Make the calls on all members, and compare the results with numpy's and with each other."""
        communicators = self.group(hosts, members, algorithm)
        size = len(members)

        def call_all(communicator: Any) -> list[Any]:
            THREAD.world = SimpleNamespace(
                communicator=communicator,
                elastic=SimpleNamespace(changes=ChangeCallbacks(), end_if_all_are_told=lambda: None),
                is_joining=False,
            )
            results = [make(call, communicator.rank, size, salt) for salt, call in enumerate(sequence)]
            results = [result.wait() if hasattr(result, "wait") else result for result in results]
            for salt, (call, result) in enumerate(zip(sequence, results, strict=True)):
                check(call, result, communicator.rank, size, salt)
            equal = ("all_reduce", "broadcast", "all_gather")
            pairs = zip(sequence, results, strict=True)
            return [result.tobytes() if call.kind in equal else None for call, result in pairs]

        if size == 1:
            call_all(communicators[members[0]])
            return
        outcomes = self._jobs[hosts].on_all(
            lambda rank, _: call_all(communicators[rank]) if rank in communicators else None
        )
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
        assert all(outcomes[rank] == outcomes[members[0]] for rank in members)


#: What `functions` takes for the world, on each thread its own.
THREAD = threading.local()


@pytest.fixture(scope="module")
def jobs():
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        patch.setattr(functions, "current", lambda: THREAD.world)
        yield Jobs(stack)


def run(data: Any, jobs: Jobs, hosts: tuple[int, ...]) -> None:
    members = tuple(rank for rank in range(len(hosts)) if data.draw(st.booleans(), f"rank {rank} is a member"))
    algorithm = data.draw(st.sampled_from(ALGORITHMS), "algorithm") if len(set(hosts)) > 2 else "direct"
    sequence = data.draw(st.lists(calls(), min_size=1, max_size=4), "calls")
    with forced(algorithm):
        jobs.run(hosts, members or tuple(range(len(hosts))), algorithm, sequence)


LAYOUTS = [
    *((0,), (0, 0, 0), (0, 1), (0, 1, 0), (0, 1, 1, 0)),
    *((0, 1, 2), (0, 1, 2, 3), (1, 0, 0, 2, 1), (0, 0, 1, 1, 0)),
]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("hosts", LAYOUTS, ids=str)
def test_every_collective_on_short_and_long_arrays(hosts, algorithm, jobs):
    """What few random examples may miss: each kind, at each size that has a path of its own."""
    if algorithm != "direct" and len(set(hosts)) < 3:
        pytest.skip("the same as direct")
    sequence = [
        Call(kind, "float32", (length,), "C", op, 1, "new", True, uneven)
        for kind in KINDS
        for length in (5, *LONG)
        for op, uneven in ((Op.SUM, True), (Op.AVERAGE, False))
    ]
    with forced(algorithm):
        jobs.run(hosts, tuple(range(len(hosts))), algorithm, sequence)


QUICK = settings(
    max_examples=60, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
)


@QUICK
@given(data=st.data(), hosts=st.sampled_from(LAYOUTS))
def test_collectives_give_what_numpy_gives(data, hosts, jobs):
    run(data, jobs, hosts)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(QUICK, max_examples=2_000, derandomize=False, print_blob=True)
@given(data=st.data(), hosts=hosts_of_ranks)
def test_many_collectives_give_what_numpy_gives(data, hosts, jobs):
    run(data, jobs, hosts)
