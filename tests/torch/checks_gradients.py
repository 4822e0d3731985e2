"""Averaged gradients against one process on the concatenated batch. Run by test_gradients.py at any world size."""

# ruff: noqa: E402  # ranks that start before torch is imported import it in parallel

import collections
import contextlib
import copy
import gc
import logging
import os
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import ring_plugins as ring

ring.init(ranks=int(os.environ["TEST_RANKS"]))

import torch
from torch import nn

from ring_plugins.torch import DistributedOptimizer, GradientAverager, broadcast_optimizer_state, broadcast_parameters
from tests.checks import run
from tests.worker import report

torch.set_num_threads(1)
ON_GPUS = os.environ.get("TEST_DEVICE") == "cuda"
LAUNCHES: Any = []
if ON_GPUS:
    from tests.gpu_rehearsal.devices import make_default

    LAUNCHES = make_default()
RANK, SIZE = ring.rank(), ring.size()
CHECKS: list[Callable[[], None]] = []


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS.append(function)
    return function


def check_among_several(function: Callable[[], None]) -> Callable[[], None]:
    """Skip the check on a single rank."""
    return check(function) if SIZE > 1 else function


def check_on_gpus(function: Callable[[], None]) -> Callable[[], None]:
    return check(function) if ON_GPUS else function


def shard(x: torch.Tensor) -> torch.Tensor:
    return x[RANK::SIZE]


def same_everywhere(tensors) -> bool:
    flat = torch.cat([t.detach().to_dense().flatten().double() for t in tensors])
    rows = ring.all_gather(flat[None])
    return all(torch.equal(rows[0], row) for row in rows)


def close(model: nn.Module, reference: nn.Module, tolerance: float = 1e-6) -> bool:
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return all(torch.allclose(a.float(), b.float(), rtol=tolerance, atol=tolerance) for a, b in pairs)


class Net(nn.Module):
    """Convolution (channels_last), a shared layer used twice, a 0-d and an empty parameter, two dtypes."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.conv = nn.Conv2d(1, 4, 3).to(memory_format=torch.channels_last)
        self.twice = nn.Linear(36, 36)
        self.wide = nn.Linear(144, 36, dtype=torch.float64)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.head = nn.Linear(36, 10, bias=False)
        self.alias = self.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x.to(memory_format=torch.channels_last)).relu().flatten(1)
        x = self.wide(x.double()).float() * self.scale + self.empty.sum()
        return self.alias(self.twice(self.twice(x).relu()))


def batches(steps: int, rows: int = 12) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator(torch.get_default_device()).manual_seed(1)
    return [
        (torch.randn(rows, 1, 8, 8, generator=generator), torch.randint(0, 10, (rows,), generator=generator))
        for _ in range(steps)
    ]


def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x), y)


@check
def equals_one_process_on_the_concatenated_batch() -> None:
    # Adam with a small eps would turn the rounding of gradients near zero into whole steps.
    for make in (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), lambda p: torch.optim.Adam(p, 0.01, eps=1e-3)):
        for bucket_bytes in (1, 4096, 25 << 20):
            reference, model = Net(), Net()
            plain, ours = make(reference.parameters()), make(model.parameters())
            ours = DistributedOptimizer(ours, model.named_parameters(), bucket_bytes=bucket_bytes)
            for x, y in batches(6, rows=60):  # equal parts for up to six ranks
                for net, optimizer, part in ((reference, plain, lambda t: t), (model, ours, shard)):
                    optimizer.zero_grad()
                    loss(net, part(x), part(y)).backward()
                    nn.utils.clip_grad_norm_(net.parameters(), 0.5)
                    optimizer.step()
            assert close(model, reference, 2e-5), bucket_bytes
            assert same_everywhere(model.parameters())
            ours.close()


@check
def tuned_buckets_change_between_steps_and_results_do_not() -> None:
    from ring_plugins.core.gradients import trials

    before = trials._BUCKET_BYTES, trials._DIRECT_BYTES, trials._TURNS, trials._FINAL_TURNS
    trials._BUCKET_BYTES, trials._DIRECT_BYTES, trials._TURNS, trials._FINAL_TURNS = (64, 4096), (128, 20_000), 2, 2
    try:
        for keep in (False, True):  # gradients that stay allocated move from one plan's buckets to the next's
            reference, model = Net(), Net()
            plain = torch.optim.SGD(reference.parameters(), 0.001, momentum=0.9)
            ours = torch.optim.SGD(model.parameters(), 0.001, momentum=0.9)
            ours = DistributedOptimizer(
                ours, model.named_parameters(), autotune=RANK == 0, bucket_bytes=1 << 16, overlap=True
            )
            plans = set()
            for x, y in batches(90):
                for net, optimizer, part in ((reference, plain, lambda t: t), (model, ours, shard)):
                    optimizer.zero_grad(set_to_none=not keep)
                    loss(net, part(x), part(y)).backward()
                    optimizer.step()
                plans.add(ours.averager._sets.sizes)
            assert len(plans) >= (4 if SIZE > 1 else 1), plans
            assert ours.averager._tuner is None
            assert len({str(sizes) for sizes in ring.all_gather_object(ours.averager._sets.sizes)}) == 1
            assert close(model, reference)
            assert same_everywhere(model.parameters())
            ours.close()
    finally:
        trials._BUCKET_BYTES, trials._DIRECT_BYTES, trials._TURNS, trials._FINAL_TURNS = before


@check
def a_switch_between_overlapped_and_synchronous_changes_no_bit() -> None:
    from ring_plugins.core.gradients.trials import Choice

    switched = Choice(False)
    for bucket_bytes in (1, 4096, 25 << 20):
        models = [Net(), Net(), Net()]
        optimizers = [
            DistributedOptimizer(
                torch.optim.SGD(model.parameters(), 0.1, momentum=0.9),
                model.named_parameters(),
                bucket_bytes=bucket_bytes,
                overlap=way,
            )
            for model, way in zip(models, (True, False, False), strict=True)
        ]
        optimizers[2].averager._sets.overlap = switched  # of the buckets that are made once the order is known
        for number, (x, y) in enumerate(batches(8)):
            switched.now = number % 4 == RANK % 4 or number % 3 == 1  # not even the same on all ranks
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                loss(model, shard(x), shard(y)).backward()
                optimizer.step()
        for model in models[1:]:
            pairs = zip(models[0].parameters(), model.parameters(), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs), bucket_bytes
        assert same_everywhere(models[0].parameters())
        for optimizer in optimizers:
            optimizer.close()


@check_among_several
def all_ranks_decide_alike_whether_to_overlap() -> None:
    from ring_plugins.core.gradients import trials

    said: list[str] = []
    info, trials.logger.info = trials.logger.info, said.append
    before, trials._TURNS = trials._TURNS, 1
    chosen = os.environ.pop("RING_OVERLAP", "")
    try:
        reference, model = Net(), Net()
        plain = torch.optim.SGD(reference.parameters(), 0.01)
        ours = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.01), model.named_parameters())
        ways = []
        for x, y in batches(10 + 3 * 8 + 6):  # the longest trial, and some more
            for net, optimizer, part in ((reference, plain, lambda t: t), (model, ours, shard)):
                optimizer.zero_grad()
                loss(net, part(x), part(y)).backward()
                optimizer.step()
            ways.append(ours.averager._buckets.reducer.overlaps)
    finally:
        trials.logger.info, trials._TURNS = info, before
        os.environ["RING_OVERLAP"] = chosen
    assert ring.all_gather_object(ways) == [ways] * SIZE
    assert set(ways) == ({True} if ON_GPUS else {True, False})
    assert len(said) == (RANK == 0 and not ON_GPUS), said
    assert close(model, reference, 2e-5)
    ours.close()


@check
def gradients_are_views_of_the_buckets_laid_out_like_their_parameters() -> None:
    model = Net()
    averager = GradientAverager(model)
    x, y = batches(1)[0]
    loss(model, shard(x), shard(y)).backward()
    if SIZE > 1:
        for parameter, view in zip(averager._buckets.parameters, averager._buckets.views, strict=True):
            assert parameter.grad is view
            assert parameter.grad.stride() == parameter.stride()
    averager.close()


@check
def zeroed_in_place_or_set_to_none_is_the_same() -> None:
    models = [Net(), Net()]
    optimizers = [DistributedOptimizer(torch.optim.SGD(m.parameters(), 0.1), m.named_parameters()) for m in models]
    for x, y in batches(4):
        for model, optimizer, to_none in zip(models, optimizers, (True, False), strict=True):
            optimizer.zero_grad(set_to_none=to_none)
            loss(model, shard(x), shard(y)).backward()
            optimizer.step()
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.detach_()  # as older loops do, of what is not a view for them
    assert all(torch.equal(a, b) for a, b in zip(*(m.parameters() for m in models), strict=True))
    for optimizer in optimizers:
        optimizer.close()


@check
def accumulation_in_three_ways() -> None:
    """Two backwards a step: with no_sync, with backward_passes_per_step, and simply called twice."""
    reference = Net()
    plain = torch.optim.SGD(reference.parameters(), 0.1)
    models = [Net() for _ in range(3)]
    optimizers = [
        DistributedOptimizer(
            torch.optim.SGD(m.parameters(), 0.1), m.named_parameters(), backward_passes_per_step=2 if i == 1 else 1
        )
        for i, m in enumerate(models)
    ]
    data = batches(6)
    for (x1, y1), (x2, y2) in zip(data[::2], data[1::2], strict=True):
        plain.zero_grad()
        (loss(reference, x1, y1) + loss(reference, x2, y2)).backward()
        plain.step()
        for i, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            if i == 0:
                with optimizer.no_sync():
                    loss(model, shard(x1), shard(y1)).backward()
            else:
                loss(model, shard(x1), shard(y1)).backward()
            loss(model, shard(x2), shard(y2)).backward()
            optimizer.step()
    assert all(close(model, reference, 2e-5) for model in models)
    assert all(same_everywhere(model.parameters()) for model in models)
    if SIZE > 1:
        assert [optimizer.averager.steps for optimizer in optimizers] == [3, 3, 6]
    for optimizer in optimizers:
        optimizer.close()


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always, self.sometimes, self.never = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, branch: bool) -> torch.Tensor:
        y = self.always(x)
        return (self.sometimes(y) if branch else y).sum()


@check
def unused_parameters() -> None:
    model = Branches()
    averager = GradientAverager(model, bucket_bytes=64, first_bucket_bytes=64)
    for used_on in (0, SIZE - 1, None):
        model.zero_grad()
        model(torch.full((2, 4), RANK + 1.0), used_on == RANK).backward()
        assert model.never.weight.grad is None
        if used_on is None:
            assert model.sometimes.weight.grad is None
        else:
            x = torch.full((2, 4), used_on + 1.0)
            expected = torch.autograd.grad(model(x, True), model.sometimes.weight)[0] / SIZE
            assert torch.allclose(model.sometimes.weight.grad, expected)
        used = [p.grad for p in model.parameters() if p.grad is not None]
        assert same_everywhere(used)
    averager.close()


class Crossed(nn.Module):
    """Two branches that backward goes through in the order that a rank chose, listed in neither order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.last, self.left, self.first, self.right, self.unused = (nn.Linear(8, 8) for _ in range(5))

    def forward(self, x: torch.Tensor, is_left_first: bool) -> torch.Tensor:
        y = self.first(x)
        for branch in (self.left, self.right) if is_left_first else (self.right, self.left):
            y = y + branch(y).relu()
        return self.last(y)


