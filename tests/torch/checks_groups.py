"""PyTorch in groups of ranks: what one process would compute on the batches of the group alone."""

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ring_plugins as ring
import ring_plugins.torch as rt
from ring_plugins.torch import DistributedOptimizer, GradientAverager, broadcast_optimizer_state, broadcast_parameters
from tests.checks import run

ring.init(ranks=int(os.environ["TEST_RANKS"]))
RANK, SIZE = ring.rank(), ring.size()
MINE = ring.Group(range(RANK % 2, SIZE, 2))
OTHER = ring.Group(range(1 - RANK % 2, SIZE, 2))


def batch(rank):
    return torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def weights(model):
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def trained(model, optimizer, data):
    for _ in range(4):
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
    return weights(model)


def alone(kind, ranks):
    """Of one process, on the concatenated batches of some ranks."""
    torch.manual_seed(ranks[0])
    model = nn.Linear(3, 2).double()
    return trained(model, kind(model.parameters(), lr=0.1), torch.cat(list(map(batch, ranks))))


def a_group_trains_as_one_process_on_its_batches():
    for kind, options in ((torch.optim.Adam, {}), (torch.optim.SGD, {}), (torch.optim.Adam, {"shard": True})):
        torch.manual_seed(RANK)
        model = nn.Linear(3, 2).double()
        broadcast_parameters(model, MINE.ranks[0], group=MINE)
        optimizer = DistributedOptimizer(
            kind(model.parameters(), lr=0.1), model.named_parameters(), group=MINE, drift_check_every=2, **options
        )
        if not options:
            broadcast_optimizer_state(optimizer, MINE.ranks[0], group=MINE)
        assert optimizer.averager.communicator.name.endswith(f"of {MINE.name}")
        own = trained(model, optimizer, batch(RANK))
        assert all(torch.equal(own, other) for other in ring.all_gather_object(own, group=MINE))
        torch.testing.assert_close(own, alone(kind, MINE.ranks), rtol=1e-10, atol=1e-12)
        optimizer.close()


def averagers_of_different_groups_have_different_parameters():
    torch.manual_seed(RANK)
    dense, expert, lonely = nn.Linear(3, 3).double(), nn.Linear(3, 2).double(), nn.Linear(2, 2).double()
    broadcast_parameters(dense)
    broadcast_parameters(expert, MINE.ranks[0], group=MINE)
    averagers = [
        GradientAverager(dense),
        GradientAverager(expert, group=MINE),
        GradientAverager(lonely, group=ring.Group([RANK])),
    ]
    together = nn.Sequential(dense, expert, lonely)
    optimizer = torch.optim.SGD(together.parameters(), lr=0.1)
    for _ in range(5):  # the weights are compared after two and four
        optimizer.zero_grad()
        together(batch(RANK)).square().mean().backward()
        own = torch.autograd.grad(together(batch(RANK)).square().mean(), [dense.weight, expert.weight, lonely.weight])
        for parameter, gradient, group in zip((dense, expert, lonely), own, (None, MINE, [RANK]), strict=True):
            among = gradient if group == [RANK] else ring.all_reduce(gradient, group=group)
            torch.testing.assert_close(parameter.weight.grad, among, rtol=1e-10, atol=1e-12)
        optimizer.step()
    for averager in averagers:
        averager.close()


def an_overflow_in_the_expert_of_one_group_is_one_on_all_ranks():  # as docs/groups.md says
    torch.manual_seed(0)
    dense, expert = nn.Linear(3, 3).double(), nn.Linear(3, 2).double()
    parts = (dense, None), (expert, MINE)
    optimizers = [
        DistributedOptimizer(torch.optim.Adam(m.parameters()), m.named_parameters(), group=g) for m, g in parts
    ]
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2)
    for step in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad()
        before = weights(dense)
        scaler.scale(expert(dense(batch(RANK))).square().mean()).backward()
        if step == 1 and RANK in (0, 2):
            expert.weight.grad *= float("inf")
        overflow = not all(parameter.grad.isfinite().all() for parameter in expert.parameters())
        if ring.all_reduce(float(overflow), ring.MAX):
            for parameter in [*dense.parameters(), *expert.parameters()]:
                parameter.grad.fill_(float("inf"))
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        assert torch.equal(before, weights(dense)) == (step == 1)
    assert ring.all_gather_object(scaler.get_scale()) == [16.0] * SIZE  # halved once, doubled once
    own = [weights(dense), weights(expert)]
    for others, group in zip(own, (None, MINE), strict=True):
        assert all(torch.equal(others, other) for other in ring.all_gather_object(others, group=group))
    for optimizer in optimizers:
        optimizer.close()


