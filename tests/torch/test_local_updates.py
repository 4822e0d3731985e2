"""Local updates: `checks_local_updates.py` on several ranks, and what one process can see."""

import contextlib
import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import ring_plugins as ring
from ring_plugins.torch import LocalUpdates
from ring_plugins.torch.local_updates import FlatWeights, floating_buffers
from tests.launch import run_ranks
from tests.torch.checks_local_recovery import STEPS, loss_of, network, optimizer_of

CHECKS = Path(__file__).with_name("checks_local_updates.py")
RECOVERY = Path(__file__).with_name("checks_local_recovery.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("started_by", "processes", "nodes"),
    [
        ("exported", 4, "2"),
        ("exported", 3, "1,2"),
        ("exported", 5, "1,1,3"),
        ("exported", 3, "3"),
        ("spawned", 2, ""),
        ("spawned", 1, ""),
    ],
)
def test_local_updates(started_by, processes, nodes):
    env = {"RING_VIRTUAL_NODES": nodes} if nodes else {}
    result = run_ranks(CHECKS, processes, started_by, env=env, timeout=300)
    for rank in range(processes):
        assert {*result.reports[rank].values()} == {"ok"}


@pytest.mark.slow
def test_nobody_warns_of_steps_without_averages():
    script = """
        import os, torch
        import ring_plugins as ring
        ring.init(ranks=int(os.environ["TEST_RANKS"]))
        from ring_plugins.torch import LocalUpdates, broadcast_parameters
        model = torch.nn.Linear(2, 2)
        broadcast_parameters(model)
        optimizer = LocalUpdates(torch.optim.SGD(model.parameters(), lr=0.1), model, every=1000)
        for _ in range(120):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        optimizer.finish()
    """
    result = run_ranks(script, 2, "exported", env={"RING_VIRTUAL_NODES": "1,1"}, timeout=100)
    assert "averaged" not in result.output


def replayed(history, ranks, outer, teams, joined=()):
    """The anchor of one process that has a model for each rank, and averages those that took part in each exchange.

    Args:
        teams: by rank, whose gradients were averaged in each step.
        joined: (step, rank) of those that got the anchor behind it, and the first other rank's optimizer.
    """
    models = [network() for _ in range(ranks)]
    flats = [FlatWeights([*model.parameters()], [*floating_buffers(model).values()]) for model in models]
    optimizers = [optimizer_of(model) for model in models]
    size = flats[0].trained + flats[0].averaged
    anchor, velocity = np.empty(size), np.zeros(size)
    flats[0].read(0, anchor)
    for step in range(STEPS + 1):
        for rank in range(ranks) if step < STEPS else ():
            optimizers[rank].zero_grad()
            team = teams[rank][step] if step < len(teams[rank]) else [rank]
            for other in team:
                with statistics_as_they_are(models[rank], other == rank):
                    (loss_of(models[rank], step, other) / len(team)).backward()
            optimizers[rank].step()
        for _, (start, middle, end), since in (one for one in history if one[0] == step):
            own = {int(rank): np.empty(end - start) for rank in since}
            for rank, array in own.items():
                flats[rank].read(start, array)
            mean = sum(array * since[str(rank)] for rank, array in own.items()) / sum(since.values())
            change = mean[: middle - start] - anchor[start:middle]
            velocity[start:middle] = outer[1] * velocity[start:middle] + change
            anchor[start:middle] += outer[0] * (change + outer[1] * velocity[start:middle])
            anchor[middle:end] = mean[middle - start :]
            for flat in flats:
                flat.write(start, anchor[start:end])
        for rank in (rank for at, rank in joined if at == step):
            optimizers[rank].load_state_dict(copy.deepcopy(optimizers[0 if rank else 1].state_dict()))
            flats[rank].write(0, anchor)
    return anchor


@contextlib.contextmanager
def statistics_as_they_are(model, are_own):
    """Inside the context, batches of other ranks leave a rank's statistics alone."""
    kept = [one.clone() for one in model.buffers()]
    yield
    for buffer, before in zip(model.buffers(), kept, strict=True):
        if not are_own:
            buffer.copy_(before)


