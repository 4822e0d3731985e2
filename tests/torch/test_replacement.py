"""Ranks are killed and other processes take their places: all end with the weights that a replay of the steps gives."""

import json
import sys
from pathlib import Path

import pytest
import torch

from tests.core.rendezvous.test_launcher_shim import LAUNCHERS, command
from tests.launch import run_ranks, slowness
from tests.torch.checks_replacement import BATCHES, EPOCHS, gradient

CHECKS = Path(__file__).with_name("checks_replacement.py")


def train(deaths, ranks=3, env=None, pending=True, **options):
    env = {
        "TEST_DEATHS": json.dumps(deaths),
        **({"TEST_PENDING": str(60 * slowness())} if pending else {}),
        **(env or {}),
    }
    return run_ranks(CHECKS, ranks, env=env, timeout=120, **options)


def replayed(averaged_over, batches=BATCHES, ends=()):
    """The weight of every parameter after one process has taken the same averages, with the same schedule.

    Epochs have so many batches, or end with these numbers of steps.
    """
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.5, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for step, slots in enumerate(averaged_over):
        weight.grad = torch.full((1,), sum(gradient(step, slot) for slot in slots) / len(slots))
        optimizer.step()
        if step + 1 in ends or not (ends or (step + 1) % batches):
            scheduler.step()
    return weight.tolist()


def check(result, slots=range(3), epochs=EPOCHS, steps=EPOCHS * BATCHES):
    """That all ranks of the end have the same, and what a replay gives; returns it, and what each has seen itself."""
    found = [result.reports[slot]["found"] for slot in slots]
    assert all(one == found[0] for one in found), str(result)
    assert len(found[0]["history"]) == found[0]["ends"][-1] == steps and len(found[0]["ends"]) == epochs
    assert found[0]["weights"] == [replayed(found[0]["history"], ends=found[0]["ends"])] * 3
    assert found[0]["sum"] == [sum(slots) + len(slots)]
    assert found[0]["rates"] == [0.5 * 0.5**epochs]
    assert found[0]["ranks"] == [[rank, len(found), slot] for rank, slot in enumerate(slots)]
    return found[0], [result.reports[slot]["own"] for slot in slots]


def test_another_process_takes_the_place_of_rank_0_and_the_job_grows():
    """The default suite's one job. In the second epoch four ranks share the 18 samples, two of them twice."""
    result = train([[0, 2, "now"]], env={"TEST_ADDED": "[[1, 3, 1]]", "TEST_MOST": "4"})
    found, own = check(result, range(4), steps=6 + 5)
    everyone, left = [0, 1, 2], [1, 2]
    assert found["history"] == [everyone] * 2 + [left] * 2 + [everyone] * 2 + [[*everyone, 3]] * 5
    assert found["numbers"] == [4, 1, 2, 3]
    assert [one["joined at"] for one in own] == [4, None, None, 6]
    # Only the commit in which a process joins exchanges anything: gradients carry the places that are compared.
    assert [[step for step, count in enumerate(one["exchanges"]) if count] for one in own] == [[], [3], [3], []]
    joined, grown = [[], [], [4], 2], [[], [], [3], 3]
    assert [one["changes"] for one in own] == [[joined, grown], *[[[[0], [], [], 3], joined, grown]] * 2, [grown]]
    assert result.reports[1]["answer"] == "rank 3 will join where an epoch begins."
    assert "ring run: starting another process as rank 3.\n" in result.output
    assert "as an added rank joined; the job goes on with 4 ranks since" in result.output
    assert (
        "the job goes on with 2 of its 3 ranks" in result.output and "Another process takes its place." in result.output
    )
    assert "ring run: starting another process in the place of rank 0.\n" in result.output
    assert "in the place of rank 0 joined; the job goes on with 3 ranks since" in result.output
    assert "Errors keep the old numbers: rank 4 is now 0." in result.output
    assert (
        "ring run: rank 3 joined, other processes took the place of rank 0, and all 4 ended normally." in result.output
    )