def buckets_by_name(averager: GradientAverager) -> list[list[str]]:
    averager.prepare()
    buckets = averager._buckets
    return [sorted(buckets.names[i] for i in bucket.entries) for bucket in buckets.plan.buckets]


@check
def buckets_are_made_anew_in_the_order_in_which_rank_0_got_its_gradients() -> None:
    for accumulates, keep in ((False, False), (False, True), (True, True)):
        model = Crossed()
        averager = GradientAverager(model, bucket_bytes=280, first_bucket_bytes=280)  # a layer has 288 bytes
        used = [p for name, p in model.named_parameters() if not name.startswith("unused")]
        made = []
        for step in range(4):
            x = torch.randn(4, 8, generator=torch.Generator(torch.get_default_device()).manual_seed(step * SIZE + RANK))
            local = torch.autograd.grad(model(x, RANK % 2 == 1).square().mean(), used)
            model.zero_grad(set_to_none=not keep)
            parts = 2 if accumulates else 1
            if accumulates:
                with averager.no_sync():  # in another order, which does not count
                    (model(x, RANK % 2 == 0).square().mean() * 0).backward()
                    (model(x, RANK % 2 == 1).square().mean() / 2).backward()
            (model(x, RANK % 2 == 1).square().mean() / parts).backward()
            assert same_everywhere(p.grad for p in used)
            for parameter, mine in zip(used, local, strict=True):
                assert torch.allclose(parameter.grad, ring.all_reduce(mine, ring.AVERAGE), rtol=1e-5, atol=1e-7)
            assert model.unused.weight.grad is None
            made.append(averager._buckets)
            with torch.no_grad():
                for parameter in used:
                    parameter.sub_(0.1 * parameter.grad)
        if SIZE > 1:
            # `left` comes before `right` on rank 0, and `unused`, which no rank has, keeps nothing waiting.
            both = [[f"{name}.bias", f"{name}.weight"] for name in ("last", "left", "right", "first", "unused")]
            assert buckets_by_name(averager) == both, buckets_by_name(averager)
            assert made[0] is not made[1]
            assert made[1] is made[3]
            assert averager._hooks.arrivals is None
        assert same_everywhere(model.parameters())
        averager.close()


@check_among_several
def a_model_whose_gradients_come_in_its_order_keeps_its_buckets() -> None:
    model = Net()
    averager = GradientAverager(model, bucket_bytes=4096)
    made = []
    for x, y in batches(3):
        loss(model, shard(x), shard(y)).backward()
        made.append(averager._buckets)
    assert made[0] is made[2]
    assert averager._hooks.arrivals is None
    assert len(model.head.weight._post_accumulate_grad_hooks) == 1  # none that learns the order
    averager.close()


@check_among_several
def sets_of_parameters_that_take_turns_each_learn_their_order() -> None:
    model = Crossed()
    averager = GradientAverager(model, bucket_bytes=280, first_bucket_bytes=280)
    for step in range(6):
        model.first.requires_grad_(step % 2 == 1)
        model.zero_grad()
        model(torch.full((2, 8), RANK + 1.0), False).square().mean().backward()
        assert same_everywhere(p.grad for p in model.parameters() if p.grad is not None)
        assert averager._buckets.is_ordered or step < 2
    first_names = [names[0] for names in buckets_by_name(averager)]
    assert first_names[:4] == ["last.bias", "left.bias", "right.bias", "first.bias"]
    averager.close()


@check
def a_rank_without_any_backward_takes_part_with_zeros() -> None:
    model = nn.Linear(3, 1, bias=False)
    broadcast_parameters(model)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 1.0), model.named_parameters())
    before = model.weight.detach().clone()
    optimizer.zero_grad()
    if RANK == 0:
        model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert torch.allclose(model.weight, before - 1 / SIZE)
    optimizer.close()


@check
def frozen_unfrozen_and_added_parameters() -> None:
    model = Branches()
    model.never.requires_grad_(False)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
    x = torch.full((2, 4), RANK + 1.0)
    mean = sum(range(1, SIZE + 1)) / SIZE
    model(x, True).backward()
    optimizer.step()
    model.never.requires_grad_(True)
    model.always.requires_grad_(False)
    optimizer.zero_grad()
    model.never(x).sum().backward()
    assert torch.allclose(model.never.weight.grad, torch.full((4, 4), 2 * mean))
    assert model.always.weight.grad is None
    model.extra = nn.Linear(4, 1, bias=False)
    broadcast_parameters(model)
    optimizer.add_param_group({"params": model.extra.parameters()})
    optimizer.zero_grad()
    (model.never(x).sum() + model.extra(x).sum()).backward()
    assert torch.allclose(model.extra.weight.grad, torch.full((1, 4), 2 * mean))
    optimizer.step()
    optimizer.close()
    whole = GradientAverager(model)
    model.later = nn.Linear(4, 1, bias=False)
    model.always.requires_grad_(True)
    (model(x, True) + model.later(x).sum()).backward()
    assert torch.allclose(model.later.weight.grad, torch.full((1, 4), 2 * mean))
    whole.close()


@check
def parts_that_take_turns() -> None:
    """Adversarial training freezes one part, then the other, in every step; plans are kept."""
    model = Branches()
    averager = GradientAverager(model)
    x = torch.full((2, 4), RANK + 1.0)
    mean = sum(range(1, SIZE + 1)) / SIZE
    parts = (model.always, model.sometimes, model.never)
    for _ in range(3):
        for part in parts:
            for other in parts:
                other.requires_grad_(other is part)
            model.zero_grad()
            part(x).sum().backward()
            assert torch.allclose(part.weight.grad, torch.full((4, 4), 2 * mean))
    if SIZE > 1:
        assert len(averager._sets.kept) == 4
        assert averager.steps == 9
    averager.close()


class Words(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(50, 4, sparse=sparse)
        self.head = nn.Linear(4, 2)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(words).mean(1)).square().sum()


@check
def sparse_gradients_gathered_or_densified() -> None:
    generator = torch.Generator(torch.get_default_device()).manual_seed(2)
    steps = [torch.randint(0, 50, (12, 3), generator=generator) for _ in range(4)]
    for sparse in ("gather", "densify"):
        for known in (True, False):
            reference, model = Words(False), Words(True)
            plain = torch.optim.SGD(reference.parameters(), 0.1)
            ours = torch.optim.SGD(model.parameters(), 0.1)
            parameters = model if known else model.named_parameters()
            averager = GradientAverager(parameters, sparse=sparse)
            for words in steps:
                plain.zero_grad()
                (reference(words) / SIZE).backward()
                plain.step()
                ours.zero_grad()
                model(shard(words)).backward()
                if SIZE > 1:
                    assert model.table.weight.grad.is_sparse == (sparse == "gather")
                ours.step()
            assert close(model, reference, 2e-5), (sparse, known)
            assert same_everywhere(model.parameters())
            averager.close()


@check
def embeddings_that_become_sparse_later_or_on_some_ranks_only() -> None:
    """Unused in the first backward; then sparse, dense or nothing by rank and step, in and outside of buckets."""
    for rows in (6, 300_000):  # in its bucket, and where autograd put it
        table = nn.Parameter(torch.zeros(rows, 2))
        head = nn.Parameter(torch.zeros(3))
        averager = GradientAverager([("table", table), ("head", head)])
        indices = torch.tensor([[RANK, 4]])
        plans = (
            ["sdn", "nsd", "ssd", "ddd", "nns", "nnn"] if ON_GPUS else ["nnn", "sdn", "nsd", "ssd", "ddd", "nns", "nnn"]
        )
        for plan in plans:
            table.grad = head.grad = None
            kind, value = plan[RANK], RANK + 1.0
            loss = head.sum() * value
            if kind == "s":
                loss = loss + nn.functional.embedding(indices, table, sparse=True).sum() * value
            elif kind == "d":
                loss = loss + (table[indices] * value).sum()
            loss.backward()
            assert torch.allclose(head.grad, torch.tensor((SIZE + 1) / 2)), plan
            expected = torch.zeros(rows, 2)
            for rank in range(SIZE):
                if plan[rank] != "n":
                    expected[[rank, 4]] += (rank + 1) / SIZE
            if not expected.any():
                assert table.grad is None, plan
            else:
                assert torch.allclose(table.grad.to_dense(), expected), plan
                assert same_everywhere([table.grad])
                assert table.grad.is_sparse or SIZE == 1
        averager.close()


@check
def sparse_gradient_on_one_rank_only() -> None:
    model = Words(True)
    averager = GradientAverager(model)
    if RANK == 0:
        model(torch.tensor([[1, 2]])).backward()
    else:
        model.head(torch.ones(1, 4)).sum().backward()
    gradient = model.table.weight.grad
    assert gradient.is_sparse
    assert gradient._nnz() == 2
    assert same_everywhere([gradient])
    averager.close()


class Boom(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        raise ValueError("boom")


class Fails(torch.autograd.Function):
    """Raises in backward on the last rank."""

    @staticmethod
    def forward(context, x, error):
        context.error = error
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        if context.error is not None and RANK == SIZE - 1:
            raise context.error
        return gradient, None


@check_among_several
def a_backward_that_raised_on_one_rank_and_was_caught_is_an_error_on_all() -> None:
    if ON_GPUS:
        return  # on GPUs it ends the job
    for early in (False, True):  # whether a bucket has left before
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        broadcast_parameters(model)
        optimizer = DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), bucket_bytes=64 if early else 1 << 20
        )
        before = [p.detach().clone() for p in model.parameters()]
        said: list[str] = []
        for step in range(3):
            try:
                optimizer.zero_grad()
                hidden = Fails.apply(
                    model[0](torch.full((1, 4), RANK + 1.0)), ValueError("boom") if step == 0 else None
                )
                model[1](hidden).sum().backward()
                optimizer.step()
            except (RuntimeError, ValueError) as error:
                said.append(str(error))
        if RANK == SIZE - 1:
            assert said.pop(0) == "boom"
        assert len(said) >= 2 and all(f"raised an exception on rank {SIZE - 1}" in text for text in said), said
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        optimizer.close()
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
        assert averages_are_right(model)
        optimizer.close()


