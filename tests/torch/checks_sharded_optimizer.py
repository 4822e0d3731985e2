"""Sharded optimizers against unsharded ones, in memory of the kind TEST_DEVICE, "cpu" by default.

Run by test_sharded_optimizer.py at any world size, and by tests/gpu_rehearsal/test_everything.py.
"""

# ruff: noqa: E402  # ranks that start before torch is imported import it in parallel

import copy
import gc
import io
import os
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import ring_plugins as ring

ring.init(ranks=int(os.environ["TEST_RANKS"]))

import pytest
import torch
from torch import nn

from ring_plugins.core.base.errors import ArgumentError, MismatchError, RingError
from ring_plugins.torch import DistributedOptimizer, broadcast_optimizer_state
from ring_plugins.torch.sharded_optimizer import ShardedOptimizer
from tests.checks import run
from tests.worker import report

torch.set_num_threads(1)
RANK, SIZE = ring.rank(), ring.size()
KIND = os.environ.get("TEST_DEVICE", "cpu")
if KIND != "cpu":
    torch.cuda.set_device(ring.local_rank())
    torch.set_default_device(torch.device(KIND, ring.local_rank()))
CHECKS: list[Callable[[], None]] = []
LARGE = 600  # a matrix of this order is larger than a mebibyte, and gathered where it lies


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS.append(function)
    return function


def check_among_several(function: Callable[[], None]) -> Callable[[], None]:
    return check(function) if SIZE > 1 else function


class Net(nn.Module):
    """Large and small parameters, a 0-d and an empty one, one that is used every second time."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(1, 4, 3).to(memory_format=torch.channels_last)
        self.large = nn.Linear(144, LARGE)
        self.larger = nn.Linear(LARGE, LARGE)
        self.wide = nn.Linear(LARGE, 7, dtype=torch.float64)
        self.seldom = nn.Linear(7, 7, dtype=torch.float64)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.uses_all = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x.to(memory_format=torch.channels_last)).relu().flatten(1)
        x = self.larger(self.large(x).relu()).relu() * self.scale + self.empty.sum()
        x = self.wide(x.double())
        return self.seldom(x) if self.uses_all else x


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups with options of their own; the second begins in the middle of the model."""
    parameters = list(model.parameters())
    return [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 3e-3, "weight_decay": 0.01}]


def gradients(model: Net, step: int, scale: Any = None) -> None:
    generator = torch.Generator("cpu").manual_seed(1000 * step + RANK)
    x = torch.randn(3, 1, 8, 8, generator=generator, device="cpu").to(model.scale.device)
    y = torch.randn(3, 7, generator=generator, dtype=torch.float64, device="cpu").to(model.scale.device)
    model.uses_all = step % 2 == 0
    loss = nn.functional.mse_loss(model(x), y)
    (loss if scale is None else scale(loss)).backward()


def train(optimizer: Any, model: Net, steps: range = range(6)) -> None:
    for step in steps:
        optimizer.zero_grad()
        gradients(model, step)
        optimizer.step()


Make = Callable[[Any], torch.optim.Optimizer]


def pair(make: Make, shard: Any = True, **options: Any) -> tuple[Net, Any, Net, Any]:
    """A model with a sharded optimizer, and an equal one with an optimizer that is not sharded."""
    models = Net(), Net()
    sharded, plain = (
        DistributedOptimizer(make(groups(model)), model.named_parameters(), shard=how, **options)
        for model, how in zip(models, (shard, False), strict=True)
    )
    return models[0], sharded, models[1], plain


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten().double() for p in model.parameters()])


def assert_equal(model: nn.Module, reference: nn.Module, what: Any = "", tolerance: float = 1e-6) -> None:
    ours, theirs = weights(model), weights(reference)
    assert (ours - theirs).abs().max() <= tolerance, (what, (ours - theirs).abs().max())
    assert not torch.equal(ours, weights(Net())), "nothing was trained"
    everywhere = ring.all_gather(ours[None])
    assert all(torch.equal(ours, one) for one in everywhere), f"{what}: ranks differ"