@pytest.mark.slow
def test_a_standby_takes_the_place_at_once_and_the_next_one_that_of_the_next_rank():
    """RING_STANDBYS is what `ring run --standbys` reads, too."""
    result = train([[0, 2, "now"], [2, 7, "now"]], env={"RING_STANDBYS": "1"})
    found, _ = check(result)
    assert found["history"] == [[0, 1, 2]] * 2 + [[1, 2]] * 2 + [[0, 1, 2]] * 3 + [[0, 1]] * 2 + [[0, 1, 2]] * 3
    assert found["numbers"] == [3, 1, 4]
    assert "ring run: a standby process takes the place of rank 0.\n" in result.output
    assert "ring run: a standby process takes the place of rank 2.\n" in result.output
    assert "starting another process" not in result.output and "before it was needed" not in result.output


@pytest.mark.slow
def test_a_standby_that_is_killed_while_it_waits_is_replaced_and_so_is_one_that_is_killed_while_it_joins():
    result = train([[1, 2, "now"]], env={"RING_STANDBYS": "1", "TEST_KILLED_STANDBY": "3"})
    found, _ = check(result)
    assert found["numbers"] == [0, 4, 2]
    assert "a standby process was killed by SIGKILL (out of memory? `kill -9`?) before it was needed." in result.output
    found, _ = check(train([[1, 2, "now"], [1, 0, "joiner round 2 in"]], env={"RING_STANDBYS": "1"}))
    assert found["numbers"] == [0, 4, 2]


@pytest.mark.slow
@pytest.mark.parametrize("point", [f"joiner round {n} {when}" for n in (1, 2, 3) for when in ("before", "in")])
def test_a_joiner_may_die_while_it_joins_and_the_next_one_joins(point):
    found, own = check(train([[1, 2, "now"], [1, 0, point]]))
    assert found["numbers"] == [0, 4, 2]
    has_joined = "round 3" in point  # in which the members decide
    assert [change[2] for change in own[0]["changes"] if change[2]] == [*[[3]] * has_joined, [4]]


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2, 3])
def test_nobody_waits_long_for_a_joiner_that_is_stopped_while_it_joins(number):
    result = train([[1, 2, "now"], [1, 0, f"joiner round {number} stopped"]])
    found, _ = check(result)
    assert found["numbers"] == [0, 4, 2]
    text = "which was to join as rank 3, has not answered for 2 s (stopped?). It was killed, and the"
    if number == 3:  # behind which it is a member, as soon as the others have decided
        text = "which has joined as rank 3, did not go on for 2 s (stopped?). It was killed."
    assert text in result.output


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("standbys", [False, True])
def test_lost_ranks_are_replaced_under_launchers_by_standbys_too(launcher, standbys):
    result = train(
        [[1, 2, "now"], [0, 6, "now"]], launcher=command(launcher, 3), env={"RING_STANDBYS": "1"} if standbys else {}
    )
    found, _ = check(result)
    assert found["numbers"] == [4, 3, 2]
    taken = "a standby process takes" if standbys else "starting another process in"
    assert result.output.count(f"ring run: {taken} the place of rank") == 2


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("point", [f"round {n} {when}" for n in (1, 2, 3) for when in ("before", "in")])
def test_so_may_a_member_while_another_process_joins(victim, point):
    found, _ = check(train([[1, 2, "now"], [victim, 3, point]]))
    assert sorted(found["numbers"]) == sorted([3, 4, 2 - victim])


@pytest.mark.slow
@pytest.mark.parametrize(
    "deaths",
    [
        [[0, 2, "now"], [1, 2, "now"]],
        [[0, 2, "barrier 2 in"], [0, 6, "joiner now"], [2, 9, "now"]],
        [[0, 1, "now"], [1, 3, "now"], [2, 5, "now"]],
        [[1, 0, "now"]],  # before the ranks have compared their weights after their first step
        [[1, 2, "SIGTERM"]],
        [[1, 5, "now"], [2, 11, "now"]],
    ],
)
def test_several_may_be_replaced_at_once_or_in_a_row_and_those_that_left(deaths):
    result = train(deaths, env={"TEST_WORKERS": "1"} if deaths[0][2] == "SIGTERM" else {})
    ends_alone = [2] if deaths[-1][1] == EPOCHS * BATCHES - 1 else []
    check(result, [slot for slot in range(3) if slot not in ends_alone])
    said = "nobody had joined yet in the place of rank 2, and the other 2 ended normally." in result.output
    assert said == bool(ends_alone), result