@check_among_several
def a_batch_that_fails_before_its_first_gradient_is_left_out_by_its_rank() -> None:
    """The others wait for this rank's next backward, so all step on averages of the same weights' gradients."""
    for passes in (1, 2):
        model, reference = [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)) for _ in range(2)]
        broadcast_parameters(model)
        reference.load_state_dict(model.state_dict())
        optimizer = DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), backward_passes_per_step=passes
        )
        plain = torch.optim.SGD(reference.parameters(), 0.1)
        for step in range(4):
            for attempt in range(2):
                optimizer.zero_grad()
                try:
                    for number in range(passes):
                        out = model(torch.full((1, 4), RANK + step + 1.0))
                        if attempt == 0 and step == 1 and number == passes - 1 and RANK == SIZE - 1:
                            raise MemoryError("no room")
                        out.sum().backward()
                    optimizer.step()
                    break
                except MemoryError:
                    continue
            plain.zero_grad()
            for rank in range(SIZE):
                (reference(torch.full((1, 4), rank + step + 1.0)).sum() * passes / SIZE).backward()
            plain.step()
        assert same_everywhere(model.parameters()), passes
        assert close(model, reference, 1e-5), passes
        optimizer.close()


@check_among_several
def a_scheduler_that_one_rank_stepped_for_a_batch_it_left_out_is_an_error_on_all() -> None:
    """Equal averages, but another learning rate: the weights would differ, and nobody would say so."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    broadcast_parameters(model)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    found, steps = "", 0
    for step in range(6):
        try:
            optimizer.zero_grad()
            if step == 1 and RANK == SIZE - 1:
                raise MemoryError("no room")
            model(torch.full((1, 4), RANK + 1.0)).sum().backward()
            optimizer.step()
            steps += 1
        except MemoryError:
            pass
        except ring.MismatchError as error:
            found = str(error)
            break
        scheduler.step()
    assert re.match(r"the options of parameter group(s| 0) differ among ranks \(ranks? [\d, ]+: lr=0", found), found
    if optimizer.averager._streams is None:  # a GPU tells a step later, and only of this rank
        assert "lr=0.05, momentum=0, weight_decay=0" in found and f"rank {SIZE - 1}: lr=0.025" in found, found
        assert steps == 1
        assert same_everywhere(model.parameters())
        found = ""
        for group in optimizer.param_groups:
            group["lr"] = 0.1
        optimizer.zero_grad()
        model(torch.ones(1, 4)).sum().backward()  # equal again
        optimizer.step()
        assert same_everywhere(model.parameters())
    optimizer.close()


@check_among_several
def an_update_that_one_rank_left_out_is_an_error_on_all() -> None:
    """As a script does that looks at its own loss after backward."""
    if ON_GPUS:
        return  # a GPU tells a step later, and only of this rank
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    broadcast_parameters(model)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
    found, steps = "", 0
    for step in range(4):
        optimizer.zero_grad()
        loss = model(torch.full((1, 4), RANK + 1.0)).sum()
        try:
            loss.backward()
        except ring.MismatchError as error:
            found = str(error)
            break
        steps += 1
        if (step, RANK) != (1, SIZE - 1):
            optimizer.step()
    assert f"different numbers of updates with averaged gradients (rank{'s' * (SIZE > 2)} 0" in found, found
    assert f"rank {SIZE - 1}: 1), so their weights differ" in found and steps == 2, found
    broadcast_parameters(model)
    optimizer.zero_grad()
    model(torch.ones(1, 4)).sum().backward()  # equal again
    optimizer.step()
    assert same_everywhere(model.parameters())
    optimizer.close()


@check
def a_step_that_one_rank_cannot_compute_is_skipped_by_all() -> None:
    """In forward, in backward, before and after buckets have left, in the first of two passes, large gradients."""
    for where in ("forward", "first layer", "last layer", "accumulating", "no_sync"):
        model, reference = [nn.Sequential(*[nn.Linear(600, 600) for _ in range(3)]) for _ in range(2)]
        broadcast_parameters(model)
        reference.load_state_dict(model.state_dict())
        passes = 2 if where == "accumulating" else 1
        optimizer = DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 0.1),
            model.named_parameters(),
            bucket_bytes=1 << 20,
            backward_passes_per_step=passes,
        )
        plain = torch.optim.SGD(reference.parameters(), 0.1)
        scaler = torch.amp.GradScaler(torch.get_default_device().type, init_scale=8.0)
        skipped, after = [], 0
        for step in range(5):
            fails = MemoryError("no room") if step in (1, 2) else None
            x = torch.full((1, 600), (RANK + 1.0) / 600)
            with optimizer.skip_step_on(MemoryError, ValueError) as outcome:
                optimizer.zero_grad()
                if fails and where == "forward" and RANK == SIZE - 1:
                    raise fails
                for _ in range(passes):
                    with optimizer.no_sync() if where == "no_sync" else contextlib.nullcontext():
                        hidden = Fails.apply(model[0](x), fails if where != "last layer" else None)
                        hidden = Fails.apply(model[1](hidden), fails if where == "last layer" else None)
                        scaler.scale(model[2](hidden).mean()).backward()
                if where == "no_sync":
                    scaler.scale(model(x).mean()).backward()
                scaler.step(optimizer)
                scaler.update()
                after += 1
            skipped.append(outcome.skipped)
            if outcome.skipped:
                assert f"rank {SIZE - 1}: MemoryError: no room" in outcome.reason or SIZE == 1
                assert all(p.grad is None for p in model.parameters())
            else:
                plain.zero_grad()
                times = 2 if where in ("accumulating", "no_sync") else 1
                for rank in range(SIZE):
                    (reference(torch.full((1, 600), (rank + 1.0) / 600)).mean() * times / SIZE).backward()
                plain.step()
        assert skipped == [False, True, True, False, False], (where, skipped)
        assert after == 3
        assert optimizer.averager.skipped_steps == 2
        assert close(model, reference, 2e-5), where
        assert same_everywhere(model.parameters())
        optimizer.close()


@check_among_several
def what_a_skippable_step_does_not_catch() -> None:
    model = nn.Linear(2, 1)
    averager = GradientAverager(model)
    with averager.no_sync():
        try:
            averager.skip_step_on(ValueError).__enter__()
        except ring.ArgumentError as error:
            assert "inside no_sync()" in str(error)
        else:
            raise AssertionError("skip_step_on() was accepted inside no_sync()")
    for late in (True, False):  # after the averages, and of another kind
        try:
            with averager.skip_step_on(ValueError):
                if late:
                    model(torch.ones(1, 2)).sum().backward()
                raise ValueError("later") if late else KeyError("other")
        except (ValueError, KeyError):
            continue
        raise AssertionError("an exception that must not be skipped was")
    try:
        with averager.skip_step_on(ValueError):
            pass
    except ring.RingError as error:
        assert "without averaging" in str(error)
    else:
        raise AssertionError("a block without a step was accepted")
    assert averages_are_right(model)
    averager.close()


@check
def a_clean_step_after_an_exception_in_backward() -> None:
    for in_place in (False, True):
        reference, model = Net(), Net()
        plain = torch.optim.SGD(reference.parameters(), 0.1)
        optimizer = DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), bucket_bytes=64
        )
        for i, (x, y) in enumerate(batches(4)):
            plain.zero_grad()
            loss(reference, x, y).backward()
            plain.step()
            if i % 2:
                optimizer.zero_grad(set_to_none=not in_place)
                try:
                    hidden = model.wide(torch.ones(1, 144).double()).float()
                    model.head(model.twice(Boom.apply(hidden))).sum().backward()
                except ValueError:
                    gc.collect()
                else:
                    raise AssertionError("nothing was raised inside backward")
            optimizer.zero_grad(set_to_none=not in_place)
            loss(model, shard(x), shard(y)).backward()
            optimizer.step()
        assert close(model, reference, 2e-5), in_place
        assert same_everywhere(model.parameters())
        optimizer.close()


def averages_are_right(model: nn.Module, factor: float = 1.0) -> bool:
    """Whether a backward with gradients of 1 on rank 0, 2 on rank 1 and so on leaves their averages."""
    model.zero_grad()
    (sum(p.sum() for p in model.parameters()) * ((RANK + 1) * factor)).backward()
    return all(torch.allclose(p.grad, torch.tensor((SIZE + 1) / 2 * factor)) for p in model.parameters())


@check
def a_newer_averager_takes_over_from_one_that_is_gone() -> None:
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
    gone = weakref.ref(optimizer.averager)
    gc.disable()  # what is in no cycle goes with its last reference
    try:
        for phase in range(3):
            # The older one is still referenced while the newer one is made.
            optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
            assert gone() is None
            gone = weakref.ref(optimizer.averager)
            for step in range(5):
                assert averages_are_right(model, phase + step + 1), (phase, step)
    finally:
        gc.enable()
    optimizer.close()


@check_among_several
def an_older_averager_may_wait_for_the_garbage_collector_on_some_ranks() -> None:
    model = nn.Linear(8, 8)
    for make in (lambda: GradientAverager(model), lambda: GradientAverager(model.named_parameters())):
        older = make()
        assert averages_are_right(model)
        gc.disable()
        try:
            if RANK == SIZE - 1:
                cycle = [older]
                cycle.append(cycle)
                del cycle
            del older
            newer = make()
            assert all(averages_are_right(model, step) for step in (1, 2, 3))
        finally:
            gc.enable()
        newer.close()


@check_among_several
def two_averagers_in_use_on_one_parameter_are_rejected_and_named() -> None:
    trunk, heads = nn.Linear(4, 4), [nn.Linear(4, 2) for _ in range(2)]
    makers = [lambda head=head: GradientAverager(nn.Sequential(trunk, head)) for head in heads]
    older, newer = [make() for make in makers]
    names = [older.communicator.name, newer.communicator.name]
    assert names[0] != names[1] and len({str(n) for n in ring.all_gather_object(names)}) == 1
    for use in (newer.prepare, older.prepare, lambda: heads[1](trunk(torch.ones(1, 4))).sum().backward()):
        try:
            use()
        except ring.RingError as error:
            assert all(name in str(error) for name in names), error
            assert "both average 0.weight and 1 more parameter " in str(error), error
        else:
            raise AssertionError("two averagers of one parameter were not rejected")
    older.close()
    trunk.zero_grad()
    heads[1](trunk(torch.full((1, 4), RANK + 1.0))).sum().backward()
    assert same_everywhere([p.grad for p in (*trunk.parameters(), *heads[1].parameters())])
    newer.close()


def held_by_this_process() -> list[int]:
    """Threads, open files, and mappings of shared memory."""
    with open("/proc/self/maps") as maps:
        return [threading.active_count(), len(os.listdir("/proc/self/fd")), sum("memfd:" in line for line in maps)]


@check_among_several
def averagers_that_were_dropped_leave_nothing_behind() -> None:
    before: list[int] = []
    trials = 40 if os.environ.get("TEST_ONLY") else 200
    for trial in range(trials):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
        if trial % 4 == RANK % 4:  # a learning rate schedule puts the optimizer into a cycle
            torch.optim.lr_scheduler.StepLR(optimizer, 1)
        model(torch.full((1, 4), RANK + 1.0)).sum().backward()
        optimizer.step()
        assert same_everywhere([p.grad for p in model.parameters()])
        if trial in (9, trials - 1):
            alive = weakref.ref(optimizer.averager)
            del optimizer, model
            gc.collect()
            assert alive() is None
            ring.barrier()
            before = before or held_by_this_process()
    for _ in range(600):  # a thread ends a moment after its averager
        if all(now <= then for now, then in zip(held_by_this_process(), before, strict=True)):
            return
        threading.Event().wait(0.1)
    raise AssertionError(f"{held_by_this_process()} threads, files and mappings, {before} before")


def train_a_little(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> str:
    """Train by an optimizer, or by hand; returns the text of the error if there is one of ours."""
    try:
        for _ in range(2):
            model.zero_grad()
            model(torch.full((1, 4), RANK + 1.0)).sum().backward()
            for p in () if optimizer else model.parameters():
                p.data -= 0.1 * p.grad
            if optimizer:
                optimizer.step()
    except ring.RingError as error:
        return str(error)
    return ""


@check_among_several
def training_on_without_the_averager_is_rejected() -> None:
    for wraps in (True, False):
        for by_hand in (True, False):
            model = small_model()
            inner = torch.optim.SGD(model.parameters(), 0.1)
            keeper = DistributedOptimizer(inner) if wraps else GradientAverager(model)
            assert not train_a_little(model, keeper if wraps else inner)
            assert same_everywhere(model.parameters())
            del keeper
            text = train_a_little(model, None if by_hand else inner)
            assert "nothing refers to it any more" in text, (wraps, by_hand, text)


@check_among_several
def averagers_that_end_as_they_should_say_nothing() -> None:
    model = small_model()
    inner = torch.optim.SGD(model.parameters(), 0.1)
    averager = GradientAverager(model)
    train_a_little(model, inner)
    del averager  # between two runs
    for _ in range(2):  # a script may look at gradients
        model(torch.ones(1, 4)).sum().backward()
    newer = DistributedOptimizer(inner)
    newer.itself = newer  # garbage, when the next one is made
    assert not train_a_little(model, newer)
    newer = DistributedOptimizer(inner)
    assert not train_a_little(model, newer)
    assert same_everywhere(model.parameters())
    newer.close()
    del newer
    gc.collect()
    assert not train_a_little(model, inner)  # each rank alone


@check_among_several
def averagers_used_in_another_order_on_each_rank_end_together() -> None:
    models = [Branches(), Branches()]
    averagers = [GradientAverager(model) for model in models]
    order = models if RANK == 0 else models[::-1]
    for _ in range(3):
        x = torch.full((2, 4), RANK + 1.0)
        for model in order:
            model.zero_grad()
            x = model.always(x)
        x.sum().backward()
    for model, averager in zip(models, averagers, strict=True):
        assert same_everywhere([model.always.weight.grad])
        assert averager.steps == 3
        averager.close()


@check_among_several
def averagers_of_which_ranks_use_some_first_end_together() -> None:
    """The first backward of rank 0 has gradients of both, that of the others of the second one only."""
    if ON_GPUS:
        return  # NCCL's kernels run in the order of one stream
    models = [Branches(), Branches()]
    averagers = [GradientAverager(model) for model in models]
    x = torch.full((2, 4), RANK + 1.0)
    for step in range(4):
        for model in models:
            model.zero_grad()
        if RANK == 0:
            (models[0].always(x).sum() + models[1].always(x).sum()).backward()
        else:
            for model in models[::-1]:
                model.always(x).sum().backward()
        for model, averager in zip(models, averagers, strict=True):
            assert same_everywhere([model.always.weight.grad])
            assert averager.steps == step + 1
    for averager in averagers:
        averager.close()


class Table(nn.Module):
    """A sparse embedding before a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.layer = nn.Embedding(5, 4, sparse=True), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.rows(torch.tensor([RANK, 3])) + x)


