"""Local updates: what ranks that train by themselves have in common, against one process that simulates all of them.

Run by test_local_updates.py, on ranks that count as several hosts.
"""

# ruff: noqa: E402  # ranks that start before torch is imported import it in parallel

import contextlib
import copy
import io
import os
import time
from collections import Counter

import ring_plugins as ring

ring.init(ranks=int(os.environ["TEST_RANKS"]))

import pytest
import torch
from torch import nn

from ring_plugins.torch import DistributedOptimizer, LocalUpdates, broadcast_parameters
from tests.checks import run

torch.set_num_threads(1)
RANK, SIZE, HOST = ring.rank(), ring.size(), ring.node_rank()
HOSTS = ring.all_gather_object(HOST)
IS_ONE_HOST = ring.num_nodes() == 1
MANY = 64  # numbers of a network's layers, so that fragments have some


def network(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, MANY), nn.Tanh(), nn.Linear(MANY, 3)).to(dtype)


def batch(step, rank=RANK, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(4, 5, dtype=dtype, generator=generator)


def loss_of(model, data):
    return (model(data) - data[:, :3].square()).square().mean()


def flat(model):
    return torch.cat([one.detach().reshape(-1) for one in model.parameters()])


def train(model, optimizer, steps, first=0, dtype=torch.float64):
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss_of(model, batch(step, dtype=dtype)).backward()
        optimizer.step()


def are_equal(model, ranks=None):
    """Whether these ranks, by default all, have the same bits."""
    told = ring.all_gather_object(flat(model))
    return all(torch.equal(one, told[RANK]) for rank, one in enumerate(told) if ranks is None or rank in ranks)


@contextlib.contextmanager
def local_updates(model, kind=torch.optim.SGD, lr=0.1, of="model", **options):
    optimizer = LocalUpdates(
        kind(model.parameters(), lr=lr), model if of == "model" else model.named_parameters(), **options
    )
    yield optimizer
    optimizer.close()


def simulated(kind, steps, every, outer=(1.0, 0.0), fragments=1, teams=None, lr=0.1, delay=0):
    """What one process computes that has a model for each host, and exchanges them as the docs say; fragments apart."""
    teams = HOSTS if teams is None else teams
    models = {team: network() for team in dict.fromkeys(teams)}
    optimizers = {team: kind(model.parameters(), lr=lr) for team, model in models.items()}
    anchor = flat(network())
    velocity, lines = torch.zeros_like(anchor), -(-anchor.numel() // 8)
    cuts = [lines * i // fragments * 8 for i in range(fragments)] + [anchor.numel()]
    turn, under_way = 0, []

    def end_exchange(part, change, before):
        velocity[part] = outer[1] * velocity[part] + change
        anchor[part] += outer[0] * (change + outer[1] * velocity[part] if outer[1] else change)
        for team, model in models.items():
            whole = flat(model)
            whole[part] += anchor[part] - before[team]
            nn.utils.vector_to_parameters(whole.clone(), model.parameters())
            for one in model.parameters():
                one.data = one.data.clone()

    for step in range(steps):
        for team, model in models.items():
            optimizers[team].zero_grad()
            ranks = [rank for rank, its in enumerate(teams) if its == team]
            loss_of(model, torch.cat([batch(step, rank) for rank in ranks])).backward()
            optimizers[team].step()
        if under_way and under_way[0][0] == step:
            end_exchange(*under_way.pop()[1:])
        if (step + 1) % (every // fragments) == 0:
            part = slice(cuts[turn], cuts[turn + 1])
            turn = (turn + 1) % fragments
            change = (
                sum(Counter(teams)[team] * flat(model)[part] for team, model in models.items()) / len(teams)
                - anchor[part]
            )
            before = {team: flat(model)[part] for team, model in models.items()}
            if delay:
                under_way.append((step + delay, part, change, before))
            else:
                end_exchange(part, change, before)
    return flat(models[teams[RANK]])


def every_step_with_sgd_is_synchronous_training():
    model, other = network(torch.float32), network(torch.float32)
    synchronous = DistributedOptimizer(torch.optim.SGD(other.parameters(), lr=0.1), other.named_parameters())
    with local_updates(model, every=1) as optimizer:
        train(model, optimizer, 20, dtype=torch.float32)
        optimizer.finish()
    train(other, synchronous, 20, dtype=torch.float32)
    synchronous.close()
    torch.testing.assert_close(flat(model), flat(other), rtol=1e-6, atol=1e-6)
    assert are_equal(model)


def all_ranks_compute_what_one_process_does():
    for kind, every, outer, fragments, delay in (
        (torch.optim.SGD, 4, (1.0, 0.0), 1, 0),
        (torch.optim.Adam, 4, (0.9, 0.6), 1, 0),
        (torch.optim.Adam, 6, (0.7, 0.9), 3, 0),
        (torch.optim.SGD, 2, (1.0, 0.0), 2, 0),
        (torch.optim.Adam, 4, (0.9, 0.6), 1, 3),
        (torch.optim.SGD, 6, (1.0, 0.0), 3, 1),
    ):
        model = network()
        options = {"every": every, "outer": outer, "fragments": fragments, "delay": delay}
        with local_updates(model, kind, **options) as optimizer:
            train(model, optimizer, 2 * every + 1)
            assert are_equal(model, [rank for rank in range(SIZE) if HOSTS[rank] == HOST])
            expected = simulated(kind, 2 * every + 1, every, outer, fragments, delay=delay)
            torch.testing.assert_close(flat(model), expected, rtol=1e-9, atol=1e-11)
            with optimizer.at_anchor():
                assert are_equal(model) or (IS_ONE_HOST and optimizer.exchanges == 0)
            torch.testing.assert_close(flat(model), expected, rtol=1e-9, atol=1e-11)
            optimizer.finish()
            assert are_equal(model)


def each_rank_for_itself_if_wanted():
    model = network()
    with local_updates(model, torch.optim.Adam, every=5, within_host=False) as optimizer:
        train(model, optimizer, 12)
        torch.testing.assert_close(
            flat(model), simulated(torch.optim.Adam, 12, 5, teams=[*range(SIZE)]), rtol=1e-9, atol=1e-11
        )
        assert SIZE == 1 or not are_equal(model)
        optimizer.finish()
    assert are_equal(model)


def fewer_bits_give_all_ranks_the_same_and_nearly_the_same_as_all_bits():
    for name in ("int8", "bf16", "fp16"):
        models = [network(torch.float32), network(torch.float32)]
        for model, codec in zip(models, (None, name), strict=True):
            with local_updates(model, every=4, outer="nesterov", fragments=2, compression=codec) as optimizer:
                train(model, optimizer, 40, dtype=torch.float32)
                optimizer.finish()
            assert are_equal(model)
        torch.testing.assert_close(*map(flat, models), rtol=0.0, atol=5e-3)


def statistics_of_batches_are_averaged_with_the_weights():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)).double()
    with local_updates(model, every=3, outer=(0.9, 0.6), compression="int8") as optimizer:
        train(model, optimizer, 5)
        optimizer.finish()
    own = model[1].running_var.clone()
    assert (own > 0).all()
    if not IS_ONE_HOST:
        assert all(torch.equal(own, other) for other in ring.all_gather_object(own))
    assert not torch.equal(own, torch.ones_like(own))


def a_step_that_a_loss_scaler_leaves_out_counts():
    model = network(torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with local_updates(model, every=3) as optimizer:
        for step in range(7):
            optimizer.zero_grad()
            loss = loss_of(model, batch(step, dtype=torch.float32))
            scaler.scale(loss * (float("inf") if HOST == 0 and step in (0, 2, 3) else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        exchanges = ring.all_gather_object((optimizer.exchanges, optimizer._outer.steps))
        assert len(set(exchanges)) == 1
        assert exchanges[0] == (0 if IS_ONE_HOST else 2, 7)
        assert flat(model).isfinite().all()
        optimizer.finish()
    assert are_equal(model)


def a_step_that_a_host_skips_counts():
    model = network()
    with local_updates(model, every=2) as optimizer:
        for step in range(6):
            with optimizer.skip_step_on(ZeroDivisionError):
                optimizer.zero_grad()
                loss = loss_of(model, batch(step))
                if step == 3 and RANK == 0:
                    _ = 1 / 0
                loss.backward()
                optimizer.step()
        assert ring.all_gather_object(optimizer._outer.steps) == [6] * SIZE
        optimizer.finish()
    assert are_equal(model)


def gradients_accumulate_and_schedules_count_steps():
    model, other = network(), network()
    with local_updates(model, every=2, backward_passes_per_step=2) as optimizer:
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        for step in range(4):
            optimizer.zero_grad()
            for half in range(2):
                (loss_of(model, batch(step)[2 * half : 2 * half + 2]) / 2).backward()
            optimizer.step()
            schedule.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.025)
    with local_updates(other, every=2) as optimizer:
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        for step in range(4):
            train(other, optimizer, 1, step)
            schedule.step()
    torch.testing.assert_close(flat(model), flat(other), rtol=1e-9, atol=1e-11)


def optimizers_may_be_sharded_inside_a_host():
    model, other = network(), network()
    for one, shard in ((model, True), (other, False)):
        with local_updates(one, torch.optim.Adam, every=3, shard=shard) as optimizer:
            train(one, optimizer, 7)
            optimizer.finish()
    torch.testing.assert_close(flat(model), flat(other), rtol=1e-9, atol=1e-11)
    assert are_equal(model)


def hosts_may_have_different_numbers_of_steps():
    model = network()
    with local_updates(model, torch.optim.Adam, every=3, outer=(0.9, 0.6), fragments=3) as optimizer:
        train(model, optimizer, 4 + 5 * HOST)
        optimizer.finish()
        assert optimizer.exchanges >= 3
    assert are_equal(model)
    told = ring.all_gather_object(optimizer.exchanges)
    assert len(set(told)) == 1


def averages_are_weighted_by_steps():
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    with local_updates(model, lr=1.0, every=100) as optimizer:
        for _ in range(1 + 2 * HOST):  # each step adds the number of the host plus 1
            optimizer.zero_grad()
            (-(HOST + 1.0) * model.weight).sum().backward()
            optimizer.step()
        optimizer.finish()
    if not IS_ONE_HOST:
        steps = [1 + 2 * host for host in HOSTS]
        expected = sum(count * count * (host + 1) for count, host in zip(steps, HOSTS, strict=True)) / sum(steps)
        assert model.weight.item() == pytest.approx(expected, rel=1e-12)


def hosts_of_different_speeds_exchange_by_time():
    """The slower host has more steps here, so it goes on when the other has ended."""
    model, steps = network(), 20 + 10 * HOST
    with local_updates(model, every="0.2 s") as optimizer:
        for step in range(steps):
            train(model, optimizer, 1, step)
            time.sleep(0.02 * (1 + HOST))
        optimizer.finish()
        assert IS_ONE_HOST or 0 < optimizer.exchanges < 30
    assert are_equal(model)


def training_goes_on_from_a_checkpoint():
    model = network()
    options = {"every": 4, "outer": (0.9, 0.6)}
    with local_updates(model, torch.optim.Adam, **options) as optimizer:
        train(model, optimizer, 10)
        optimizer.exchange()
        assert are_equal(model)
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        train(model, optimizer, 9, 10)
        optimizer.finish()
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again = network()
    with local_updates(again, torch.optim.Adam, **options) as optimizer:
        nn.init.zeros_(again[0].weight)  # the anchor is in the optimizer's state
        optimizer.load_state_dict(saved["optimizer"])
        train(again, optimizer, 9, 10)
        optimizer.finish()
    torch.testing.assert_close(flat(again), flat(model), rtol=1e-12, atol=1e-13)
    plain = torch.optim.Adam(network().parameters())
    plain.load_state_dict(saved["optimizer"])  # what local updates add does not disturb others


def weights_may_be_loaded_and_broadcast_after_the_construction():
    torch.manual_seed(RANK)
    model = nn.Linear(3, 3)
    with local_updates(model, every=2) as optimizer:
        broadcast_parameters(model)
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.finish()
    assert are_equal(model)


def layouts_of_all_kinds():
    torch.manual_seed(0)
    model = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
    model.extra = nn.Parameter(torch.zeros(4, 2, dtype=torch.complex64))
    model.narrow = nn.Parameter(torch.ones(9, dtype=torch.bfloat16))
    with local_updates(model, every=2, fragments=2, within_host=False) as optimizer:
        for step in range(5):
            optimizer.zero_grad()
            x = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(10 * step + RANK))
            (
                model(x).square().mean() + (model.extra - (1 + 2j)).abs().square().mean() + model.narrow.square().mean()
            ).backward()
            optimizer.step()
        optimizer.finish()
    told = ring.all_gather_object([one.detach().clone() for one in model.parameters()])
    for other in told:
        assert all(map(torch.equal, other, told[0]))
    assert abs(model.extra.detach().mean() - (1 + 2j)) < abs(1 + 2j)
    assert model.narrow.detach().float().mean() < 1


def a_copy_is_no_rank():
    model = network()
    with local_updates(model, every=2) as optimizer:
        other = copy.deepcopy(optimizer)
        with pytest.raises(ring.RingError, match="is a copy"):
            other.step()


def what_differs_among_ranks_is_named():
    if SIZE == 1:
        return
    last = SIZE - 1
    there = f"on rank {last}"
    for options, text in (
        ({"every": 4 if last > RANK else 8}, f"every is 4 on rank 0 and 8 {there}"),
        (
            {"outer": "average" if last > RANK else "nesterov"},
            rf"outer is \(1.0, 0.0\) on rank 0 and .* on rank {last}",
        ),
        ({"fragments": 1 if last > RANK else 2}, f"fragments is 1 on rank 0 and 2 {there}"),
        ({"every": 64 if last > RANK else "30 s"}, f"every is 64 on rank 0 and 30s {there}"),
        ({"delay": 0 if last > RANK else 2}, f"delay is 0 on rank 0 and 2 {there}"),
        ({"within_host": last > RANK}, f"within_host is True on rank 0 and False {there}"),
        (
            {"compression": None if last > RANK else "int8"},
            f"compression is None on rank 0 and .*int8.* on rank {last}",
        ),
    ):
        with pytest.raises(ring.MismatchError, match=text), local_updates(network(), **options):
            pass
    other = nn.Linear(5, 3) if last == RANK else nn.Linear(5, 4)
    with (
        pytest.raises(ring.MismatchError, match=r"weight 0 of the model is .*4, 5.* on rank 0 and .*3, 5"),
        local_updates(other),
    ):
        pass
    if not IS_ONE_HOST:
        model = network()
        with torch.no_grad():
            model[2].bias[1] += HOST
        optimizer = LocalUpdates(torch.optim.SGD(model.parameters()), model, every=2)
        with pytest.raises(ring.MismatchError, match=r"before the first step .* 2.bias.*broadcast_parameters"):
            train(model, optimizer, 1)
        optimizer.close()


def an_anchor_that_differs_is_noticed():
    if IS_ONE_HOST:
        return
    model = network()
    optimizer = LocalUpdates(torch.optim.SGD(model.parameters()), model, every=2)
    train(model, optimizer, 2)
    state = copy.deepcopy(optimizer.state_dict())
    if RANK == SIZE - 1:
        state["local_updates"]["anchor"][3] += 1
    optimizer.load_state_dict(state)
    with pytest.raises(ring.DriftError, match=rf"anchors of rank {SIZE - 1} differ"):
        train(model, optimizer, 2)
    optimizer.close()


def one_bad_argument_is_heard_by_all():
    if SIZE == 1:
        return
    with pytest.raises(ring.RingError, match="every=0" if RANK == 0 else "every=0|rank 0"):
        LocalUpdates(torch.optim.SGD(network().parameters()), every=0 if RANK == 0 else 4)


run([
    every_step_with_sgd_is_synchronous_training,
    all_ranks_compute_what_one_process_does,
    each_rank_for_itself_if_wanted,
    fewer_bits_give_all_ranks_the_same_and_nearly_the_same_as_all_bits,
    statistics_of_batches_are_averaged_with_the_weights,
    a_step_that_a_loss_scaler_leaves_out_counts,
    a_step_that_a_host_skips_counts,
    gradients_accumulate_and_schedules_count_steps,
    optimizers_may_be_sharded_inside_a_host,
    hosts_may_have_different_numbers_of_steps,
    averages_are_weighted_by_steps,
    hosts_of_different_speeds_exchange_by_time,
    training_goes_on_from_a_checkpoint,
    weights_may_be_loaded_and_broadcast_after_the_construction,
    layouts_of_all_kinds,
    a_copy_is_no_rank,
    what_differs_among_ranks_is_named,
    an_anchor_that_differs_is_noticed,
    one_bad_argument_is_heard_by_all,
])  # fmt: skip