def on_one_host(env):
    return run_ranks(RECOVERY, 3, env=env, timeout=120)


def lose(deaths, run=on_one_host, ranks=3, **options):
    """Train, lose ranks, and compare what the others have with what one process computes."""
    options = {"every": 4, **options}
    result = run({"TEST_DEATHS": json.dumps(deaths), "TEST_OPTIONS": json.dumps(options), "TEST_MIN": "1"})
    left = [rank for rank in range(ranks) if rank not in deaths]
    assert {*left} <= result.reports.keys(), str(result)
    found = [result.reports[rank]["found"] for rank in left]
    assert all(one == found[0] for one in found), str(result)
    history, changes = found[0]["history"], found[0]["changes"]
    outer = {"average": (1.0, 0.0), "nesterov": (0.9, 0.6)}[options.get("outer", "average")]
    teams = [result.reports.get(rank, {}).get("teams", []) for rank in range(ranks)]
    for rank in deaths:  # as its mates had it
        mates = [other for other in left if teams[other] and rank in teams[other][0]]
        teams[rank] = [team for team in teams[mates[0]] if rank in team] if mates else []
    if "compression" not in options and (run is not on_one_host or "within_host" in options):
        np.testing.assert_allclose(found[0]["anchor"], replayed(history, ranks, outer, teams), rtol=1e-9, atol=1e-11)
    assert all(set(map(str, left)) <= since.keys() for _, _, since in history)
    for rank, (last, point) in deaths.items():
        there = [str(rank) in since for _, _, since in history]
        assert there == sorted(there, reverse=True)
        assert all(is_there for (step, _, _), is_there in zip(history, there, strict=True) if step < last)
        assert point != "dies" or sum(there) == sum(step < last for step, _, _ in history)
    assert sorted(rank for one in changes for rank in [*one[1], *one[2]]) == sorted(deaths)
    assert not any(one[5] for one in changes)
    fragments = options.get("fragments", 1)
    gap = options["every"] // fragments
    at_the_end = [STEPS] if fragments > 1 or STEPS % gap else []
    assert sorted({step for step, _, _ in history}) == [*range(gap - 1, STEPS, gap), *at_the_end]
    return result, history, changes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("deaths", "options"),
    [
        ({0: [5, "dies"], 1: [7, "barrier 2 in"]}, {"within_host": False, "outer": "nesterov", "fragments": 2}),
        ({2: [7, "barrier 5 in"]}, {"within_host": False}),
        ({1: [5, "dies"], 0: [7, "barrier 5 in"]}, {"outer": "nesterov"}),  # they average every step
    ],
)
def test_ranks_of_one_host_may_be_killed_in_a_round(deaths, options):
    lose(deaths, **options)


