"""Steps with the same samples on any number of ranks: weights are those of a plain loop in one process."""

import copy
import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, SubsetRandomSampler

import ring_plugins as ring
from ring_plugins.core.base.errors import ArgumentError, RingError
from ring_plugins.torch import DistributedOptimizer, ElasticSampler, GlobalBatches
from tests.launch import run_ranks
from tests.torch.checks_global_batch import BATCH, EPOCHS, GLOBAL, Model, alone, dataset, loss_of

CHECKS = Path(__file__).with_name("checks_global_batch.py")


@pytest.fixture
def job():
    ring.init(ranks=1)
    yield
    ring.shutdown()


def train(model, loader, exact, epochs=EPOCHS, stop=None, state=None, **options):
    optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters(), 0.05), model.named_parameters())
    steps = GlobalBatches(loader, optimizer, global_batch_size=GLOBAL, exact=exact, **options)
    if state is not None:
        steps.load_state_dict(state[0])
        optimizer.load_state_dict(state[1])
    done = 0
    while steps.state_dict()["epoch"] < epochs:
        for step in steps:
            if done == stop:
                return steps.state_dict(), optimizer.state_dict()
            for x, y in step:
                loss_of(model, x, y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            done += 1
    return None


@pytest.mark.parametrize("exact", [True, False])
def test_one_rank_trains_as_a_plain_loop_and_so_it_does_if_it_goes_on_from_a_checkpoint(job, exact):
    torch.manual_seed(1)
    model, loader = Model(), DataLoader(dataset(), BATCH, shuffle=True)
    expected = alone(copy.deepcopy(model), loader)
    state = train(model, loader, exact, stop=7)
    assert state[0] == {"epoch": 1, "samples": 2 * GLOBAL}
    train(model, loader, exact, state=state)
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other) if exact else torch.allclose(one, other, rtol=0, atol=1e-6)


def test_a_state_of_an_epochs_last_step_goes_on_with_none_of_it_and_with_its_own_samples(job):
    loader, optimizer = (
        DataLoader(range(8), 2, shuffle=True),
        DistributedOptimizer(torch.optim.SGD(Model().parameters())),
    )
    steps = GlobalBatches(loader, optimizer, global_batch_size=4, exact=True)
    seen = [[batch.tolist() for step in steps for batch in step] for _ in range(3)]
    steps.load_state_dict({"epoch": 0, "samples": 8})
    assert [*steps] == [] and [batch.tolist() for step in steps for batch in step] == seen[1]
    batches = [batch.tolist() for batch in next(iter(steps))]
    steps.load_state_dict({"epoch": 0, "samples": 4})  # the same place as now, in another epoch
    assert batches == seen[2][:2] and [batch.tolist() for step in steps for batch in step] == seen[0][2:]


def test_one_that_is_made_in_each_epoch_goes_on_with_the_next(job):
    """Else each epoch had the order of the first."""
    data = range(16)

    def steps_of(model, size=4):
        return GlobalBatches(DataLoader(data, 2, shuffle=True), model, global_batch_size=size)

    def seen(steps):
        return [batch.tolist() for step in steps for batch in step]

    models = [DistributedOptimizer(torch.optim.SGD(Model().parameters())) for _ in range(2)]
    kept = steps_of(models[0])
    expected = [seen(kept) for _ in range(3)]
    assert [seen(steps_of(models[1])) for _ in range(2)] == expected[:2] and expected[0] != expected[1]
    for step in steps_of(models[1]):
        assert [batch.tolist() for batch in step] == expected[2][:2]
        break
    assert seen(steps_of(models[1], 2)) == expected[2][2:], "behind a step that ended the loop"


def test_only_what_has_the_same_optimizer_and_samples_goes_on(job):
    """Else one that draws other samples left out its first ones, and a second training began where the first ended."""
    datasets, model = [list(range(8)), list(range(8, 16))], Model()

    def seen(optimizer, data, sampler=None, **options):
        loader = DataLoader(data, 2, shuffle=sampler is None, sampler=sampler)
        steps = GlobalBatches(loader, optimizer, global_batch_size=4, **options)
        return [batch.tolist() for step in steps for batch in step]

    optimizers = [DistributedOptimizer(torch.optim.SGD(model.parameters())) for _ in range(2)]
    epochs = [[seen(optimizers[0], data) for data in datasets] for _ in range(2)]
    assert all(first != second for first, second in zip(*epochs, strict=True)), "two datasets in turn"
    assert [seen(optimizers[1], datasets[0]) for _ in range(2)] == [epoch[0] for epoch in epochs]
    assert seen(optimizers[1], datasets[0], seed=1) == epochs[1][0], "of its epoch 0"
    first, second = (SubsetRandomSampler(range(begin, begin + 4)) for begin in (0, 4))
    loader = DataLoader(datasets[0], 2, sampler=first)
    steps = GlobalBatches(loader, optimizers[1], global_batch_size=2)
    for step in steps:
        assert len([*step]) == 1
        break
    assert {number for batch in seen(optimizers[1], datasets[0], second) for number in batch} == {4, 5, 6, 7}
    assert (
        len([batch for step in steps for batch in step]) == 1
        and steps._plan.place in optimizers[1].averager.checks.list
    )