def adam(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(groups, 1e-3, amsgrad=True)


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "foreach": True}),
    ("SGD", {"momentum": 0.9, "fused": True}),
    ("Adam", {"amsgrad": True}),
    ("Adam", {"foreach": True}),
    ("Adam", {"fused": True}),
    ("AdamW", {"fused": True}),
    ("AdamW", {"foreach": True, "maximize": True}),
    ("RMSprop", {"momentum": 0.9, "centered": True}),
    ("RMSprop", {"foreach": True}),
    ("Adagrad", {}),
    ("Adagrad", {"fused": True}),
    ("Adadelta", {}),
    ("Adamax", {"foreach": True}),
    ("NAdam", {}),
    ("RAdam", {}),
    ("Rprop", {}),
    ("ASGD", {}),
]


@check
def fifty_steps_equal_those_without_sharding() -> None:
    for name, options in VARIANTS:
        steps = range(50) if name in ("SGD", "Adam") and "fused" not in options else range(5)

        def make(parameters: Any, name: str = name, options: dict[str, Any] = options) -> torch.optim.Optimizer:
            if name == "Rprop":
                parameters = [{**group} for group in parameters]
                parameters[1].pop("weight_decay")
            return getattr(torch.optim, name)(parameters, lr=1e-3, **options)

        model, sharded, reference, plain = pair(make)
        train(sharded, model, steps)
        train(plain, reference, steps)
        assert_equal(model, reference, (name, options))
        ours, theirs = sharded.state_dict(), plain.state_dict()
        assert_same_state(ours, theirs, (name, options))
        sharded.close()
        plain.close()


def assert_same_state(ours: dict[str, Any], theirs: dict[str, Any], what: Any = "") -> None:
    assert ours["param_groups"] == theirs["param_groups"], what
    assert sorted(ours["state"]) == sorted(theirs["state"]), what
    for number, state in theirs["state"].items():
        assert state.keys() == ours["state"][number].keys(), what
        for key, value in state.items():
            mine = ours["state"][number][key]
            if isinstance(value, torch.Tensor):
                mine = mine.to(value.device)  # gathered in memory of the host
                assert mine.shape == value.shape and mine.dtype == value.dtype, (what, number, key)
                assert torch.allclose(mine, value, rtol=1e-5, atol=1e-7), (what, number, key)
            else:
                assert mine == value, (what, number, key)


@check
def every_rank_keeps_its_share_of_the_state() -> None:
    model, sharded, _, plain = pair(adam)
    train(sharded, model, range(1))
    total = 3 * sum(p.numel() for p in model.parameters())
    own = sum(v.numel() for s in sharded.state.values() for v in s.values() if v.dim())
    assert abs(own - total / SIZE) < 0.01 * total, (own, total)
    assert SIZE == 1 or not sharded.optimizer.optimizer.state
    sharded.close()
    plain.close()


@check
def clipping_schedules_and_options_that_change() -> None:
    model, sharded, reference, plain = pair(lambda groups: torch.optim.AdamW(groups, 1e-2))
    norms: list[list[float]] = []
    for one, optimizer in ((model, sharded), (reference, plain)):
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, [1e-2, 3e-2], total_steps=12)
        norms.append([])
        for step in range(10):
            optimizer.zero_grad(set_to_none=step % 3 == 0)
            gradients(one, step)
            nn.utils.clip_grad_value_(one.parameters(), 0.05)
            norms[-1].append(float(nn.utils.clip_grad_norm_(one.parameters(), 0.1)))
            optimizer.step()
            schedule.step()
        optimizer.param_groups[0]["weight_decay"] = 0.3
        train(optimizer, one, range(3))
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert_equal(model, reference)
    sharded.close()
    plain.close()