def on_hosts(nodes):
    sizes = [int(one) for one in nodes.split(",")]
    return sum(sizes), lambda env: run_ranks(
        *(RECOVERY, sum(sizes), "exported"),
        env={**env, "RING_VIRTUAL_NODES": nodes, "TEST_MORTAL": "1"},
        timeout=120,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nodes", "deaths", "options"),
    [
        ("2,2", {0: [5, "dies"]}, {}),
        ("2,2", {1: [5, "barrier 1 in"]}, {"outer": "nesterov"}),
        ("2,2", {3: [5, "barrier 2 in"]}, {}),
        ("3,1", {1: [4, "barrier 3 in"]}, {"outer": "nesterov", "fragments": 2}),
        ("3,1", {0: [4, "barrier 2 in"], 2: [6, "barrier 1 in"]}, {}),
        ("2,2", {0: [3, "barrier 8 in"]}, {}),
        ("2,2", {1: [7, "barrier 12 in"]}, {"outer": "nesterov"}),
        ("2,2", {0: [5, "dies"], 3: [5, "barrier 2 in"]}, {"fragments": 4}),
        ("3,2", {1: [5, "dies"], 2: [9, "dies"], 4: [10, "barrier 1 in"]}, {}),
        ("2,2", {1: [5, "SIGTERM"]}, {"outer": "nesterov"}),
        ("2,2", {2: [5, "SIGTERM"], 1: [3, "dies"]}, {"fragments": 2}),
        ("2,2", {0: [13, "barrier 2 in"]}, {"compression": "int8"}),
    ],
    ids=str,
)
def test_a_host_goes_on_without_one_of_its_ranks_in_the_middle_of_a_round(nodes, deaths, options):
    ranks, run = on_hosts(nodes)
    lose(deaths, run, ranks, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("deaths", "options"),
    [
        ({1: [1, "dies"]}, {}),
        ({0: [3, "barrier 2 in"]}, {"outer": "nesterov", "fragments": 2}),
        ({2: [1, "SIGTERM"]}, {"compression": "int8"}),
    ],
)
def test_a_process_that_takes_a_place_begins_with_the_anchor(deaths, options):
    options = {"every": 4, "within_host": False, **options}
    env = {"TEST_DEATHS": json.dumps(deaths), "TEST_OPTIONS": json.dumps(options), "TEST_MIN": "1"}
    result = run_ranks(RECOVERY, 3, env=env | {"TEST_POLICY": "replace"}, timeout=120)
    found = [result.reports[rank]["found"] for rank in range(3)]
    assert all(one["bits"] == found[0]["bits"] for one in found), str(result)
    of_whole = found[next(rank for rank in range(3) if rank not in deaths)]
    joined = [(one[0], slot) for one in of_whole["changes"] for slot in one[5]]
    assert [slot for _, slot in joined] == [*deaths]
    step = joined[0][0]
    assert step in range(4, STEPS - 1)
    assert {len(since) for at, _, since in of_whole["history"] if at > step} == {3}
    if "compression" not in options:
        outer = (0.9, 0.6) if "outer" in options else (1.0, 0.0)
        expected = replayed(of_whole["history"], 3, outer, [[]] * 3, joined)
        np.testing.assert_allclose(of_whole["anchor"], expected, rtol=1e-9, atol=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("within_host", [True, False])
def test_an_added_rank_trains_with_the_others(within_host):
    script = """
        import json, os, torch
        import ring_plugins as ring
        from ring_plugins.launcher.growth import request_ranks
        from ring_plugins.torch import LocalUpdates, TrainingState
        from tests.joiners import wait_for_joiners
        from tests.worker import report
        ring.init(ranks=int(os.environ["TEST_RANKS"]), on_failure="replace", max_ranks=3)
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 8)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = LocalUpdates(inner, model, every=4, within_host=json.loads(os.environ["TEST_WITHIN_HOST"]))
        state = TrainingState(model=model, optimizer=optimizer, step=0)
        while state.step < 14:
            if state.step == 3 and ring.rank() == 0:
                request_ranks(1, os.getppid())
            if state.step >= 5 and ring.size() == 2:
                wait_for_joiners({2}, 60.0)
            optimizer.zero_grad()
            model(torch.full((1, 4), float(ring.rank()))).square().sum().backward()
            optimizer.step()
            state.step += 1
            state.commit()
        optimizer.finish()
        told = ring.all_gather_object(model.weight.detach())
        report("equal", all(torch.equal(one, told[0]) for one in told))
        report("ranks", (ring.size(), optimizer.averager.communicator.size, optimizer.exchanges))
    """
    result = run_ranks(script, 2, env={"TEST_WITHIN_HOST": json.dumps(within_host)}, timeout=120)
    assert result.values("equal") == [True] * 3
    averaging, exchanges = (3, 0) if within_host else (1, 4)
    assert result.values("ranks") == [[3, averaging, exchanges]] * 3


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "options"), [("1,1", {}), ("2,1", {"fragments": 2}), ("1,1", {"delay": 2})], ids=str)
def test_all_leave_at_one_exchange_when_a_rank_is_told_that_the_job_ends(nodes, options):
    script = """
        import json, os, signal, torch
        import ring_plugins as ring
        from ring_plugins.torch import LocalUpdates
        from tests.worker import report
        ring.init(ranks=int(os.environ["TEST_RANKS"]))
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 8)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = LocalUpdates(inner, model, every=4, **json.loads(os.environ["TEST_OPTIONS"]))
        step, is_early = 0, ring.rank() == ring.size() - 1
        ring.preempted()
        for step in range(2 if is_early else 40):  # the last rank has little data, and waits in finish()
            optimizer.zero_grad()
            model(torch.full((1, 4), float(ring.rank()))).square().sum().backward()
            optimizer.step()
            if ring.rank() == 0 and step == 9:
                os.kill(os.getpid(), signal.SIGTERM)
            if ring.preempted():
                break
        optimizer.finish()
        told = ring.all_gather_object(model.weight.detach())
        report("equal", all(torch.equal(one, told[0]) for one in told))
        report("steps", (step, ring.preempted(), optimizer.exchanges))
    """
    ranks, _ = on_hosts(nodes)
    env = {"RING_VIRTUAL_NODES": nodes, "TEST_OPTIONS": json.dumps(options)}
    result = run_ranks(script, ranks, "exported", env=env, timeout=100)
    assert result.values("equal") == [True] * ranks
    *others, last = result.values("steps")
    step = 13 if "delay" in options else 11
    assert others == [[step, True, last[2]]] * (ranks - 1)
    assert last[:2] == [1, True]