#: As docs/fault_tolerance.md starts train.py.
GROWING = [sys.executable, "-m", "ring_plugins", "run", "-n", "2", "--on-failure", "replace", "--max-ranks", "4"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("deaths", "numbers"),
    [
        ([], [0, 1, 2, 3]),
        ([[2, 7, "joiner now"], [1, 7, "now"]], None),
        *(([[2, 0, f"joiner round {n} {when}"]], [0, 1, 4, 3]) for n in (1, 3) for when in ("before", "in")),
        ([[3, 0, "joiner round 2 stopped"]], [0, 1, 2, 4]),
        *(([[victim, 5, f"round {n} in"]], None) for victim, n in ((0, 2), (1, 3))),
    ],
)
@pytest.mark.parametrize("standbys", ["0", "1"])
def test_a_job_grows_from_two_to_four_ranks_whoever_dies_meanwhile(deaths, numbers, standbys):
    env = {"TEST_ADDED": "[[1, 1, 2]]", "TEST_MOST": "4", "TEST_EPOCHS": "4", "RING_STANDBYS": standbys}
    result = train(deaths, ranks=2, env=env, launcher=[*GROWING, sys.executable])
    found = result.reports[0]["found"]
    check(result, range(4), epochs=4, steps=found["ends"][-1])
    assert found["history"][:5] == [[0, 1]] * 5 and found["history"][-1] == [0, 1, 2, 3]
    assert found["ends"][0] == 6 and found["ends"][-1] - found["ends"][-2] == 3
    assert standbys == "1" or numbers in (None, found["numbers"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("load raises", "KeyError: 'a script that cannot load'"),
        ("load exits", "SystemExit: 3"),
        ("load misfits", "size mismatch for 0: copying a param with shape torch.Size([2])"),
        ("load has fewer batches", "this loader has 1 batches, and had 6 on the ranks that this process has joined."),
    ],
)
def test_a_process_that_cannot_load_the_state_ends_alone_and_the_next_one_joins(fault, text):
    result = train([[1, 2, "now"], [1, 0, f"joiner {fault}"]])
    found, own = check(result)
    assert found["numbers"] == [0, 4, 2]
    assert [change[2] for change in own[0]["changes"] if change[2]] == [[3], [4]]
    assert text in result.output and "which has joined" not in result.output
    assert "It ends, and the other ranks go on without it:" in result.output
    assert "rank 3 (process" in result.output and ") died; the job goes on with 2 of its 3 ranks" in result.output


@pytest.mark.slow
def test_a_member_that_cannot_make_the_state_goes_on_and_the_next_one_gives_it():
    """Rank 0 cannot give it. Once rank 0 has been replaced, too, its process can."""
    result = train([[1, 2, "now"], [0, 7, "now"]], env={"TEST_GIVES": "0"})
    found, _ = check(result)
    assert found["numbers"][0] > 3 < found["numbers"][1]
    assert "rank 0 could not give the state of the training (KeyError: 'a state that cannot be made')" in result.output
    assert "ArgumentError: rank 0 could not give the state" in result.output


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["raises", "load raises"])
def test_a_script_that_fails_again_and_again_is_started_a_few_times(fault, tmp_path):
    """Before it joins, or when it has joined. The others wait for all of them."""
    deaths, env = [[1, 2, "now"], [1, 0, f"every joiner {fault}"]], {"TEST_FAILURES": str(tmp_path / "failures")}
    result = train(deaths, pending=False, env=env)
    found, own = check(result, [0, 2])
    assert found["history"][2:] == [[0, 2]] * (EPOCHS * BATCHES - 2)
    assert len([change for change in own[0]["changes"] if change[2]]) == (5 if fault == "load raises" else 0)
    assert result.output.count("ring run: starting another process in the place of rank 1.") == 5
    assert result.output.count("rank 1 was replaced 5 times within an hour; the job goes on without it.") == 1


@pytest.mark.slow
def test_the_job_ends_when_fewer_than_min_ranks_are_left():
    """Started as docs/fault_tolerance.md starts train.py."""
    ring_run = [sys.executable, "-m", "ring_plugins", "run", "-n", "3", "--on-failure", "replace", "--min-ranks", "3"]
    result = train([[1, 2, "now"]], env={"TEST_MIN": "3"}, launcher=[*ring_run, sys.executable], check=False)
    assert result.returncode == 1 and not any("found" in report for report in result.reports.values())
    assert "Training cannot go on with 2 ranks: min_ranks=3." in result.output