@check_among_several
def sparse_gradients_and_tuning_do_not_wait_for_the_order_of_averagers() -> None:
    """Rank 0 uses them in another order than the others, in one backward or in two."""
    if ON_GPUS:
        return  # NCCL's kernels run in the order of one stream
    models = [Table(), Table()]
    for model in models:
        broadcast_parameters(model)
    averagers = [GradientAverager(model, autotune=True) for model in models]
    for step in range(12):  # more than the tuner's warm-up
        for model in models:
            model.zero_grad()
        x = torch.full((2, 4), RANK + 1.0)
        if RANK == 0:
            (models[0](x).sum() + models[1](x).sum()).backward()
        elif step % 2:
            models[0](models[1](x)).sum().backward()
        else:
            for model in models[::-1]:
                model(x).sum().backward()
        for model, averager in zip(models, averagers, strict=True):
            gradient = model.rows.weight.grad
            assert gradient.is_sparse
            assert gradient.coalesce().indices().tolist() == [sorted({*range(SIZE), 3})]
            assert same_everywhere([gradient, model.layer.weight.grad])
            assert averager.steps == step + 1
            assert averager._tuner is None
    for averager in averagers:
        averager.close()


@check
def retained_graphs_and_second_order() -> None:
    model = nn.Linear(3, 3, bias=False)
    broadcast_parameters(model)
    averager = GradientAverager(model)
    out = (model(torch.full((1, 3), RANK + 1.0)) ** 2).sum()
    out.backward(retain_graph=True)
    once = model.weight.grad.clone()
    out.backward()
    assert torch.allclose(model.weight.grad, 2 * once, rtol=1e-5)
    model.zero_grad()
    out = (model(torch.full((1, 3), RANK + 1.0)) ** 2).sum()
    out.backward(create_graph=True)
    assert torch.allclose(model.weight.grad, once, rtol=1e-5)
    assert same_everywhere([model.weight.grad])
    averager.close()


@check
def checkpointed_layers() -> None:
    from torch.utils.checkpoint import checkpoint

    for reentrant in (False, True):
        model = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        broadcast_parameters(model)
        averager = GradientAverager(model, bucket_bytes=64, first_bucket_bytes=64)
        x = torch.full((2, 4), RANK + 1.0, requires_grad=True)
        y = x
        for layer in model:
            y = checkpoint(layer, y, use_reentrant=reentrant)
        y.square().sum().backward()
        reference = []
        for rank in range(SIZE):
            z = torch.full((2, 4), rank + 1.0)
            for layer in model:
                z = layer(z)
            reference.append(torch.autograd.grad(z.square().sum(), list(model.parameters())))
        for parameter, *gradients in zip(model.parameters(), *reference, strict=True):
            assert torch.allclose(parameter.grad, sum(gradients) / SIZE, rtol=1e-4, atol=1e-5), reentrant
        assert averager.steps == (1 if SIZE > 1 else 0), reentrant
        averager.close()


@check
def a_layer_that_several_reentrant_segments_share() -> None:
    from torch.utils.checkpoint import checkpoint

    model, outer = nn.Linear(4, 4), nn.Linear(4, 4)
    broadcast_parameters(model)
    broadcast_parameters(outer)
    averager = GradientAverager(nn.ModuleList([model, outer]), bucket_bytes=64, first_bucket_bytes=64)

    def twice(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(model, checkpoint(model, x, use_reentrant=True), use_reentrant=True)

    for step in range(3):
        averager.prepare()
        for parameter in (*model.parameters(), *outer.parameters()):
            parameter.grad = None
        x = torch.full((2, 4), RANK + 1.0, requires_grad=True)
        checkpoint(twice, model(outer(x)), use_reentrant=True).square().sum().backward()
        z = [model(model(model(outer(torch.full((2, 4), rank + 1.0))))).square().sum() / SIZE for rank in range(SIZE)]
        for parameter, gradient in zip(
            [*model.parameters(), *outer.parameters()],
            torch.autograd.grad(sum(z), [*model.parameters(), *outer.parameters()]),
            strict=True,
        ):
            assert torch.allclose(parameter.grad, gradient, rtol=1e-4, atol=1e-5)
        assert averager.steps == (step + 1 if SIZE > 1 else 0)
    averager.close()


@check
def compiled_model() -> None:
    reference, model = Net(), Net()
    plain = torch.optim.SGD(reference.parameters(), 0.1)
    optimizer = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), bucket_bytes=256
    )
    compiled = torch.compile(model, backend="aot_eager")
    for x, y in batches(3):
        plain.zero_grad()
        loss(reference, x, y).backward()
        plain.step()
        optimizer.zero_grad()
        loss(compiled, shard(x), shard(y)).backward()
        optimizer.step()
    assert close(model, reference, 2e-5)
    assert same_everywhere(model.parameters())
    optimizer.close()


@check_among_several
def a_compiled_step_with_backward_and_collectives_inside() -> None:
    reference, model = Net(), Net()
    plain = torch.optim.SGD(reference.parameters(), 0.1)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())

    @torch.compile(backend="eager")  # Dynamo looks at every frame below, whatever it would then compile it to
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(model, x, y)
        value.backward()
        optimizer.step()
        return ring.all_reduce(value.detach()) * len(ring.all_gather_object("a rank")) / SIZE

    for x, y in batches(3):
        plain.zero_grad()
        expected = loss(reference, x, y)
        expected.backward()
        plain.step()
        assert torch.allclose(step(shard(x), shard(y)), expected.detach(), atol=1e-5)
    assert close(model, reference, 2e-5)
    assert same_everywhere(model.parameters())
    optimizer.close()