@pytest.mark.slow
def test_what_does_not_survive_a_loss_is_rejected_with_a_remedy():
    script = """
        import os, pytest, torch
        import ring_plugins as ring
        from ring_plugins.torch import LocalUpdates
        from tests.worker import report
        ring.init(ranks=3, on_failure=os.environ["TEST_POLICY"])
        model = torch.nn.Linear(2, 2)
        with pytest.raises(ring.ArgumentError) as caught:
            LocalUpdates(torch.optim.SGD(model.parameters(), lr=0.1), model, every=2, delay=1)
        report("text", str(caught.value))
    """
    for launcher, policy, text in (("exported", "continue", "LocalUpdates(delay=1) does not support on_failure="),):
        env = {"TEST_POLICY": policy} | ({"RING_VIRTUAL_NODES": "2,1"} if launcher == "exported" else {})
        texts = run_ranks(script, 3, launcher, env=env, timeout=100).values("text")
        assert len(texts) == 3
        assert all(text in one for one in texts)


@pytest.fixture
def job():
    ring.init()
    yield
    ring.shutdown()


def made(model=None, **options):
    model = nn.Linear(3, 2) if model is None else model
    return LocalUpdates(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), **options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"every": 0}, "every=0 must be a number of steps from 1, or a time"),
        ({"every": "fast"}, "every='fast' must be"),
        ({"fragments": 3}, "fragments=3 must divide every=64"),
        ({"every": "30s", "fragments": 2}, "fragments=2 must divide every='30s'.* or a number of steps"),
        ({"outer": (0.7, 1.0)}, r"outer=\(0.7, 1.0\) must be"),
        ({"outer": (0.7, 0.9), "steps": 300}, "with 4 exchanges: a momentum of 0.9 needs about 100.*steps 300"),
        ({"steps": 0}, "steps=0 must be"),
        ({"delay": 64}, "delay=64 must be 0, or a number of steps below every / fragments = 64"),
        ({"delay": 8, "fragments": 8}, "delay=8 must be .* below every / fragments = 8"),
        ({"delay": -1}, "delay=-1 must be 0"),
        ({"compression": "int4"}, "compression='int4' must be"),
        ({"compression": "auto"}, 'compression="auto" tries codecs .*: use "int8"'),
        ({"error_feedback": True}, "error_feedback=True needs compression"),
        ({"group": [0]}, "is not a ring_plugins.Group"),
    ],
)
def test_bad_arguments(job, options, text):
    with pytest.raises(ring.ArgumentError, match=text):
        made(**options)