#: Rank 1 dies in its second step; the others wait for whoever takes its place, in every step.
SCRIPT = """
    import os, signal, time, torch
    import ring_plugins as ring
    from ring_plugins.core.rendezvous.spawn import slots
    from ring_plugins.core.world import current
    from ring_plugins.torch import DistributedOptimizer, TrainingState
    from tests.worker import report

    ring.init(ranks=2, on_failure="replace")
    is_new = current().is_joining
    model = torch.nn.Linear(2, 1)
    if "TEST_BROADCASTS" in os.environ:
        ring.broadcast_object(3 if ring.rank() == 0 else None)
    if "TEST_ORDER" in os.environ:  # the numbers of parameters, and their shapes, tell nobody of it
        model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False))
        parameters = list(model.parameters())[:: -1 if is_new else 1]
        optimizer = DistributedOptimizer(torch.optim.SGD(parameters, 0.1))
    else:
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
    state = None
    if "TEST_STATELESS" not in os.environ:
        state = TrainingState(model=model, optimizer=optimizer, epoch=0)
    if "TEST_SECOND_STATE" in os.environ:
        second = TrainingState(seen=0)
    for epoch in range(state.epoch if state else 0, 3):
        if state:
            state.epoch = epoch
        if "TEST_EPOCHS" in os.environ:
            state.commit()
        for step in range(4):
            if ring.rank() == 1 and not is_new and (epoch, step) == (0, 1):
                os.kill(os.getpid(), signal.SIGKILL)
            end = time.monotonic() + float(os.environ.get("TEST_PATIENCE", "20"))
            if {"TEST_SECOND_STATE", "TEST_ORDER"} & {*os.environ} and (epoch, step) == (0, 2):  # rejected at a commit
                end += 60
            while len(current().world_ranks) == 1 and not slots().has_waiting() and time.monotonic() < end:
                time.sleep(0.01)
            optimizer.zero_grad()
            model(torch.ones(2)).sum().backward()
            optimizer.step()
            if state and "TEST_EPOCHS" not in os.environ:
                state.commit()
    report("left", [ring.size(), epoch, is_new], ring.rank())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variable", "text"),
    [
        (
            "TEST_STATELESS",
            'averages gradients before it has joined the others: with on_failure="replace", make a ring',
        ),
        (
            "TEST_BROADCASTS",
            "broadcast_object() was called in a process that takes the place of a lost rank, before it",
        ),
        (
            "TEST_SECOND_STATE",
            "has come to another place (TrainingState 1 of 1 made so far, of model, optimizer, epoch",
        ),
        (
            "TEST_ORDER",
            "optimizer averages model.1.weight, model.0.weight in the order",
        ),
    ],
)
def test_a_script_that_cannot_join_is_told_why_and_disturbs_nobody(variable, text):
    result = run_ranks(SCRIPT, 2, env={variable: "1", "TEST_PATIENCE": "1.5"}, timeout=120)
    assert result.reports == {0: {"left": [1, 2, False]}}
    assert text in result.output


#: Rank 1 dies in its second step; the other one goes on until a process has waited for some seconds.
WITHOUT_COMMITS = """
    import os, signal, time
    import ring_plugins as ring
    from ring_plugins.core.rendezvous.spawn import slots
    from ring_plugins.torch import TrainingState
    from tests.worker import report

    ring.init(ranks=2, on_failure="replace")
    state, waits, since = TrainingState(step=0), 0.0, time.monotonic()
    while waits < 7:
        if ring.rank() == 1 and state.step == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        ring.all_reduce(1.0)
        state.step += 1
        time.sleep(0.01)
        since = since if slots().has_waiting() else time.monotonic()
        waits = time.monotonic() - since
    report("left", ring.size(), ring.rank())