@check
def bfloat16_model() -> None:
    model = nn.Linear(8, 8).to(torch.bfloat16)
    broadcast_parameters(model)
    averager = GradientAverager(model)
    x = torch.full((2, 8), RANK + 1.0, dtype=torch.bfloat16)
    model(x).sum().backward()
    assert torch.allclose(model.weight.grad.float(), torch.full((8, 8), sum(range(1, SIZE + 1)) * 2 / SIZE), rtol=1e-2)
    assert same_everywhere(p.grad for p in model.parameters())
    averager.close()


@check
def scaler_skips_on_all_ranks_when_one_overflows() -> None:
    model = nn.Linear(2, 1, bias=False)
    broadcast_parameters(model)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
    scaler = torch.amp.GradScaler(torch.get_default_device().type, init_scale=1024.0)
    before = model.weight.detach().clone()
    optimizer.zero_grad()
    scaler.scale(model(torch.full((1, 2), float("inf") if RANK == SIZE - 1 else 1.0)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(model.weight, before)
    assert scaler.get_scale() == 512.0
    optimizer.close()


@check
def a_scaler_sees_averages_of_gradients_that_no_backward_averaged() -> None:
    for where in ("passes", "no_sync", "unscale", "plain", "fused"):
        torch.manual_seed(0)
        model = nn.Linear(2, 1, bias=False)
        inner = torch.optim.SGD(model.parameters(), 0.1, fused=where == "fused")
        optimizer, averager = inner, None
        if where == "plain":
            averager = GradientAverager(model, passes_per_step=2)
        else:
            passes = 1 if where == "no_sync" else 2
            optimizer = DistributedOptimizer(inner, model.named_parameters(), backward_passes_per_step=passes)
        scaler = torch.amp.GradScaler(torch.get_default_device().type, init_scale=1024.0)
        before, scales = model.weight.detach().clone(), []
        for overflows in (True, False):
            model.zero_grad()
            x = torch.full((1, 2), float("inf") if overflows and RANK == SIZE - 1 else 1.0 + RANK)
            with optimizer.no_sync() if where == "no_sync" else contextlib.nullcontext():
                scaler.scale(model(x).sum()).backward()
            if where == "unscale":
                scaler.unscale_(optimizer)
                assert overflows or torch.allclose(model.weight.grad, torch.full((1, 2), (1 + SIZE) / 2))
                torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        assert scales == [512.0, 512.0], (where, scales)
        assert torch.allclose(model.weight, before - 0.1 * (1 + SIZE) / 2), where
        assert same_everywhere(model.parameters()), where
        (averager or optimizer).close()


@check
def optimizer_looks_like_the_one_it_wraps() -> None:
    model = nn.Linear(2, 1)
    inner = torch.optim.Adam(model.parameters(), 0.1)
    optimizer = DistributedOptimizer(inner, model.named_parameters())
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is inner.param_groups
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    scheduler.step()
    assert inner.param_groups[0]["lr"] == 0.05
    optimizer.load_state_dict(optimizer.state_dict())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        out = model(torch.full((1, 2), RANK + 1.0)).square().sum()
        out.backward()
        return out

    assert optimizer.step(closure) > 0
    assert same_everywhere(model.parameters())
    optimizer.close()
    try:
        DistributedOptimizer(inner, [("only", model.weight)])
    except ring.ArgumentError as error:
        assert "named_parameters lacks 1" in str(error)
    else:
        raise AssertionError("a missing parameter was not rejected")


@check
def lbfgs_decides_by_the_loss_of_all_ranks() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(12, 5, dtype=torch.float64), torch.randn(12, 1, dtype=torch.float64)

    def network() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).double()

    def train(model: nn.Module, optimizer, part, loss_type=lambda value: value) -> list[float]:
        losses = []

        def closure():
            optimizer.zero_grad()
            value = nn.functional.mse_loss(model(part(x)), part(y))
            value.backward()
            losses.append(0.0)
            return loss_type(value)

        losses += [float(optimizer.step(closure)) for _ in range(3)]
        return losses

    for loss_type in (lambda value: value, float):
        reference, model = network(), network()
        inner = [
            torch.optim.LBFGS(m.parameters(), max_iter=6, line_search_fn="strong_wolfe") for m in (reference, model)
        ]
        optimizer = DistributedOptimizer(inner[1], model.named_parameters())
        expected = train(reference, inner[0], lambda t: t)
        losses = train(model, optimizer, shard, loss_type)
        assert len(losses) == len(expected)  # as many evaluations
        assert torch.allclose(torch.tensor(losses), torch.tensor(expected)), (losses, expected)
        assert close(model, reference)
        assert same_everywhere(model.parameters())
        optimizer.close()


@check_among_several
def a_loss_that_only_some_ranks_return_is_rejected() -> None:
    model = nn.Linear(2, 1)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
    for returns, text in (("one" if RANK else None, "loss on rank"), ("two", "a loss of shape (2,)")):
        try:
            optimizer.step(lambda returns=returns: {None: None, "one": torch.ones(()), "two": torch.ones(2)}[returns])
        except ring.RingError as error:
            assert text in str(error)
        else:
            raise AssertionError("not rejected")
    assert optimizer.step(lambda: None) is None
    assert optimizer.step(lambda: torch.full((1,), float(RANK))) == (SIZE - 1) / 2
    optimizer.close()


@check
def broadcast_of_parameters_and_optimizer_state() -> None:
    model = Net(seed=RANK)
    optimizer = torch.optim.Adam(model.parameters(), 0.1 * (RANK + 1))
    if RANK == 0:
        x, y = batches(1)[0]
        loss(model, x, y).backward()
        optimizer.step()
    broadcast_parameters(model)
    broadcast_optimizer_state(optimizer)
    assert same_everywhere(model.parameters())
    assert optimizer.param_groups[0]["lr"] == 0.1
    states = [optimizer.state[p]["exp_avg"] for p in model.parameters() if p in optimizer.state]
    assert len(states) == len(list(model.parameters()))
    assert same_everywhere(states)
    if SIZE > 1:
        try:
            broadcast_parameters(nn.Linear(2, 2 + RANK))
        except ring.MismatchError as error:
            assert "number 0" in str(error)
        else:
            raise AssertionError("different models were not rejected")
        try:  # "meta" stands for a GPU
            broadcast_parameters({"moved": torch.ones(2, device="meta" if RANK else "cpu")})
        except ring.MismatchError as error:
            assert "('moved', 'torch.float32', (2,), 'cpu'), rank 1 has ('moved'" in str(error) and "'meta'" in str(
                error
            )
        else:
            raise AssertionError("models on different kinds of devices were not rejected")


@check
def broadcast_of_a_fused_optimizer_state_keeps_its_order_in_memory() -> None:
    torch.manual_seed(RANK)
    model = nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(model.parameters(), 0.01, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.linspace(-1, 1, 512).reshape(2, 4, 8, 8)).square().mean().backward()
        optimizer.step()

    if RANK == 0:
        step()
    broadcast_parameters(model)
    broadcast_optimizer_state(optimizer)
    assert optimizer.state[model.weight]["exp_avg"].stride() == model.weight.stride() == (36, 1, 12, 4)
    step()
    assert same_everywhere(model.parameters())


@check_among_several
def different_models_are_rejected_by_name() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 5 if RANK == SIZE - 1 else 4))
    try:
        GradientAverager(model)
    except ring.MismatchError as error:
        assert "1.weight" in str(error), error
        assert f"rank {SIZE - 1}" in str(error), error
    else:
        raise AssertionError("different models were not rejected")


@check
def large_gradients_stay_where_autograd_put_them() -> None:
    """Gradients from DIRECT_BYTES on are not copied; this includes unused ones, other layouts and types."""

    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.conv = nn.Conv2d(512, 128, 3).to(memory_format=torch.channels_last)
            self.wide = nn.Linear(600, 1000)
            self.lower = nn.Linear(1000, 1024, dtype=torch.bfloat16)
            self.maybe = nn.Linear(600, 700)
            self.never = nn.Linear(600, 800)

        def forward(self, x: torch.Tensor, maybe: bool) -> torch.Tensor:
            y = self.conv(x[:, : 512 * 9].reshape(-1, 512, 3, 3)).sum() + self.wide(x[:, :600]).square().sum()
            y = y + self.lower(self.wide(x[:, :600]).bfloat16()).float().sum()
            return y + (self.maybe(x[:, :600]).sum() if maybe else 0)

    reference, model = Large(), Large()
    averager = GradientAverager(model)
    inputs = [
        torch.randn(2, 512 * 9, generator=torch.Generator(torch.get_default_device()).manual_seed(rank))
        for rank in range(SIZE)
    ]
    for last_has_it in (True, False):
        for to_none in (True, False):
            reference.zero_grad()
            for rank in range(SIZE):
                reference(inputs[rank], last_has_it and rank == SIZE - 1).backward()
            for parameter in reference.parameters():
                if parameter.grad is not None:
                    parameter.grad /= SIZE
            model.zero_grad(set_to_none=to_none or last_has_it)
            model(inputs[RANK], last_has_it and RANK == SIZE - 1).backward()
            assert model.never.weight.grad is None
            for (name, a), b in zip(model.named_parameters(), reference.parameters(), strict=True):
                if a.grad is None or b.grad is None:
                    assert b.grad is None or not b.grad.any(), name
                    assert a.grad is None or not a.grad.any(), name
                    continue
                tolerance = 5e-2 if a.dtype == torch.bfloat16 else 1e-4
                assert torch.allclose(a.grad, b.grad, rtol=tolerance, atol=tolerance), name
                assert a.grad.stride() == a.stride()
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    assert same_everywhere([parameter.grad]), (name, last_has_it, to_none)
    averager.close()