def test_more_fragments_than_cache_lines(job):
    optimizer = made(nn.Linear(10, 3), every=64, fragments=4, outer="nesterov")
    with pytest.raises(ring.ArgumentError, match=r"fragments=4 are more than the 3 cache lines .* use fragments=3 or"):
        optimizer.step()


def test_one_host_that_averages_has_nothing_to_exchange(job):
    model = nn.Linear(3, 2)
    optimizer = made(model, every=1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.exchange()
    with optimizer.at_anchor():
        optimizer.finish()
    assert optimizer.exchanges == 0
    assert "local_updates" not in optimizer.state_dict()
    numbers = FlatWeights([*model.parameters()], []).trained
    of_more_hosts = {"anchor": torch.ones(numbers), "velocity": torch.zeros(0), "exchanges": 3.0}
    optimizer.load_state_dict({**optimizer.state_dict(), "local_updates": of_more_hosts})
    assert model.weight.eq(1).all()
    optimizer.step()
    with optimizer.at_anchor():  # which is that of the checkpoint no more
        assert not model.weight.eq(1).any()
    assert "local_updates" not in optimizer.state_dict()
    optimizer.close()


def test_an_outer_optimizer_may_work_for_one_rank_alone(job):
    """Nesterov's momentum as torch's SGD has it, with the change of the weights for a gradient."""
    model, anchor = nn.Linear(3, 2), nn.Linear(3, 2)
    anchor.load_state_dict(model.state_dict())
    outer = torch.optim.SGD(anchor.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    optimizer = made(model, every=2, outer=(0.7, 0.9))
    for step in range(6):
        optimizer.zero_grad()
        model(torch.full((1, 3), float(step))).square().sum().backward()
        before = [one.detach().clone() for one in model.parameters()]
        gradients = [one.grad for one in model.parameters()]
        optimizer.step()
        if step % 2:
            for mine, kept, old, gradient in zip(
                model.parameters(), anchor.parameters(), before, gradients, strict=True
            ):
                kept.grad = kept.detach() - (old - 0.1 * gradient)
                mine.detach()
            outer.step()
            torch.testing.assert_close(list(model.parameters()), list(anchor.parameters()))
    assert optimizer.exchanges == 3
    optimizer.close()


def test_parameters_that_come_later_are_an_error(job):
    model = nn.Linear(3, 2)
    optimizer = made(model, outer="nesterov")
    optimizer.step()
    with pytest.raises(ring.RingError, match=r"has 3 parameters now, and had 2"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    optimizer.close()


def test_a_state_of_another_model_is_an_error(job):
    optimizer, other = made(outer="nesterov"), made(nn.Linear(30, 2), outer="nesterov")
    optimizer.step()
    other.step()
    state = other.state_dict() | {"local_updates": optimizer.state_dict()["local_updates"]}
    with pytest.raises(ring.ArgumentError, match="has 16 numbers in its anchor, and here are 64"):
        other.load_state_dict(state)


def test_numbers_of_all_layouts_come_back_as_they_were():
    whole = torch.arange(48.0).reshape(2, 3, 2, 4).to(memory_format=torch.channels_last)
    parts = [whole, torch.tensor([1 + 2j, 3 + 4j]), torch.ones(5, dtype=torch.bfloat16)]
    weights = FlatWeights(parts, [torch.full((3,), 7.0)])
    assert (weights.dtype, weights.trained, weights.averaged) == ("float32", 64, 3)
    found = np.zeros(67, np.float32)
    weights.read(0, found)
    assert found.tolist() == [*range(48), 1, 2, 3, 4, *[1] * 5, *[0] * 7, 7, 7, 7]
    weights.write(40, found[40:50] + 1)
    assert whole.flatten()[38:].tolist() == [38, 39, *range(41, 49)]
    assert parts[1].tolist() == [2 + 3j, 3 + 4j]
    piece = np.zeros(4, np.float32)
    weights.read(46, piece)
    assert piece.tolist() == [47, 48, 2, 3]