@check
def accumulation_freezing_and_gradients_that_some_ranks_lack() -> None:
    model, sharded, reference, plain = pair(adam)
    for one, optimizer in ((model, sharded), (reference, plain)):
        for step in range(8):
            optimizer.zero_grad()
            one.large.requires_grad_(step not in (2, 3))
            with optimizer.no_sync():
                gradients(one, 2 * step)
            gradients(one, 2 * step if RANK else 2 * step + 1)  # rank 0 lacks a gradient
            optimizer.step()
        optimizer.zero_grad()
        if RANK == 0:
            gradients(one, 50)
        optimizer.step()  # the others take part
    assert_equal(model, reference)
    sharded.close()
    plain.close()
    model, sharded, reference, plain = pair(adam, backward_passes_per_step=2, compression="bf16")
    for one, optimizer in ((model, sharded), (reference, plain)):
        for step in range(4):
            optimizer.zero_grad()
            gradients(one, step)
            gradients(one, step)
            optimizer.step()
    assert_equal(model, reference)
    sharded.close()
    plain.close()


@check
def grad_scaler_with_an_infinite_gradient_on_one_rank() -> None:
    for fused in (False, True):
        model, sharded, reference, plain = pair(lambda groups, fused=fused: torch.optim.AdamW(groups, fused=fused))
        scales = []
        for one, optimizer in ((model, sharded), (reference, plain)):
            scaler = torch.amp.GradScaler(KIND, init_scale=2.0**8, growth_interval=2)
            for step in range(6):
                optimizer.zero_grad()
                overflow = float("inf") if step == 2 and RANK == SIZE - 1 else 1.0
                gradients(one, step, lambda loss, scaler=scaler, by=overflow: scaler.scale(loss) * by)
                if step % 2:
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(one.parameters(), 0.1)
                scaler.step(optimizer)
                scaler.update()
            scales.append(scaler.get_scale())
        assert scales == [2.0**9] * 2  # doubled, halved, doubled
        assert_equal(model, reference, fused)
        sharded.close()
        plain.close()


@check
def fused_updates_use_the_scale_of_grad_scaler() -> None:
    for shard in (False, True):
        model = nn.Linear(4, 1, bias=False)
        torch.nn.init.ones_(model.weight)
        inner = torch.optim.SGD(model.parameters(), 1.0, fused=True)
        optimizer = DistributedOptimizer(inner, model.named_parameters(), shard=shard)
        scaler = torch.amp.GradScaler(KIND, init_scale=1024.0)
        scaler.scale(model(torch.ones(1, 4)).sum()).backward()
        scaler.step(optimizer)
        assert torch.equal(model.weight, torch.zeros(1, 4)), (shard, model.weight)
        optimizer.close()