@check
def gradients_that_share_memory_or_are_conjugated_lazily() -> None:
    """A gradient that autograd still reads, or returns as a view, is not averaged in place."""

    class Sharing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Parameter(torch.ones(1024, 1024))
            self.spectrum = nn.Parameter(torch.ones(512, 512, dtype=torch.complex64))
            self.second = nn.Parameter(torch.ones(1024, 1024))
            self.third = nn.Parameter(torch.ones(1024, 1024))

        def forward(self, factor: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            x = (self.first * factor).view(-1).clone() + self.second.view(-1) + self.third.view(-1)
            return (x * weight).sum() + (torch.conj(self.spectrum) * (weight[0] * (1 + 1j))).real.sum()

    model = Sharing()
    averager = GradientAverager(model)
    weights, factors = [1.0 + rank for rank in range(SIZE)], [1.0 + 10 * rank for rank in range(SIZE)]
    for _ in range(3):
        model.zero_grad()
        model(torch.full((1024, 1024), factors[RANK]), torch.full((1024 * 1024,), weights[RANK])).backward()
        weight, product = sum(weights) / SIZE, sum(w * f for w, f in zip(weights, factors, strict=True)) / SIZE
        assert torch.allclose(model.first.grad, torch.tensor(product))
        assert torch.allclose(model.second.grad, torch.tensor(weight))
        assert torch.allclose(model.third.grad, torch.tensor(weight))
        assert torch.allclose(model.spectrum.grad.resolve_conj(), torch.tensor(weight * (1 + 1j)))
    averager.close()


@check
def a_parameter_listed_twice_counts_once() -> None:
    model, other = nn.Linear(10, 10), nn.Linear(10, 10)
    named = [*model.named_parameters(), *other.named_parameters(), ("again", model.weight)]
    averager = GradientAverager(named, bucket_bytes=1, first_bucket_bytes=1)
    for _ in range(3):
        for _, parameter in named:
            parameter.grad = None
        (model(torch.full((1, 10), RANK + 1.0)) + other(torch.ones(1, 10))).sum().backward()
        assert torch.equal(model.weight.grad, torch.full((10, 10), (SIZE + 1) / 2))
        assert torch.equal(other.weight.grad, torch.ones(10, 10))
    averager.close()


def in_one_process(name: str, xs: list[torch.Tensor]) -> list[torch.Tensor]:
    """What each rank gets from a collective, computed from all ranks' tensors."""
    if name in ("all_reduce SUM", "all_reduce AVERAGE"):
        total = torch.stack(xs).sum(0) / (SIZE if "AVERAGE" in name else 1)
        return [total] * SIZE
    if name == "all_gather":
        return [torch.cat(xs)] * SIZE
    if name in ("reduce_scatter SUM", "reduce_scatter AVERAGE"):
        return list(in_one_process(name.replace("reduce_scatter", "all_reduce"), xs)[0].tensor_split(SIZE))
    if name == "broadcast":
        return [xs[SIZE - 1] + sum(x * 0 for x in xs)] * SIZE
    splits = [[sender + 1] * (SIZE - 1) + [len(x) - (SIZE - 1) * (sender + 1)] for sender, x in enumerate(xs)]
    return [
        torch.cat([x.split(parts)[receiver] for x, parts in zip(xs, splits, strict=True)]) for receiver in range(SIZE)
    ]


@check
def differentiable_collectives_against_one_process() -> None:
    """First and second derivatives of the sum of all ranks' losses."""
    from ring_plugins import torch as ours

    collectives = {
        "all_reduce SUM": lambda x: ours.all_reduce(x, ring.SUM),
        "all_reduce AVERAGE": ours.all_reduce,
        "all_gather": ours.all_gather,
        "reduce_scatter SUM": lambda x: ours.reduce_scatter(x, ring.SUM),
        "reduce_scatter AVERAGE": ours.reduce_scatter,
        "broadcast": lambda x: ours.broadcast(x, SIZE - 1),
        "all_to_all": lambda x: ours.all_to_all(x, [RANK + 1] * (SIZE - 1) + [len(x) - (SIZE - 1) * (RANK + 1)]),
    }
    for dtype in (torch.float64, torch.complex128):
        for name, collective in collectives.items():
            torch.manual_seed(3)
            rows = [13 + 2 * rank if name in ("all_gather", "all_to_all") else 13 for rank in range(SIZE)]
            xs = [torch.randn(count, 2, dtype=dtype).requires_grad_() for count in rows]
            directions = [torch.randn_like(x) for x in xs]
            weights = [torch.randn_like(y) for y in in_one_process(name, xs)]

            def loss_of(y: torch.Tensor, rank: int, weights=weights) -> torch.Tensor:
                return ((y * y * y) * weights[rank]).sum().abs() * (rank + 1)

            expected_results = in_one_process(name, xs)
            total = sum(loss_of(y, rank) for rank, y in enumerate(expected_results))
            firsts = torch.autograd.grad(total, xs, create_graph=True)
            sloped = sum((g * d).sum().abs() for g, d in zip(firsts, directions, strict=True))
            seconds = torch.autograd.grad(sloped, xs)

            x = xs[RANK].detach().clone().requires_grad_()
            result = collective(x)
            assert torch.allclose(result, expected_results[RANK]), name
            (first,) = torch.autograd.grad(loss_of(result, RANK), x, create_graph=True)
            assert torch.allclose(first, firsts[RANK]), (name, dtype)
            (second,) = torch.autograd.grad((first * directions[RANK]).sum().abs(), x)
            assert torch.allclose(second, seconds[RANK]), (name, dtype)


@check
def differentiable_collectives_keep_their_order_among_independent_nodes() -> None:
    """Ranks use the results in different orders and through graphs of different depths."""
    from ring_plugins import torch as ours

    x = torch.ones(3, requires_grad=True)
    for _ in range(3):
        results = [ours.all_reduce(x * (i + 1), ring.SUM) for i in range(6)]
        terms = [(i + 1) * y.sum() for i, y in enumerate(results)]
        order = range(6) if RANK % 2 else reversed(range(6))
        total = torch.zeros(())
        for i in order:
            term = terms[i]
            for _ in range((i * (RANK + 1)) % 4):
                term = term * 1.0
            total = total + term
        x.grad = None
        total.backward()
        assert torch.equal(x.grad, torch.full((3,), SIZE * sum((i + 1.0) ** 2 for i in range(6))))


@check_among_several
def different_results_used_by_the_ranks_are_rejected() -> None:
    from ring_plugins import torch as ours

    x = torch.ones(3, requires_grad=True)
    results = [ours.all_reduce(x), ours.all_reduce(x)]
    try:
        results[1 if RANK else 0].sum().backward()
    except ring.MismatchError as error:
        assert "in the backward of different collectives" in str(error) and "multiplied by zero" in str(error), error
    else:
        raise AssertionError("a gradient of another result")
    constant = ours.all_reduce(torch.ones(2) if RANK else torch.ones(2, requires_grad=True), ring.SUM)
    constant.sum().backward()  # on all ranks, though x requires a gradient on one only


@check
def tensors_that_require_a_gradient_are_rejected_where_it_would_be_lost() -> None:
    class Mine(torch.Tensor):
        pass

    from ring_plugins import torch as ours

    x = torch.ones(2 * SIZE, requires_grad=True)
    calls = [ring.all_reduce, ring.broadcast, ring.all_gather, ring.reduce_scatter, ring.all_to_all]
    for call in calls:
        for tensor in (x, torch.nn.Parameter(torch.ones(2 * SIZE)), x.as_subclass(Mine), x * 2):
            try:
                call(tensor)
            except ring.ArgumentError as error:
                assert f"or call ring_plugins.torch.{call.__name__}, which passes gradients" in str(error), error
            else:
                raise AssertionError(f"{call.__name__} lost a gradient")
        with torch.no_grad():
            assert not call(x).requires_grad
        assert not call(x.detach()).requires_grad
    for wrong in (lambda: ours.all_reduce(x, ring.MAX), lambda: ours.all_reduce(torch.ones(2, dtype=torch.int64))):
        try:
            wrong()
        except ring.ArgumentError:
            continue
        raise AssertionError("not rejected")


@check_on_gpus
def functions_on_tensors_of_gpus() -> None:
    from ring_plugins.torch import functions

    x = torch.arange(6.0).view(2, 3) + RANK
    middle = torch.arange(6.0).view(2, 3) + (SIZE - 1) / 2
    assert torch.equal(functions.all_reduce(x, ring.AVERAGE, None, True), middle)
    work = functions.all_reduce(x, ring.AVERAGE, None, False)
    assert torch.equal(work.wait(), middle)
    out = torch.empty(3, 2).t()
    assert functions.all_reduce(x, ring.AVERAGE, out, True) is out and torch.equal(out, middle)
    assert torch.equal(functions.broadcast(x, SIZE - 1, x.clone(), True), torch.arange(6.0).view(2, 3) + SIZE - 1)
    rows = functions.all_gather(torch.full((RANK + 1, 2), float(RANK)), True)
    assert rows[:, 0].tolist() == [float(r) for r in range(SIZE) for _ in range(r + 1)]
    assert functions.all_gather(torch.tensor(float(RANK)), True).tolist() == list(range(SIZE))
    part = functions.reduce_scatter(torch.arange(5.0), ring.SUM, True)
    cuts = torch.arange(5.0).mul(SIZE).tensor_split(SIZE)
    assert torch.equal(part, cuts[RANK])
    swapped = functions.all_to_all(torch.arange(float(SIZE)) + 10 * RANK, None, True)
    assert swapped.tolist() == [10.0 * r + RANK for r in range(SIZE)]
    for wrong in (
        lambda: functions.all_to_all(torch.ones(SIZE), [1], True),
        lambda: functions.all_reduce(x, ring.SUM, 1, True),
    ):
        try:
            wrong()
        except ring.ArgumentError:
            continue
        raise AssertionError("not rejected")


@check_among_several
def gradients_in_sixteen_bits() -> None:
    """Gradients are rounded on GPUs, but not on the CPUs of one host, where nothing is sent."""
    exact: list[torch.Tensor] = []
    for name, feedback in ((None, False), ("fp16", False), ("bf16", False), ("fp16", True), ("bf16", True)):
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        optimizer = DistributedOptimizer(
            optimizer, model.named_parameters(), bucket_bytes=4096, compression=name, error_feedback=feedback
        )
        for x, y in batches(4):
            optimizer.zero_grad()
            loss(model, shard(x), shard(y)).backward()
            optimizer.step()
        optimizer.close()
        weights = [p.detach().float() for p in model.parameters()]
        exact = exact or weights
        largest = max(float((a - b).abs().max()) for a, b in zip(weights, exact, strict=True) if a.numel())
        assert largest < 2e-3
        if name and ON_GPUS:
            assert largest > 0
        assert same_everywhere(model.parameters())
    try:
        DistributedOptimizer(torch.optim.SGD(Net().parameters(), 0.1), compression="fp16" if RANK else None)
    except ring.MismatchError as error:
        assert "sent as float16" in str(error)
    else:
        raise AssertionError("ranks that round differently were not noticed")


@contextlib.contextmanager
def warnings_of_ours() -> Iterator[list[str]]:
    """What ring_plugins warns of on this rank."""
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ring_plugins").addHandler(handler)
    try:
        yield found
    finally:
        logging.getLogger("ring_plugins").removeHandler(handler)


@check_among_several
def optimizers_of_several_threads_compare_their_own_weights() -> None:
    """Threads come to their comparisons in different orders on the ranks."""
    if ON_GPUS:
        return  # NCCL may not be called for several communicators in different orders on the ranks
    torch.manual_seed(0)
    models = [nn.Linear(4, 1) for _ in range(3)]
    optimizers = [
        DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters()) for model in models
    ]
    # The first step goes in rank order on one rank, and in the opposite order on the others.
    turns = [threading.Event() for _ in models]

    def train(number: int) -> None:
        for step in range(4):
            optimizers[number].zero_grad()
            models[number](torch.full((1, 4), RANK + 1.0)).sum().backward()
            if step == 0:
                turns[number].wait()
                successor = number + 1 if RANK == 0 else number - 1
                threading.Timer(0.05, turns[successor].set if 0 <= successor < 3 else lambda: None).start()
            optimizers[number].step()

    threads = [threading.Thread(target=train, args=(number,)) for number in range(3)]
    with warnings_of_ours() as found:
        for thread in threads:
            thread.start()
        turns[0 if RANK == 0 else 2].set()
        for thread in threads:
            thread.join()
    assert not found
    assert same_everywhere([p for model in models for p in model.parameters()])