def test_a_batch_that_does_not_need_all_parameters_clears_no_gradients(job):
    models = nn.ModuleList([nn.Linear(1, 1, bias=False) for _ in range(2)])
    optimizer = DistributedOptimizer(torch.optim.SGD(models.parameters(), 0.1))
    for step in GlobalBatches(DataLoader(torch.ones(4, 1), 2), optimizer, global_batch_size=4):
        for one, x in zip((1, 0), step, strict=True):
            models[one](x).mean().backward()
    assert [p.grad.item() for p in models.parameters()] == [0.5, 0.5]


class Numbers(IterableDataset):
    def __iter__(self):
        return iter(range(3))


def refused(loader, size=16, optimizer=None, exact=False, **options):
    model = nn.Linear(4, 1)
    optimizer = optimizer or DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), **options)
    with pytest.raises(ArgumentError) as caught:
        GlobalBatches(loader, optimizer, global_batch_size=size, exact=exact)
    return str(caught.value)


def test_what_cannot_be_divided_is_rejected(job):
    data = dataset()
    assert "global_batch_size=18 on rank 0 is no multiple of the loader's batch_size=4" in refused(
        DataLoader(data, 4), 18
    )
    assert "take 16 or 20" in refused(DataLoader(data, 4), 18)
    assert "take 4, or" in refused(DataLoader(data, 4), 2)
    for size in (0, 2.0, True):
        assert f"global_batch_size={size!r} is not a positive number" in refused(DataLoader(data, 4), size)
    assert "a Numbers, an IterableDataset" in refused(DataLoader(Numbers(), 4))
    assert "a batch sampler of its own (list)" in refused(DataLoader(data, batch_sampler=[[1], [2, 3]]))
    assert "is not a torch DataLoader" in refused([1, 2])
    for sampler in (DistributedSampler(data, 2, 0), ElasticSampler(data)):
        assert f"has a {type(sampler).__name__}, which divides samples" in refused(DataLoader(data, 4, sampler=sampler))
    assert "multiply global_batch_size by it" in refused(DataLoader(data, 4), backward_passes_per_step=2)
    refused_compression = refused(DataLoader(data, 4), exact=True, compression="fp16")
    assert "compression='fp16' of an optimizer has no effect with GlobalBatches(exact=True)" in refused_compression
    assert "was given a SGD" in refused(DataLoader(data, 4), optimizer=torch.optim.SGD(Model().parameters(), 0.1))
    with pytest.raises(ArgumentError, match="needs the DistributedOptimizers"):
        GlobalBatches(DataLoader(data, 4), global_batch_size=16)


def test_a_step_that_is_not_whole_is_an_error(job):
    model, loader = nn.Linear(4, 1), DataLoader(dataset(), BATCH)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))

    def clear(to_none):
        for x, y in next(iter(GlobalBatches(loader, optimizer, global_batch_size=GLOBAL))):
            optimizer.zero_grad(to_none)
            loss_of(model, x, y).backward()

    def leave():
        for step in GlobalBatches(loader, optimizer, global_batch_size=GLOBAL):
            next(iter(step))

    for to_none in (True, False):
        with pytest.raises(RingError, match="has cleared gradients between two batches of a step"):
            clear(to_none)
    with pytest.raises(RingError, match="has left the loop over a step of GlobalBatches before its end"):
        leave()


def test_an_incomplete_last_step_is_left_out_as_the_loader_says(job):
    optimizer = DistributedOptimizer(torch.optim.SGD(nn.Linear(4, 1).parameters(), 0.1))
    lengths = [
        len(GlobalBatches(DataLoader(dataset(), BATCH, drop_last=drops), optimizer, global_batch_size=GLOBAL))
        for drops in (False, True)
    ]
    assert lengths == [5, 4]