@check
def closures_and_new_groups() -> None:
    model, sharded, reference, plain = pair(lambda groups: torch.optim.Adam(groups[:1], 1e-3))
    for one, optimizer in ((model, sharded), (reference, plain)):

        def closure(one: Net = one, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            gradients(one, 1)
            return torch.tensor(float(RANK))

        assert float(optimizer.step(closure)) == (SIZE - 1) / 2
        optimizer.add_param_group(groups(one)[1])
        train(optimizer, one)
    assert_equal(model, reference)
    assert_same_state(sharded.state_dict(), plain.state_dict())
    sharded.close()
    plain.close()


@check
def state_in_the_ordinary_format() -> None:
    model, sharded, reference, plain = pair(adam)
    train(sharded, model)
    state = sharded.state_dict()
    for other in (torch.optim.Adam(groups(Net()), amsgrad=True), sharded, plain):
        other.load_state_dict(copy.deepcopy(state))
    with torch.no_grad():
        for a, b in zip(model.parameters(), reference.parameters(), strict=True):
            b.copy_(a)
    train(sharded, model, range(6, 12))
    train(plain, reference, range(6, 12))
    assert_equal(model, reference)
    # An optimizer that has state before it is sharded, and one that loads after.
    again, twin = Net(), Net()
    inner = adam(groups(again))
    inner.load_state_dict(copy.deepcopy(state))
    both = [
        DistributedOptimizer(inner, again.named_parameters(), shard=True),
        DistributedOptimizer(adam(groups(twin)), twin.named_parameters(), shard="tensors"),
    ]
    both[1].load_state_dict(copy.deepcopy(state))
    train(both[0], again)
    train(both[1], twin)
    assert_equal(again, twin)
    if SIZE > 1:
        only_there = sharded.optimizer.state_dict(to=SIZE - 1)
        assert bool(only_there) == (RANK == SIZE - 1)
        with pytest.raises(ArgumentError, match="to=99 is not a rank of this job"):
            sharded.optimizer.state_dict(to=99)
        with pytest.raises(ArgumentError, match="has no whole state on any rank"):
            broadcast_optimizer_state(sharded)
    for optimizer in (sharded, plain, *both):
        optimizer.close()


class Lars(torch.optim.Optimizer):
    """Looks at the norms of whole tensors."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["norms"] = [p.norm(), p.grad.norm()]
                    p.add_(p.grad * (p.norm() / (p.grad.norm() + 1e-6)), alpha=-group["lr"])


@check
def whole_tensors_on_one_rank() -> None:
    def adafactor(groups: Any) -> torch.optim.Optimizer:
        for group in groups:  # it divides by the number of elements
            group["params"] = [p for p in group["params"] if p.numel()]
        return torch.optim.Adafactor(groups, 1e-2)

    for make in (Lars, *([adafactor] if hasattr(torch.optim, "Adafactor") else []), adam):
        model, sharded, reference, plain = pair(make, shard="tensors")
        train(sharded, model)
        train(plain, reference)
        assert_equal(model, reference)
        if make is adam:
            assert_same_state(sharded.state_dict(), plain.state_dict())
        loaded = sharded.state_dict()
        sharded.load_state_dict(loaded)
        train(sharded, model)
        train(plain, reference)
        assert_equal(model, reference)
        sharded.close()
        plain.close()


@check
def sparse_gradients_need_whole_tensors() -> None:
    if KIND != "cpu":
        return  # the rehearsal simulates no sparse tensors

    def embedding() -> Any:
        torch.manual_seed(0)
        return nn.Embedding(50, 4, sparse=True)

    rows = torch.tensor([RANK, 7])
    model, reference = embedding(), embedding()
    inner = torch.optim.SparseAdam(model.parameters())
    sharded = DistributedOptimizer(inner, model.named_parameters(), shard="tensors")
    plain = DistributedOptimizer(torch.optim.SparseAdam(reference.parameters()), reference.named_parameters())
    for one, optimizer in ((model, sharded), (reference, plain)):
        for _ in range(3):
            optimizer.zero_grad()
            one(rows).sum().backward()
            optimizer.step()
        optimizer.close()
    assert torch.equal(model.weight, reference.weight)
    if SIZE > 1:
        sliced = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), shard=True)
        sliced.zero_grad()
        model(rows).sum().backward()
        with pytest.raises(MismatchError, match=r"the gradient of weight is sparse and cannot be cut.*shard='tensors'"):
            sliced.step()
        sliced.close()


@check
def rejected_by_name() -> None:
    class Mine(torch.optim.Adam):
        pass

    model = Net()
    for kind, options, text in (
        (torch.optim.LBFGS, {"shard": True}, "LBFGS cannot be sharded: its update of a tensor depends on others"),
        (torch.optim.LBFGS, {"shard": "tensors"}, "LBFGS cannot be sharded"),
        (torch.optim.SparseAdam, {"shard": True}, r"torch.optim\S*.SparseAdam is not known to.*pass shard='tensors'"),
        (Lars, {"shard": True}, r"Lars is not known to.*pass shard='slices'"),
        (Mine, {"shard": True}, r"Mine is not known to"),
        (torch.optim.Adam, {"shard": 1}, 'shard=1 must be False, True, "slices" or "tensors"'),
        (torch.optim.Adam, {"shard": 3}, 'shard=3 must be False, True, "slices" or "tensors"'),
    ):
        with pytest.raises(ArgumentError, match=text):
            DistributedOptimizer(kind(model.parameters()), model.named_parameters(), **options)
    vouched = DistributedOptimizer(Mine(model.parameters()), model.named_parameters(), shard="slices")
    train(vouched, model, range(1))
    vouched.close()
    if SIZE > 1:
        gaps = nn.Parameter(torch.zeros(4, 4)[:, :2])
        with pytest.raises(ArgumentError, match=r"parameter 0 of shape \(4, 2\) and strides \(4, 1\) has gaps"):
            ShardedOptimizer(torch.optim.SGD([gaps], 0.1))
        first, second = nn.Linear(8, 8), nn.Linear(8, 8)
        parameters = [first.weight, first.bias, second.weight]
        second.weight.data = first.weight.data
        with pytest.raises(ArgumentError, match="parameter 0 and parameter 2 lie in the same memory"):
            ShardedOptimizer(torch.optim.SGD(parameters, 0.1))


@check_among_several
def options_without_an_order_and_a_parameter_listed_twice() -> None:
    unsharded, sharded = [], []
    for parameters, shard in ((unsharded, False), (sharded, True)):
        torch.manual_seed(0)
        twice, once = (nn.Parameter(torch.randn(count)) for count in (100, 7))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch's, about the parameter that is listed twice
            group = {"params": [twice, once, twice], "tags": {"one", "two", "three"}, "made by": object()}
            inner = torch.optim.SGD([group], 0.1, momentum=0.9)
        optimizer = DistributedOptimizer(inner, shard=shard)
        for _ in range(3):
            optimizer.zero_grad()
            ((twice * (RANK + 1)).sin().sum() + once.square().sum()).backward()
            optimizer.step()
        parameters += [twice, once]
        optimizer.close()
    for ours, theirs in zip(sharded, unsharded, strict=True):
        assert torch.equal(ours, theirs)


@check_among_several
def parameters_may_move() -> None:
    model, sharded, reference, plain = pair(adam)
    for one, optimizer in ((model, sharded), (reference, plain)):
        train(optimizer, one)
        for parameter in one.parameters():
            parameter.data = parameter.data.clone()
        train(optimizer, one)
    assert_equal(model, reference)
    plain.close()
    optimizer = sharded.optimizer
    model.large.weight.data = model.large.weight.data.half()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(RingError, match="large.weight was torch.float32 of shape .* and is torch.float16"):
        optimizer.step()
    sharded.close()


@check_among_several
def the_wrapped_optimizer_alone_is_rejected() -> None:
    model = Net()
    inner = adam(groups(model))
    optimizer = DistributedOptimizer(inner, model.named_parameters(), shard=True)
    train(optimizer, model)
    for use in (inner.step, inner.state_dict):
        with pytest.raises(RingError, match="this Adam is sharded among the ranks and has no state of its own"):
            use()
    state = optimizer.state_dict()
    inner.load_state_dict(state)  # reaches the slices
    assert_same_state(optimizer.state_dict(), state)
    optimizer.close()
    with pytest.raises(RingError, match="or shard it again if that one was closed"):
        inner.step()
    again = DistributedOptimizer(inner, model.named_parameters(), shard=True)
    assert_same_state(again.state_dict(), state)
    again.close()


@check_among_several
def copies_continue_when_they_are_sharded_again() -> None:
    model = Net()
    optimizer = DistributedOptimizer(adam(groups(model)), model.named_parameters(), shard=True)
    train(optimizer, model)
    saved = io.BytesIO()
    torch.save({"model": model, "optimizer": optimizer}, saved)
    saved.seek(0)
    copies = [torch.load(saved, weights_only=False), copy.deepcopy({"model": model, "optimizer": optimizer})]
    state = optimizer.state_dict()
    train(optimizer, model, range(6, 9))
    for twin in copies:
        outer, inner = twin["optimizer"], twin["optimizer"].optimizer
        for use in (outer.step, outer.zero_grad, inner.state_dict, partial(outer.load_state_dict, state)):
            with pytest.raises(RingError, match="is a copy"):
                use()
        its_model = twin["model"]
        with pytest.raises(ArgumentError, match="holds the state of a sharded one; pass shard=True"):
            DistributedOptimizer(twin["optimizer"].optimizer, its_model.named_parameters())
        anew = DistributedOptimizer(twin["optimizer"].optimizer, its_model.named_parameters(), shard=True)
        train(anew, its_model, range(6, 9))
        assert_equal(its_model, model)
        anew.close()
    optimizer.close()


@check_among_several
def ranks_that_differ_are_told() -> None:
    model, sharded, _, plain = pair(adam)
    plain.close()
    with torch.no_grad():
        model.scale.add_(float(RANK == 1))
    gradients(model, 0)
    before = weights(model)
    with pytest.raises(MismatchError, match=r"weights of rank.* differ .*first in scale.*broadcast_parameters"):
        sharded.step()
    assert torch.equal(weights(model), before)
    with torch.no_grad():
        model.scale.sub_(float(RANK == 1))
    sharded.param_groups[1]["lr"] = 0.1 * (1 + RANK)
    with pytest.raises(MismatchError, match=r"option lr of parameter group 1 is \['0.1', '0.2'"):
        sharded.step()
    sharded.param_groups[1]["lr"] = 0.1
    gradients(model, 0)
    if RANK == 0:
        model.large.weight.grad = None
    with pytest.raises(MismatchError, match=r"the gradient of large.weight is \['None', 'there'"):
        sharded.step()
    train(sharded, model)
    state = sharded.state_dict()
    state["state"] = {} if RANK == 0 else state["state"]
    sharded.load_state_dict(state)
    with pytest.raises(MismatchError, match=r"the loaded state is \['number"):
        train(sharded, model)
    sharded.close()
    sharded = ShardedOptimizer(torch.optim.Adam(model.parameters()))
    train(sharded, model)
    state = sharded.state_dict()
    if RANK == 0:
        sharded.load_state_dict({**state, "state": {}})
    with pytest.raises(MismatchError, match=r"the loaded state is \['number"):
        train(sharded, model)
    sharded.close()
    with pytest.raises(MismatchError, match="the models differ. First at parameter"):
        ShardedOptimizer(torch.optim.SGD(nn.Linear(3, 2 + RANK).parameters(), 0.1))


@check_among_several
def an_exception_on_one_rank_reaches_all() -> None:
    class Fails(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            super().step()
            if RANK == SIZE - 1:
                raise MemoryError("no memory left")

    model = Net()
    optimizer = DistributedOptimizer(Fails(groups(model), 0.1), model.named_parameters(), shard="slices")
    gradients(model, 0)
    error, text = (MemoryError, "no memory") if RANK == SIZE - 1 else (RingError, f"rank {SIZE - 1} was interrupted")

    def steps() -> None:
        optimizer.step()
        optimizer.optimizer.step()  # on a GPU, other ranks' hosts hear of it in the next step

    with pytest.raises(error, match=text):
        steps()
    with pytest.raises(RingError, match="interrupted in .*a sharded update"):
        optimizer.optimizer.step()
    assert [p.shape for g in optimizer.param_groups for p in g["params"]][:1] == [model.scale.shape]
    optimizer.close()
    ring.barrier()


@check
def an_optimizer_that_nobody_refers_to_is_released() -> None:
    model = Net()
    optimizer = DistributedOptimizer(adam(groups(model)), model.named_parameters(), shard=True)
    train(optimizer, model, range(1))
    inner = weakref.ref(optimizer.optimizer)
    del optimizer
    gc.collect()
    assert inner() is None


if os.environ.get("TEST_STATE"):  # of a run on any number of ranks: continues, or makes it
    CHECKS = []

    def continue_from_file() -> None:
        path = os.environ["TEST_STATE"]
        model = Net()
        optimizer = ShardedOptimizer(adam(groups(model)))
        first = not os.path.exists(path)
        if not first:
            saved = torch.load(path)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        for step in range(3) if first else range(3, 6):
            for number, parameter in enumerate(model.parameters()):
                generator = torch.Generator().manual_seed(100 * step + number)
                parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            optimizer.step()
        state = optimizer.state_dict(to=0)
        if RANK == 0 and first:
            torch.save({"model": model.state_dict(), "optimizer": state}, path)
        report("weights", float((weights(model) * torch.arange(1, weights(model).numel() + 1)).sum()).hex())
        optimizer.close()

    CHECKS.append(continue_from_file)

if __name__ == "__main__":
    only = os.environ.get("TEST_ONLY")
    run(one for one in CHECKS if not only or one.__name__ in only.split(","))