def kept_gradients(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    part: Callable[[torch.Tensor], torch.Tensor],
    keep: Callable[[torch.Tensor], object] | None,
) -> list[torch.Tensor]:
    """What a script keeps of two losses a step, over three steps, without a copy if `keep` makes none."""
    kept = []
    for k in range(6):
        optimizer.zero_grad()
        x = torch.randn(4 * SIZE, 4, generator=torch.Generator(torch.get_default_device()).manual_seed(k))
        (model(part(x)) - k % 2).square().mean().backward()
        kept += [keep(p.grad) for p in model.parameters()] if keep else []
        if k % 2:
            optimizer.step()
    return [torch.as_tensor(one) for one in kept]


@check
def gradients_that_a_script_keeps_are_not_overwritten() -> None:
    ways = [lambda g: g, lambda g: g.detach(), lambda g: g.view(-1), torch.from_dlpack]
    ways += [] if ON_GPUS else [lambda g: g.numpy()[:1]]
    for keep in ways:
        models = [small_model(), small_model()]
        plain, inner = (torch.optim.SGD(model.parameters(), 0.05) for model in models)
        ours = DistributedOptimizer(inner, models[1].named_parameters())
        wanted = kept_gradients(models[0], plain, lambda x: x, lambda g, keep=keep: keep(g.clone()))
        # On some ranks only: the memory of the others is written by this rank, too.
        kept = kept_gradients(models[1], ours, shard, keep if RANK != 1 else None)
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(wanted, kept, strict=bool(kept))), keep
        assert close(*models) and same_everywhere(models[1].parameters())
        ours.close()


@check
def gradients_that_a_script_made_hold_the_averages() -> None:
    """It reads them where it made them, as one buffer or as a list; large ones too."""
    for width in (3, 300):
        for is_flat in (True, False):
            models = [nn.Linear(4, width), nn.Linear(4, width)]
            models[1].load_state_dict(models[0].state_dict())
            broadcast_parameters(models[1])
            broadcast_parameters(models[0])
            averager = GradientAverager(models[1], bucket_bytes=1 << 20)
            for model, part in ((models[0], lambda x: x), (models[1], shard)):
                sizes = [p.numel() for p in model.parameters()]
                flat = torch.zeros(sum(sizes))
                own = flat.split(sizes) if is_flat else [torch.zeros(size) for size in sizes]
                for p, gradient in zip(model.parameters(), own, strict=True):
                    p.grad = gradient.view_as(p)
                for k in range(3):
                    x = torch.randn(4 * SIZE, 4, generator=torch.Generator(torch.get_default_device()).manual_seed(k))
                    for gradient in own:
                        gradient.zero_()
                    model(part(x)).square().mean().backward()
                    with torch.no_grad():
                        for p, gradient in zip(model.parameters(), own, strict=True):
                            p.sub_(gradient.view_as(p), alpha=0.05)
            assert close(*models) and same_everywhere(models[1].parameters()), (width, is_flat)
            averager.close()


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))


def accumulating_loop(
    model: nn.Module, zero: Callable[[], None], step: Callable[[], None], part: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """The usual loop of two batches a step, over epochs of five, with clipping."""
    for epoch in range(3):
        for i in range(5):
            x = torch.randn(
                4 * SIZE, 4, generator=torch.Generator(torch.get_default_device()).manual_seed(10 * epoch + i)
            )
            (model(part(x)).square().mean() / 2).backward()
            if i % 2:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                step()
                zero()


@check
def the_rest_of_an_epoch_is_averaged_with_the_next_step() -> None:
    """The pass that communicates is the first of two then, and the second one's gradients are each rank's own."""
    for wraps in (True, False):
        for clears in (True, False):
            models = [small_model(), small_model()]
            plain, inner = (torch.optim.SGD(model.parameters(), 0.05) for model in models)
            accumulating_loop(models[0], models[0].zero_grad if clears else list, plain.step, lambda x: x)
            if wraps:
                ours = DistributedOptimizer(inner, models[1].named_parameters(), backward_passes_per_step=2)
            else:
                ours, averager = inner, GradientAverager(models[1], passes_per_step=2)
            accumulating_loop(models[1], models[1].zero_grad if clears else list, ours.step, shard)
            assert close(*models) and same_everywhere(models[1].parameters()), (wraps, clears)
            (ours if wraps else averager).close()


def train_by(kind: str, model: nn.Module, part: Callable[[torch.Tensor], torch.Tensor], averages: bool) -> None:
    """Three steps for whose gradients no backward communicates."""
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    averager = GradientAverager(model, passes_per_step=4) if averages else None
    batches = iter(
        [
            torch.randn(4 * SIZE, 4, generator=torch.Generator(torch.get_default_device()).manual_seed(k))
            for k in range(3)
        ]
    )

    def compute() -> torch.Tensor:
        optimizer.zero_grad()
        result = model(part(next(batches))).square().mean()
        if kind == "assigned":
            for p, gradient in zip(model.parameters(), torch.autograd.grad(result, [*model.parameters()]), strict=True):
                p.grad = gradient
        else:
            result.backward()
        return result

    for _ in range(3):
        with averager.no_sync() if averager and kind == "in no_sync" else contextlib.nullcontext():
            if kind != "closure":
                compute()
        optimizer.step(compute if kind == "closure" else None)
    if averager:
        averager.close()


@check
def a_step_averages_what_no_backward_has_averaged() -> None:
    kinds = ["in no_sync", "fewer passes", "closure"]
    if not ON_GPUS:
        kinds.append("assigned")  # on a GPU, a captured graph might have averaged
    for kind in kinds:
        models = [small_model(), small_model()]
        train_by(kind, models[0], lambda x: x, averages=False)
        train_by(kind, models[1], shard, averages=True)
        assert close(*models) and same_everywhere(models[1].parameters()), kind


@check_among_several
def a_step_that_cannot_be_averaged_is_rejected() -> None:
    for steps_inside in (True, False):
        for wraps in (True, False):
            model = small_model()
            before = [p.detach().clone() for p in model.parameters()]
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            if wraps:
                optimizer = DistributedOptimizer(optimizer, model.named_parameters(), backward_passes_per_step=2)
            averager = optimizer.averager if wraps else GradientAverager(model, passes_per_step=2)
            step = optimizer.step
            hooks = [p.register_post_accumulate_grad_hook(lambda _, step=step: step()) for p in model.parameters()]
            for hook in () if steps_inside else hooks:
                hook.remove()
            text = ""
            try:
                model(torch.full((1, 4), RANK + 1.0)).sum().backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
            except ring.RingError as error:
                text = str(error)
            assert ("inside a backward" if steps_inside else "synchronize()") in text, text
            assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
            if wraps and not steps_inside:
                optimizer.zero_grad()
                model(torch.full((1, 4), RANK + 1.0)).sum().backward()
                optimizer.synchronize()
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                assert same_everywhere(model.parameters())
            averager.prepare()  # or closing it would tell ranks that wait for this backward
            averager.close()


@check_among_several
def ranks_with_other_numbers_of_passes_get_an_error() -> None:
    if ON_GPUS:
        return  # it comes a step later there
    for wraps in (True, False):
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        averager = None if wraps else GradientAverager(model, passes_per_step=2)
        if wraps:
            optimizer = DistributedOptimizer(optimizer, model.named_parameters(), backward_passes_per_step=2)
        text = ""
        try:
            for _ in range(2):
                for i in range(4 + (RANK == 0)):
                    model(torch.full((1, 4), RANK + 1.0)).sum().backward()
                    if i % 2:
                        optimizer.step()
                        model.zero_grad()
        except ring.MismatchError as error:
            text = str(error)
        assert "different numbers of updates" in text, text
        (averager or optimizer).close()


@check_among_several
def an_optimizer_that_is_not_wrapped_is_told() -> None:
    """Its parameters drift apart, unless the script averages their gradients in another way."""
    for averages in (False, True):
        for names_all in (False, True):
            torch.manual_seed(0)
            model = nn.ModuleDict({"generator": nn.Linear(4, 4), "discriminator": nn.Linear(4, 1)})
            generator, discriminator = model["generator"], model["discriminator"]
            named = (model if names_all else generator).named_parameters()
            ours = DistributedOptimizer(torch.optim.SGD(generator.parameters(), 0.1), named)
            plain = torch.optim.Adam(discriminator.parameters(), 0.1)
            with warnings_of_ours() as found:
                for _ in range(4):
                    ours.zero_grad()
                    plain.zero_grad()
                    discriminator(generator(torch.full((2, 4), RANK + 1.0))).square().mean().backward()
                    for parameter in discriminator.parameters() if averages else ():
                        parameter.grad = ring.all_reduce(parameter.grad)
                    ours.step()
                    plain.step()
            ours.close()
            if averages or RANK > 0:
                assert not found, found
            else:
                (text,) = found
                name = "discriminator.weight" if names_all else r"parameter 0 of another optimizer \(Adam\)"
                pattern = (
                    rf"after 2 steps the weights of rank.* differ .*first in {name}, in 2 of 2 .*Adam stepped on each"
                )
                assert re.search(pattern, text), text


def _ends_by(
    change: Callable[..., None],
    make: Any = torch.optim.SGD,
    averages_alone: bool = False,
    begin: Callable[[nn.Module], None] = lambda model: None,
) -> tuple[int, str]:
    """In which step a loop ended in which error; `change(step, model, optimizer)` comes between backward and update."""
    torch.manual_seed(0)
    body, head = nn.Linear(4, 4), nn.Linear(4, 4)
    model = nn.Sequential(body, head)
    step, text = 0, ""
    inner = make(head.parameters(), lr=0.01)
    if averages_alone:
        optimizer, averager = inner, GradientAverager(head)
    else:
        optimizer = DistributedOptimizer(inner, [*model.named_parameters()])
        averager = optimizer.averager
    torch.manual_seed(RANK)
    with warnings_of_ours():
        try:
            for step in range(20):
                begin(model)
                optimizer.zero_grad()
                model(torch.randn(4, 4)).square().mean().backward()
                body.zero_grad()
                change(step, model, optimizer)
                optimizer.step()
        except ring.RingError as error:
            text = f"{type(error).__name__}: {error}"
    averager.close()
    return step, text


@check
def gradients_that_came_before_their_parameters_were_frozen_are_averaged() -> None:
    for where in ("passes", "no_sync", "step", "synchronize", "thawed"):
        torch.manual_seed(0)
        model, reference = ([nn.Linear(4, 4) for _ in range(2)] for _ in range(2))
        model, reference = nn.Sequential(*model), nn.Sequential(*reference)
        reference.load_state_dict(model.state_dict())
        optimizer = DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            model.named_parameters(),
            backward_passes_per_step=2 if where == "passes" else 1,
        )
        own = torch.optim.SGD(reference.parameters(), lr=0.1)
        if where == "thawed":
            model[0].requires_grad_(False)
        for _ in range(3):
            optimizer.zero_grad()
            own.zero_grad()
            x, later = torch.randn(SIZE, 2, 4), torch.randn(SIZE, 2, 4)
            model[0].requires_grad_(True)
            with contextlib.nullcontext() if where == "passes" else optimizer.no_sync():
                model(x[RANK]).square().mean().backward()
            reference(x.flatten(0, 1)).square().mean().backward()
            for one in (model, reference):
                one[0].requires_grad_(False)
            if where in ("passes", "no_sync", "thawed"):
                model(later[RANK]).square().mean().backward()
                reference(later.flatten(0, 1)).square().mean().backward()
            elif where == "synchronize":
                optimizer.synchronize()
            optimizer.step()
            own.step()
            for one in (model, reference):
                one[0].requires_grad_(True)
        assert close(model, reference), where
        assert same_everywhere(model.parameters()), where
        optimizer.close()