def gradients_pass_within_the_group():
    x = torch.full((MINE.size,), RANK + 1.0, dtype=torch.float64, requires_grad=True)
    places = torch.arange(1.0, MINE.size + 1, dtype=torch.float64)
    own = MINE.rank + 1
    expected = {
        "all_reduce": (rt.all_reduce(x, ring.SUM, group=MINE), places.sum().expand(MINE.size)),
        "all_gather": (rt.all_gather(x, group=MINE), places.sum().expand(MINE.size)),
        "reduce_scatter": (rt.reduce_scatter(x, ring.SUM, group=MINE), places),
        "all_to_all": (rt.all_to_all(x, group=MINE), places),
        "broadcast": (
            rt.broadcast(x, MINE.ranks[-1], group=MINE),
            places.sum().expand(MINE.size) * (MINE.ranks[-1] == RANK),
        ),
    }
    for name, (result, gradient) in reversed(expected.items()):
        (found,) = torch.autograd.grad((result * own).sum(), x, create_graph=True)
        assert torch.equal(found, gradient), (name, found, gradient)


def groups_may_have_had_different_numbers_of_collectives():
    x = y = torch.ones(2, dtype=torch.float64, requires_grad=True)
    for _ in range(1 + RANK % 2):
        y = rt.all_reduce(y, ring.SUM, group=MINE)
    rt.all_reduce(y.sum().reshape(1), ring.AVERAGE).sum().backward()
    assert x.grad.tolist() == [float(MINE.size) ** (1 + RANK % 2)] * 2


def options_are_compared_within_the_group():
    model = nn.Linear(3, 2).double()
    broadcast_parameters(model)
    rate = 0.1 if RANK % 2 else 0.2  # each group has its own
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=rate), group=MINE)
    trained(model, optimizer, batch(RANK))
    if RANK == 2:
        optimizer.param_groups[0]["lr"] = 0.3
    if RANK % 2:
        trained(model, optimizer, batch(RANK))
    else:
        with pytest.raises(ring.MismatchError, match=r"differ among ranks \(ranks? 0.*: lr=0.2.*rank 2: lr=0.3"):
            trained(model, optimizer, batch(RANK))
    optimizer.close()
    with pytest.raises(ring.MismatchError, match=rf"rank {MINE.ranks[0]} has .* rank {MINE.ranks[1]} has"):
        broadcast_parameters(nn.Linear(MINE.rank + 1, 1), MINE.ranks[0], group=MINE)


def ranks_of_a_group_run_out_of_data_without_the_others():
    model = nn.Linear(2, 1).double()
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    dense = nn.Linear(1, 1).double()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), group=MINE)
    of_all = DistributedOptimizer(torch.optim.SGD(dense.parameters(), lr=1.0))
    broadcast_parameters(dense)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    with rt.join(optimizer, scheduler, of_all) as joined:
        for _ in range(2 + RANK):
            optimizer.zero_grad()
            of_all.zero_grad()
            (model(torch.full((1, 2), float(RANK), dtype=torch.float64)) + dense(torch.ones(1, 1).double())).backward()
            optimizer.step()
            of_all.step()
            scheduler.step()
    present = [[rank for rank in MINE.ranks if rank + 2 > step] for step in range(2 + MINE.ranks[-1])]
    expected = -sum(sum(ranks) / len(ranks) for ranks in present)
    assert model.weight.tolist() == [[pytest.approx(expected)] * 2]
    assert (joined.last, scheduler.last_epoch) == (MINE.ranks[-1], 2 + MINE.ranks[-1])
    assert len(set(map(float, ring.all_gather(dense.weight.detach().flatten())))) == 1
    optimizer.close()
    of_all.close()


def a_rank_outside_is_refused_at_once():
    model = nn.Linear(1, 1)
    for call in (
        lambda: GradientAverager(model, group=OTHER),
        lambda: DistributedOptimizer(torch.optim.SGD(model.parameters()), group=OTHER),
        lambda: broadcast_parameters(model, OTHER.ranks[0], group=OTHER),
        lambda: broadcast_optimizer_state(torch.optim.SGD(model.parameters()), OTHER.ranks[0], group=OTHER),
        lambda: rt.all_reduce(torch.ones(1), group=OTHER),
    ):
        with pytest.raises(ring.ArgumentError, match=rf"rank {RANK} is not in the group of rank"):
            call()
    ring.barrier()


def torchs_groups_have_the_same_ranks():
    dist.init_process_group("ring")
    for backend in ("ring", "gloo"):
        of_torch = [dist.new_group([*range(first, SIZE, 2)], backend=backend) for first in (0, 1)]
        mine, other = ring.Group.of(of_torch[RANK % 2]), ring.Group.of(of_torch[1 - RANK % 2])
        assert mine.ranks == MINE.ranks and other.rank is None
        assert ring.all_gather_object(RANK, group=mine) == [*MINE.ranks]
    dist.destroy_process_group()


if __name__ == "__main__":
    run(
        [
            a_group_trains_as_one_process_on_its_batches,
            averagers_of_different_groups_have_different_parameters,
            an_overflow_in_the_expert_of_one_group_is_one_on_all_ranks,
            gradients_pass_within_the_group,
            groups_may_have_had_different_numbers_of_collectives,
            options_are_compared_within_the_group,
            ranks_of_a_group_run_out_of_data_without_the_others,
            a_rank_outside_is_refused_at_once,
            torchs_groups_have_the_same_ranks,
        ]
    )