def test_seeding_costs_no_stack_for_devices_that_are_not_in_use(job, monkeypatch):
    """As `torch.manual_seed` does, which keeps it."""
    seed, seeded = torch.manual_seed, []
    monkeypatch.setattr(torch, "manual_seed", lambda number: seeded.append(number) or seed(number))
    optimizer = DistributedOptimizer(torch.optim.SGD(nn.Linear(4, 1).parameters(), 0.1))
    drawn = []
    for _ in range(2):
        steps = GlobalBatches(DataLoader(dataset(), BATCH), optimizer, global_batch_size=GLOBAL)
        drawn.append([torch.rand(1).item() for _ in next(iter(steps))] + [torch.rand(1).item()])
    assert drawn[0] == drawn[1] and len(set(drawn[0])) == 5
    assert len(seeded) <= 2  # for the order of the epoch


DIFFERENT = """
import torch
import ring_plugins as ring
from torch.utils.data import DataLoader, TensorDataset
from ring_plugins.core.base.errors import RingError
from ring_plugins.torch import DistributedOptimizer, GlobalBatches, SyncBatchNorm
from tests.worker import report

ring.init(ranks=2)
data = TensorDataset(torch.randn(64, 4))

def first_step(name, sampler, layer, exact):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), layer)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))
    try:
        for step in GlobalBatches(DataLoader(data, 4, sampler=sampler), optimizer, global_batch_size=12, exact=exact):
            for (x,) in step:
                model(x).square().mean().backward()
            optimizer.step()
    except RingError as error:
        report(name, f"{type(error).__name__}: {error}")
    optimizer.close()

own = range(64) if ring.rank() else range(63, -1, -1)
first_step("fast", own, torch.nn.Identity(), False)
first_step("exact", own, torch.nn.Identity(), True)
first_step("norm", None, SyncBatchNorm(4), False)
"""


@pytest.mark.slow
def test_orders_that_differ_and_layers_that_need_all_ranks_are_errors_on_all_ranks():
    result = run_ranks(DIFFERENT, 2, timeout=600)
    for name in ("fast", "exact"):
        for text in result.values(name):
            assert text.startswith(
                "MismatchError: the ranks' steps of GlobalBatches do not have the same samples: {0: "
            )
    assert all(text.startswith("ArgumentError: SyncBatchNorm needs all ranks") for text in result.values("norm"))
    assert len(result.values("norm")) == 2


def run(ranks, timeout=600, **env):
    told = {f"TEST_{key.upper()}": value if isinstance(value, str) else json.dumps(value) for key, value in env.items()}
    return run_ranks(CHECKS, ranks, env=told, timeout=timeout)


def check(result, slots, exact=True):
    for slot in slots:
        assert result.reports[slot][f"error {exact}"] < 1e-6, str(result)
        assert result.reports[slot][f"equal {exact}"] or not exact, str(result)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3, 4])
def test_weights_are_those_of_one_process_on_any_number_of_ranks(count):
    result = run(count, exact=[True, False], workers="1" if count == 2 else "0")
    check(result, range(count))
    check(result, range(count), exact=False)


@pytest.mark.slow
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("point", ["now", "SIGTERM"])
def test_a_step_in_which_a_rank_is_killed_or_leaves_has_all_of_its_samples(exact, point):
    result = run(4, failure="continue", exact=[exact], ends=[[1, 6, point]])
    check(result, [0, 2, 3], exact)
    history = result.reports[0]["history"]
    assert [times for _, times in history] == [1] * 6 + [2 if point == "now" else 1] + [1] * 8
    assert [size for size, _ in history[7:]] == [3] * 8


@pytest.mark.slow
@pytest.mark.parametrize("exact", [True, False])
def test_a_rank_that_is_killed_is_replaced_in_the_middle_of_an_epoch(exact):
    result = run(3, failure="replace", exact=[exact], ends=[[1, 6, "now"]], wanted="3", waits=[7])
    check(result, range(3), exact)
    sizes = [size for size, _ in result.reports[1]["history"]]
    assert sizes == [3] * 6 + [2] * (sizes.count(2)) + [3] * (9 - sizes.count(2)) and 0 < sizes.count(2) < 5


@pytest.mark.slow
def test_an_added_rank_joins_in_the_middle_of_an_epoch():
    result = run(2, failure="replace", most="3", exact=[False], added="6", wanted="3", waits=[7])
    check(result, range(3), False)
    sizes = [size for size, _ in result.reports[2]["history"]]
    assert sizes[:7] == [2] * 7 and sizes[-1] == 3