@check_among_several
def an_averager_that_is_dropped_before_it_averaged_is_an_error_where_training_goes_on() -> None:
    for wraps in (True, False):
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with warnings_of_ours():
            DistributedOptimizer(optimizer) if wraps else GradientAverager(model)
            gc.collect()
        text = ""
        try:
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
        except ring.RingError as error:
            text = str(error)
        assert "trained on without averages" in text and "DistributedOptimizer returns" in text, text


@check_among_several
def a_graph_that_averages_do_not_have_is_told_once() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    averager = GradientAverager(model)
    with warnings_of_ours() as found:
        for creates in (False, True, True):
            model.zero_grad()
            model(torch.ones(1, 4)).square().sum().backward(create_graph=creates)
            assert len(found) == (creates and RANK == 0), found
    assert RANK or "torch.autograd.grad(loss, parameters, create_graph=True)" in found[0]
    averager.close()


@check
def state_and_groups_that_a_script_replaces_are_those_of_the_wrapped_optimizer() -> None:
    for replaces_groups in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizer = DistributedOptimizer(torch.optim.Adam(model.parameters(), 0.1), model.named_parameters())
        for step in range(4):
            optimizer.zero_grad() if step != 2 else model.zero_grad()
            model(torch.randn(SIZE, 2, 4)[RANK]).square().mean().backward()
            optimizer.step()
            if step != 1:
                continue
            optimizer.state = collections.defaultdict(dict)
            assert not optimizer.optimizer.state
            model.weight = nn.Parameter(torch.ones(1, 4))  # a layer that grows
            if replaces_groups:
                optimizer.param_groups = [{**optimizer.param_groups[0], "params": list(model.parameters())}]
            else:
                optimizer.param_groups[0]["params"][0] = model.weight
        assert not torch.equal(model.weight, torch.ones(1, 4)) and same_everywhere(model.parameters())
        optimizer.close()


@check_among_several
def weights_that_differ_from_some_step_on_are_an_error_on_all_ranks() -> None:
    def noise(step: int, model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
        if step >= 2 and RANK == 1:
            model[1].weight.grad.mul_(1.5)

    def clip(step: int, model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
        if step >= 2:
            model(torch.randn(4, 4) * 10).square().mean().backward(inputs=[*model[0].parameters()])
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)

    def freeze_body(model: nn.Sequential) -> None:
        model[0].requires_grad_(False)

    for change, alone, cause in (
        (noise, False, "A rank has changed its averages or weights in a way of its own"),
        (noise, True, "A rank has changed its averages or weights in a way of its own"),
        (clip, False, "The gradient of 0.weight and 1 more parameter is each rank's own, since no averager has it"),
    ):
        step, text = _ends_by(change, averages_alone=alone, begin=freeze_body if change is noise else lambda _: None)
        assert step == 4 and text.startswith("DriftError: after 4 steps the weights of rank"), (step, text)
        assert cause in text, text


@check_among_several
def an_option_that_one_rank_changes_later_is_an_error_on_all_ranks() -> None:
    for make, name, value in (
        (torch.optim.Adam, "eps", 1e-3),
        (torch.optim.SGD, "maximize", True),
        (torch.optim.SGD, "unknown", (1, None)),
    ):

        def change(step: int, model: nn.Module, optimizer: torch.optim.Optimizer, name=name, value=value) -> None:
            if step == 5 and RANK == 1:
                optimizer.param_groups[0][name] = value

        step, text = _ends_by(change, make)
        assert step == 8 and f"{name}=" in text and "rank 1: " in text, (step, text)
        assert text.startswith("MismatchError" if name == "unknown" else "DriftError"), text


@check_among_several
def ranks_whose_weights_differ_only_for_a_while_go_on() -> None:
    """A script may disturb weights for a forward, or make them equal after an update."""

    kept: list[torch.Tensor] = []

    def disturb(model: nn.Module) -> None:
        kept[:] = [parameter.detach().clone() for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.data.add_(torch.randn_like(parameter))

    def restore(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for parameter, before in zip(model.parameters(), kept, strict=True):
            parameter.data.copy_(before)

    class Random(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            super().step(closure)
            for parameter in self.param_groups[0]["params"]:
                parameter.data.add_(torch.randn_like(parameter))

    for alone in (False, True):
        assert _ends_by(restore, averages_alone=alone, begin=disturb) == (19, "")
        assert _ends_by(lambda *_: None, Random, averages_alone=alone, begin=broadcast_parameters) == (19, "")


@check_among_several
def a_parameter_that_one_rank_freezes_is_named() -> None:
    if ON_GPUS:
        return  # a kernel of NCCL waits for the rank that froze it: only the stall report tells of that
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    averager = GradientAverager(model)
    model(torch.ones(1, 4)).sum().backward()
    model[1].bias.requires_grad_(RANK > 0)
    text = ""
    try:
        for _ in range(2):
            model(torch.ones(1, 4)).sum().backward()
    except ring.MismatchError as error:
        text = str(error)
    assert "ranks disagree" in text
    assert ("since 1.bias was frozen (requires_grad)" in text) == (RANK == 0), text
    averager.close()


@check_among_several
def a_parameter_that_is_replaced_in_the_model_only_is_named() -> None:
    def train(change: Callable[[nn.Module], object], passes_before: int = 2) -> str:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        try:
            for step in range(passes_before + 2):
                if step == passes_before:
                    change(model)
                optimizer.zero_grad()
                model(torch.full((2, 3), ring.rank() + 1.0)).square().sum().backward()
                optimizer.step()
            return ""
        except ring.RingError as error:
            return str(error)
        finally:
            optimizer.close()

    def replace(model: nn.Module, **options: Any) -> None:
        model[1].weight = nn.Parameter(torch.ones(3, 3), **options)

    def put_back(model: nn.Module) -> None:
        before = model[1].weight
        replace(model)
        model[1].weight = before

    def replace_elsewhere(model: nn.Module) -> None:
        holder = nn.Module()
        holder.best = model
        holder.best = copy.deepcopy(model)
        untied = nn.Linear(3, 3)
        untied.weight = model[1].weight
        replace(nn.Sequential(nn.Identity(), untied))

    def load(model: nn.Module) -> None:
        model.load_state_dict({name: one.clone() for name, one in model.state_dict().items()}, assign=True)

    def tie(model: nn.Module) -> None:
        model[1].weight = model[0].weight

    alone = "rank 0 has replaced 1.weight in the model"
    assert alone in train(lambda model: ring.rank() or replace(model))
    assert alone in train(lambda model: ring.rank() or replace(model, requires_grad=False))
    assert alone in train(lambda model: ring.rank() or tie(model))
    assert "1.weight of the model had been replaced by another parameter" in train(replace)
    assert "1.weight, 1.bias of the model had been replaced" in train(
        lambda model: setattr(model, "1", nn.Linear(3, 3))
    )
    assert "0.weight, 0.bias, 1.weight, 1.bias and 2 more of the model" in train(load)
    assert not train(put_back)
    assert not train(replace_elsewhere)
    assert not train(lambda model: ring.rank() or replace_elsewhere(model))
    assert not train(tie)
    assert not train(lambda model: replace(model, requires_grad=False))


@check_among_several
def sets_of_parameters_that_differ_in_no_sync_only_are_named() -> None:
    def train(trained: int) -> str:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
        broadcast_parameters(model)
        averager = GradientAverager(model)
        try:
            for one in (0, 1):
                model[one].requires_grad_(one == trained)
            with averager.no_sync():
                model(torch.ones(2, 3)).sum().backward()
            model.requires_grad_(True)
            model(torch.ones(2, 3)).sum().backward()
            return ""
        except ring.RingError as error:
            return str(error)
        finally:
            averager.close()

    assert not train(1)
    assert "has trained only 0.weight, 0.bias, 2.weight, 2.bias in a pass before it" in train(ring.rank() % 2)


ONLY = os.environ.get("TEST_ONLY", "").split(",")
run([check for check in CHECKS if ONLY == [""] or check.__name__ in ONLY])
report("launched by NCCL", len(LAUNCHES))
os.environ["RING_OVERLAP"] = "1"
run([check for check in CHECKS if check.__name__ in os.environ.get("TEST_OVERLAPPED", "").split(",")], " overlapped")
