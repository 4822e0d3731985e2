"""Random models and steps, averaged by ranks that are threads, against one process that sees all their batches."""

import contextlib
import threading
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ring_plugins.core.base.errors import RingError
from ring_plugins.core.gradients.fusion import BucketSizes
from ring_plugins.torch import GradientAverager
from tests.core.collectives.thread_ranks import on_thread_ranks

SHAPES = [(5, 4), (5, 4), (40, 3), (), (0, 3), (3,)]


class Use(NamedTuple):
    """What a rank does with a parameter in a pass.

    Attributes:
        times: how often it uses it.
        factor: what the gradient of each use is.
        rows: for a table that is looked up, the rows; their gradients are sparse.
        place: in the loss, which decides when its gradient comes.
    """

    times: int
    factor: int
    rows: tuple[int, ...] | None
    place: int


class Step(NamedTuple):
    """
    Attributes:
        frozen: by parameter.
        passes: by pass, rank and parameter.
        sums_up: whether passes but the last run in `no_sync`.
        to_none: whether gradients are set to None before the step, or to zeros.
        raises: whether every rank's backward raises and is caught, before the step is run.
    """

    frozen: tuple[bool, ...]
    passes: tuple[tuple[tuple[Use, ...], ...], ...]
    sums_up: bool
    to_none: bool
    raises: bool


class Case(NamedTuple):
    size: int
    shapes: tuple[tuple[int, ...], ...]
    double: tuple[bool, ...]
    sizes: BucketSizes
    sparse: str
    steps: tuple[Step, ...]


@st.composite
def cases(draw):
    size, count = draw(st.integers(2, 3)), draw(st.integers(1, 6))
    shapes = tuple(draw(st.sampled_from(SHAPES)) for _ in range(count))
    rows = st.none() | st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple)

    def use(shape):
        looked_up = rows if len(shape) == 2 and shape[0] else st.none()
        return st.builds(Use, st.sampled_from([1, 1, 2, 0]), st.integers(-3, 3), looked_up, st.integers(0, 99))

    def step():
        passes = draw(st.integers(1, 2))
        uses = tuple(tuple(tuple(draw(use(s)) for s in shapes) for _ in range(size)) for _ in range(passes))
        frozen = tuple(draw(st.sampled_from([False, False, True])) for _ in shapes)
        return Step(frozen, uses, draw(st.booleans()), draw(st.booleans()), draw(st.sampled_from([False] * 4 + [True])))

    sizes = BucketSizes(
        draw(st.sampled_from([1, 200, 1 << 20])), draw(st.sampled_from([1, 200])), draw(st.sampled_from([1, 300, None]))
    )
    sparse = draw(st.sampled_from(["gather", "densify"]))
    double = tuple(draw(st.booleans()) for _ in shapes)
    return Case(size, shapes, double, sizes, sparse, tuple(step() for _ in range(draw(st.integers(1, 4)))))


def loss_of(parameters: list[nn.Parameter], uses: tuple[Use, ...]) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64, requires_grad=True) * 1.0
    for parameter, use in sorted(zip(parameters, uses, strict=True), key=lambda pair: pair[1].place):
        for _ in range(use.times):
            used = parameter
            if use.rows is not None:
                used = nn.functional.embedding(torch.tensor(use.rows), parameter, sparse=True)
            total = total + (used.double() * use.factor).sum()
    return total