"""


@pytest.mark.slow
def test_a_process_that_waits_for_a_loop_without_commits_says_that_it_needs_them():
    result = run_ranks(WITHOUT_COMMITS, 2, timeout=120)
    assert result.reports == {0: {"left": 1}}
    assert "waits for rank 0 to average gradients and call TrainingState.commit(), after 5 s" in result.output


@pytest.mark.slow
def test_without_batches_ranks_at_different_places_are_an_error():
    result = run_ranks(SCRIPT, 2, timeout=120, check=False)
    assert result.returncode == 1
    assert "ranks are at different places of the training since a process has joined: {0: {'epoch': " in result.output


@pytest.mark.slow
def test_a_process_joins_where_an_epoch_begins():
    result = run_ranks(SCRIPT, 2, env={"TEST_EPOCHS": "1"}, timeout=120)
    assert result.reports == {0: {"left": [2, 2, False]}, 1: {"left": [2, 2, True]}}


#: Rank 1 dies in the second of its steps of two backward passes; rank 0 waits for the process that takes its place.
ACCUMULATING = """
    import contextlib, os, signal, time, torch
    import ring_plugins as ring
    from ring_plugins.core.rendezvous.spawn import slots
    from ring_plugins.core.world import current
    from ring_plugins.torch import DistributedOptimizer, TrainingState
    from tests.worker import report

    ring.init(ranks=2, on_failure="replace")
    is_new = current().is_joining
    model = torch.nn.Linear(2, 1)
    torch.nn.init.zeros_(model.bias)
    counted = {"backward_passes_per_step": 2} if os.environ["TEST_BY"] == "passes" else {}
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 1.0), model.named_parameters(), **counted)
    state = TrainingState(model=model, optimizer=optimizer, epoch=0)

    @ring.on_membership_change  # behind the place at which a process joins
    def follow(change):
        optimizer.param_groups[0]["lr"] *= change.size / change.size_before

    for state.epoch in range(state.epoch, 2):
        for half in state.batches(range(8)):
            if ring.rank() == 1 and not is_new and (state.epoch, half) == (0, 3):
                os.kill(os.getpid(), signal.SIGKILL)
            while half == 4 and len(current().world_ranks) == 1 and not slots().has_waiting():
                time.sleep(0.01)
            if half % 2 == 0:
                optimizer.zero_grad()
            with optimizer.no_sync() if not counted and half % 2 == 0 else contextlib.nullcontext():
                model(torch.full((2,), 1e-3)).sum().backward()
            if half % 2:
                optimizer.step()
            state.commit()
    report("left", [ring.size(), optimizer.param_groups[0]["lr"], is_new, model.bias.item()], ring.rank())
"""


@pytest.mark.slow
@pytest.mark.parametrize("by", ["passes", "no_sync"])
def test_a_process_joins_a_script_that_commits_after_each_pass_and_hears_of_it_in_a_function_added_later(by):
    """Its first `commit` is one before which it has communicated nothing, and it counts."""
    result = run_ranks(ACCUMULATING, 2, env={"TEST_BY": by}, timeout=120)
    # Eight steps of two, two of them at half the rate: it joins behind a step, though it waits since the middle of one.
    assert result.reports == {0: {"left": [2, 1.0, False, -14.0]}, 1: {"left": [2, 1.0, True, -14.0]}}


#: Rank 1 dies in its third step; rank 0 waits for the process that takes its place.
CHANNELS_LAST = """
    import hashlib, os, signal, time, torch
    import ring_plugins as ring
    from ring_plugins.core.rendezvous.spawn import slots
    from ring_plugins.core.world import current
    from ring_plugins.torch import DistributedOptimizer, TrainingState
    from tests.worker import report

    ring.init(ranks=2, on_failure="replace")
    is_new = current().is_joining
    torch.manual_seed(1)
    model = torch.nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)
    optimizer = DistributedOptimizer(torch.optim.Adam(model.parameters(), 0.01, fused=True), model.named_parameters())
    state = TrainingState(model=model, optimizer=optimizer, step=0)
    while state.step < 8:
        if ring.rank() == 1 and not is_new and state.step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        while state.step == 4 and len(current().world_ranks) == 1 and not slots().has_waiting():
            time.sleep(0.01)
        optimizer.zero_grad()
        torch.manual_seed(state.step)
        model(torch.randn(2, 4, 8, 8)).square().mean().backward()
        optimizer.step()
        state.step += 1
        state.commit()
    strides = [optimizer.state[model.weight]["exp_avg"].stride(), model.weight.stride()]
    digest = hashlib.sha256(model.weight.detach().contiguous().numpy()).hexdigest()
    report("left", [digest, strides, ring.size()], ring.rank())
    report("new", is_new, ring.rank())
"""


@pytest.mark.slow
def test_a_process_joins_the_fused_optimizer_of_a_model_in_channels_last():
    result = run_ranks(CHANNELS_LAST, 2, timeout=120)
    assert [result.reports[rank]["new"] for rank in (0, 1)] == [False, True]
    assert result.reports[0]["left"] == result.reports[1]["left"]
    _, strides, size = result.reports[0]["left"]
    assert strides == [[36, 1, 12, 4]] * 2 and size == 2