class Boom(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        raise ValueError("boom")


def start(parameters: list[nn.Parameter], step: Step) -> None:
    """Freeze and unfreeze, and clear gradients."""
    for parameter, frozen in zip(parameters, step.frozen, strict=True):
        parameter.requires_grad_(not frozen)
        if frozen or step.to_none or (parameter.grad is not None and parameter.grad.is_sparse):
            parameter.grad = None
        elif parameter.grad is not None:
            parameter.grad.zero_()


def raise_in_backward(parameters: list[nn.Parameter]) -> None:
    """Catch an exception of a backward, and leave gradients as they were."""
    trained = [p for p in parameters if p.requires_grad]
    kept = [None if p.grad is None else p.grad.clone() for p in parameters]
    with pytest.raises(ValueError, match="boom"):
        (trained[-1].sum() + Boom.apply(trained[0] * 1.0).sum()).backward()
    for parameter, before in zip(parameters, kept, strict=True):
        parameter.grad = before


def average_of(case: Case, step: Step, parameter: int) -> torch.Tensor | None:
    """What one process would compute; None if no rank uses the parameter."""
    average, is_used = torch.zeros(case.shapes[parameter], dtype=torch.float64), False
    for uses in step.passes:
        for use in (of_rank[parameter] for of_rank in uses):
            if use.times and not step.frozen[parameter]:
                is_used, share = True, use.times * use.factor / case.size
                for row in use.rows if use.rows is not None else [...]:
                    average[row] += share
    return average if is_used else None


def check(case: Case) -> None:
    dtypes = [torch.float64 if double else torch.float32 for double in case.double]

    def rank_of(rank, communicator):
        parameters = [nn.Parameter(torch.ones(s, dtype=d)) for s, d in zip(case.shapes, dtypes, strict=True)]
        named = [(str(i), parameter) for i, parameter in enumerate(parameters)]
        averager = GradientAverager(named, sparse=case.sparse, communicator=communicator, autotune=False)
        averager._sets.sizes = case.sizes
        averager._sets.drop_all()
        for number, step in enumerate(case.steps):
            start(parameters, step)
            averager.prepare()
            had_zeros = [p.grad is not None for p in parameters]
            if step.raises and not all(step.frozen):
                raise_in_backward(parameters)
                averager.prepare()
            for which, uses in enumerate(step.passes):
                is_last = which + 1 == len(step.passes)
                with averager.no_sync() if step.sums_up and not is_last else contextlib.nullcontext():
                    before = averager.steps
                    loss_of(parameters, uses[rank]).backward()
                    if averager._synchronizes and averager.steps == before:
                        averager.finish()  # this rank has no gradient in this pass
            for i, parameter in enumerate(parameters):
                where, expected = f"step {number}, parameter {i}, rank {rank}", average_of(case, step, i)
                if expected is None and not had_zeros[i]:
                    assert parameter.grad is None, where
                    continue
                expected = torch.zeros(case.shapes[i], dtype=torch.float64) if expected is None else expected
                assert parameter.grad is not None, where
                assert torch.allclose(parameter.grad.to_dense().double(), expected, atol=1e-5), where
        averager._hooks.remove()
        return [p.grad.to_dense().clone() if p.grad is not None else None for p in parameters]

    first, *others = on_thread_ranks(case.size, rank_of)
    for gradients in others:
        for mine, other in zip(first, gradients, strict=True):
            assert (mine is None) == (other is None)
            assert mine is None or torch.equal(mine, other)


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_an_interrupt_after_the_averages_are_there_leaves_no_rank_a_step_behind():
    has_averages = threading.Event()

    def rank_of(rank, communicator):
        parameter = nn.Parameter(torch.ones(3))
        averager = GradientAverager([("p", parameter)], communicator=communicator, autotune=False)
        parameter.sum().backward()  # the first one ends with an exchange of the order of gradients
        if rank == 0:

            def interrupted(found):
                assert has_averages.wait(60)  # the other rank steps; a slower one would be interrupted as well
                raise KeyboardInterrupt

            averager._buckets._assign_absent = interrupted
        with pytest.raises(KeyboardInterrupt) if rank == 0 else contextlib.nullcontext():
            parameter.sum().backward()
        if rank == 1:
            has_averages.set()
        if rank == 0:
            del averager._buckets._assign_absent
        with pytest.raises(RingError, match="interrupted"):
            parameter.sum().backward()
        averager._hooks.remove()

    on_thread_ranks(2, rank_of)


def test_an_exception_after_the_averages_ends_what_the_others_wait_for():
    def rank_of(rank, communicator):
        parameters = [nn.Parameter(torch.ones(3)) for _ in range(2)]
        named = [("p", parameters[0]), ("q", parameters[1])]
        averager = GradientAverager(named, communicator=communicator, autotune=False, bucket_bytes=1)
        finish = averager._buckets.finish  # all ranks are in this process here, so each averager has another beside it
        averager._buckets.finish = lambda at_once: finish(at_once)._replace(has_others=False)
        if rank == 0:

            def failing(buckets):
                raise AssertionError("from what torch.compile made of this")

            averager._sets.learn_order = failing
        with pytest.raises(AssertionError if rank == 0 else RingError, match="made of this|by AssertionError"):
            sum(parameters).sum().backward()
        averager._hooks.remove()

    on_thread_ranks(2, rank_of)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(cases())
def test_random_models_average_like_one_process(case):
    check(case)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # 65 s where nothing else runs; its threads wait for each other where something does
@settings(deadline=None, max_examples=1500)
@given(cases())
def test_many_random_models_average_like_one_process(case):
    check(case)
