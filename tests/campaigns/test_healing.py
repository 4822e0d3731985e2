"""The short form of the healing campaign, and the drawing and judging of its jobs."""

import itertools
import json
import subprocess
import sys
from argparse import Namespace
from collections import Counter
from dataclasses import asdict, replace

import pytest
import torch

from tests.campaigns import healing, judging
from tests.campaigns.healing import CASES, draw
from tests.campaigns.judging import compare, judge, replayed
from tests.campaigns.launched_rank import plan_of
from tests.campaigns.launching import codes_of, missing
from tests.campaigns.plans import (
    AT_EPOCH_END,
    LAUNCHED_PLUGINS,
    LAUNCHED_STOPS,
    LAUNCHERS,
    LOST_AT,
    NEW_AT,
    NEW_FAULTS,
    NEW_POINTS,
    POINTS,
    STEP_POINTS,
    STEPS,
    Fault,
    Plan,
)
from tests.campaigns.training import COLLECTIVES, COUNTS, checksums, expected
from tests.forked_ranks import Ended


@pytest.mark.parametrize(
    ("jobs", "cases"),
    [
        (8, ["one host", "several hosts", "replaced", "replaced on hosts"]),
        pytest.param(80, ["one host"], marks=pytest.mark.slow),
        pytest.param(80, ["several hosts"], marks=pytest.mark.slow),
        pytest.param(30, ["faces"], marks=pytest.mark.slow),
        pytest.param(25, ["replaced"], marks=pytest.mark.slow),
        pytest.param(8, ["launchers"], marks=[pytest.mark.slow, pytest.mark.mpi]),
        pytest.param(25, ["growing"], marks=pytest.mark.slow),
        pytest.param(25, ["replaced on hosts"], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_random_deaths_leave_the_others_whole(jobs, cases):
    if "launchers" in cases and (lacking := missing()):
        pytest.skip(lacking)
    command = [sys.executable, "-m", "tests.campaigns.healing", "--seed", "5"]  # they fork
    command += ["--jobs", str(jobs), "--cases", *cases]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60 * jobs, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{jobs} jobs, " in result.stdout and " 0 bad" in result.stdout


DEATHS_IN_HEALING = """
from tests.campaigns.healing import run
from tests.campaigns.plans import Fault, Plan

for nodes in ("", "1,2"):
    for when in ("before", "decided", "over"):
        faults = Fault(0, 2, "forward", 1, "in"), Fault(1, 2, "healing", 1, when)
        line = run(Plan(1, 1, 3, faults, nodes=nodes, case="several hosts" if nodes else "one host"))
        print(line["verdict"], line["why"], sorted(line["points"].items()))
"""


def test_ranks_die_at_each_point_of_an_agreement():
    command = [sys.executable, "-c", DEATHS_IN_HEALING]  # forks
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["went on  [('forward', 1), ('healing', 1)]"] * 6


def test_a_job_is_drawn_from_its_seed_number_and_cases_alone():
    assert [draw(1, number, list(CASES)) for number in range(300)] == [draw(1, n, list(CASES)) for n in range(300)]
    assert {draw(1, number, list(CASES)).case for number in range(300)} == set(CASES)
    plans = [draw(1, number, ["one host"]) for number in range(300)]
    assert {fault.point for plan in plans for fault in plan.faults} == set(POINTS)
    assert {plan.overlap for plan in plans} == {True, False}
    assert {len(plan.faults) for plan in plans} == {1, 2, 3, 4, 5} and {plan.ranks for plan in plans} == {2, 3, 4, 5, 6}
    assert all(len({fault.process for fault in plan.faults}) == len(plan.faults) < plan.ranks for plan in plans)


def test_between_hosts_ranks_also_leave_and_gradients_are_rounded():
    plans = [draw(1, number, ["faces"]) for number in range(300)]
    assert {plan.plugin for plan in plans} == {"lightning", "keras"}
    assert {plan.compression for plan in plans} == {"", "bf16", "fp16", "int8"}
    points = {fault.point for plan in plans for fault in plan.faults}
    assert points == {"forward", "reduction", "update", "healing", *AT_EPOCH_END.values(), "SIGTERM"}
    assert all(sum(map(int, plan.nodes.split(","))) == plan.ranks for plan in plans)


def test_where_ranks_are_replaced_somebody_stays_and_joiners_die_too():
    plans = [draw(1, number, ["replaced"]) for number in range(300)]
    assert {fault.point for plan in plans for fault in plan.faults} == {*STEP_POINTS, *NEW_POINTS}
    assert {plan.standbys for plan in plans} == {0, 1, 2} and {plan.ranks for plan in plans} == {2, 3, 4}
    assert all(0 < sum(fault.process < plan.ranks for fault in plan.faults) < plan.ranks for plan in plans)
    for plan in [draw(1, number, ["replaced on hosts"]) for number in range(300)]:
        sizes, victims = [*map(int, plan.nodes.split(","))], {fault.process for fault in plan.faults}
        hosts = [range(sum(sizes[:host]), sum(sizes[: host + 1])) for host in range(len(sizes))]
        assert len(hosts) in (2, 3) and all(not victims.issuperset(host) for host in hosts)
        assert victims.intersection(range(plan.ranks))


def test_users_start_jobs_in_all_ways_and_all_kinds_of_faults_come_to_them():
    plans = [draw(1, number, ["launchers"]) for number in range(600)]
    assert plans == [draw(1, number, ["launchers"]) for number in range(600)]
    assert {(plan.launcher, bool(plan.nodes), plan.replaces) for plan in plans} == {
        *((launcher, False, replaces) for launcher in LAUNCHERS for replaces in (False, True)),
        *((launcher, True, replaces) for launcher in LAUNCHERS if launcher != "python" for replaces in (False, True)),
    }
    plugins = Counter((plan.plugin, plan.backend) for plan in plans)
    assert set(plugins) == set(LAUNCHED_PLUGINS) and plugins["torch", "torch"] > 0.75 * len(plans)
    of_losses = {*LOST_AT, *AT_EPOCH_END.values(), "broadcast", "init"}
    for replaces, points in ((False, of_losses), (True, set(NEW_AT))):
        chosen = [plan for plan in plans if plan.replaces == replaces]
        assert {fault.point for plan in chosen for fault in plan.faults} == points | {"stop"}
        assert {plan.stops for plan in chosen} == {*LAUNCHED_STOPS} - ({max(LAUNCHED_STOPS)} if replaces else set())
    assert sum(len(plan.faults) for plan in plans) > 4 * len(plans)
    assert all(plan.ranks <= 6 for plan in plans)  # over which averages are exact
    assert all(len(set(plan.nodes.split(","))) <= 1 or plan.launcher in ("ring run", "mpirun") for plan in plans)
    hosts_lost = 0
    for plan in plans:
        ends = [*itertools.accumulate(map(int, plan.nodes.split(",") if plan.nodes else [plan.ranks]))]
        hosts = [set(range(begin, end)) for begin, end in zip([0, *ends], ends, strict=False)]
        lost = {fault.process for fault in plan.faults if fault.process < plan.ranks and fault.point != "stop"}
        assert lost < set(range(plan.ranks))
        assert len({fault.process for fault in plan.faults}) == len(plan.faults)
        assert plan.faults[0].point != "round"
        # Nobody would take the places of a host's ranks that are all lost, nor a place a sixth time.
        assert not plan.replaces or not any(host <= lost for host in hosts)
        assert sum(fault.process >= plan.ranks for fault in plan.faults) <= NEW_FAULTS * len(hosts)
        hosts_lost += any(host <= lost for host in hosts)
    assert hosts_lost > 30
    assert plan_of(json.dumps(asdict(plans[0]))) == plans[0]


@pytest.mark.parametrize(
    ("status", "reports", "codes"),
    [
        (0, {0: {"found": {}}, 1: {"fault": "died"}, 2: {"found": {}}}, {0: 0, 1: -9, 2: 0}),
        (0, {0: {"found": {}}, 1: {"fault": "left"}, 2: {}}, {0: 0, 1: 0, 2: 1}),
        (0, {0: {"found": {}}, 1: {"fault": "died"}, 2: {"found": {}}, 4: {"found": {}}}, {0: 0, 1: -9, 2: 0, 4: 0}),
        (1, {1: {"fault": "died"}}, {-1: 1, 0: 1, 1: -9, 2: 1}),
    ],
)
def test_how_processes_of_a_launcher_ended_follows_from_what_they_told(status, reports, codes):
    assert codes_of(REPLACING, reports, status) == codes


def test_jobs_that_grow_are_asked_for_as_many_ranks_as_there_is_room_for():
    plans = [draw(1, number, ["growing"]) for number in range(300)]
    assert all(sum(number for _, number in plan.adds) == plan.most - plan.ranks for plan in plans)
    assert {plan.most - plan.ranks for plan in plans} == {1, 2} and {len(plan.adds) for plan in plans} == {1, 2}
    assert any(fault.process in range(plan.ranks, plan.most) for plan in plans for fault in plan.faults)
    # A loss may be found in the next step, and another process joins at the end of the step behind it; later if a rank
    # dies in a round of that. What has joined dies in its first or second step. So all slots are taken at the end.
    for plan in plans:
        of_start = [fault for fault in plan.faults if fault.process < plan.ranks]
        of_joiners = sum(fault.step + 2 for fault in plan.faults if fault.process >= plan.ranks)
        rounds = sum(fault.point == "round" for fault in of_start)
        assert max(fault.step for fault in of_start) + 2 + rounds + of_joiners < plan.steps == plan.skips[0]
    assert any(fault.process >= plan.most for plan in plans for fault in plan.faults)


PLAN = Plan(1, 1, 3, (Fault(1, 3, "forward", 1, "in"),), skips=(6, 0))
REPLACING = Plan(1, 1, 3, PLAN.faults, replaces=True)


def job(weights=None, averaged=None, told=(1,), back_at=STEPS, skipped=6):
    """A job of which rank 1 died in step 3, and process 3 took its place in another."""
    history = []
    for step in range(STEPS):
        ranks = [0, 2] if 3 <= step < back_at else [0, 1, 2]
        value = expected(COLLECTIVES[step % len(COLLECTIVES)], ranks)
        history.append([None if step == skipped and back_at == STEPS else ranks, ranks, value])
    if averaged:
        history[averaged[0]][0] = averaged[1]
    left = [0, 2] if back_at == STEPS else [0, 1, 2]
    slots = {0: 0, 2: 2} | ({} if back_at == STEPS else {3: 1})
    same = {"history": history, "weights": weights or replayed(history, STEPS), "left": left, "told": list(told)}
    found = {process: {"slot": slot, **same} for process, slot in slots.items()}
    return Ended({0: 0, 1: -9, 2: 0} | dict.fromkeys(found, 0), found, "", 1.0)


def test_a_job_that_went_on_is_compared_with_the_replay_of_its_log():
    assert judge(PLAN, job()) == ("went on", "")
    other = checksums([torch.zeros(count) for count in COUNTS])
    assert judge(PLAN, job(weights=other)) == ("wrong", "the weights are not those of the replay")
    assert judge(PLAN, job(averaged=(6, [0, 2])))[1] == "step 6: not skipped"
    assert judge(PLAN, job(averaged=(5, [0, 1, 2])))[1] == "step 5: a lost rank came back"
    assert judge(PLAN, job(told=(2,)))[1] == "told of the loss of [2]"


def test_a_job_whose_gradients_were_rounded_is_compared_with_one_like_it_if_that_has_an_end(monkeypatch):
    others = [job(), job(weights=["", "", ""]), Ended({0: 1, 1: -9, 2: 1}, {}, "what ended it", 1.0)]
    monkeypatch.setattr(judging, "run_forked", lambda *_, **__: others.pop(0))
    assert compare(PLAN, job()) == ("went on", "")
    assert compare(PLAN, job())[1].startswith("the weights are not those of Plan(")
    assert compare(PLAN, job())[1].endswith("ended with {0: 1, 1: -9, 2: 1}: what ended it")


def test_where_ranks_are_replaced_all_places_are_taken_at_last():
    assert judge(REPLACING, job(back_at=5)) == ("went on", "")
    assert judge(REPLACING, job(back_at=7))[1] == "slots stayed empty in 4 steps"
    missing_at_last = replace(REPLACING, launcher="ring run", faults=PLAN.faults * 2)
    assert judge(missing_at_last, job(told=(), back_at=STEPS, skipped=None))[1] == "[0, 2] at the end, of 3"
    in_last_commit = job(told=(), skipped=None)
    in_last_commit.found[3] = {**in_last_commit.found[0], "slot": 1}
    for one in in_last_commit.found.values():
        one["left"] = [0, 1, 2]
    assert judge(missing_at_last, in_last_commit) == ("went on", "")
    back = job(back_at=5)
    back.found[3]["weights"] = ["", "", ""]
    assert judge(REPLACING, back) == ("wrong", "the weights are not those of the replay")
    back = job(back_at=5)
    del back.found[3]
    assert judge(REPLACING, back)[1] == "left: [0, 1, 2], alive: [0, 2]"


def test_a_hang_an_unplanned_end_and_what_stays_behind_are_bad():
    assert judge(PLAN, Ended({0: None, 1: -9, 2: 0}, {}, "", 1.0))[0] == "hang"
    assert judge(PLAN, Ended({0: 1, 1: -9, 2: 1}, {}, "rank 1 died", 1.0)) == (
        "wrong",
        "ended with {0: 1, 1: -9, 2: 1}",
    )
    assert judge(PLAN, Ended({0: 0, 1: -9, 2: 0}, {}, "", 1.0, ["process 7"])) == ("left", "process 7")
    root_died = "no broadcast from 1\n" * 2
    assert judge(PLAN, Ended({0: 1, 1: -9, 2: 1}, {}, root_died + "rank 1 died", 1.0)) == ("ended", "")
    assert judge(PLAN, Ended({0: 1, 1: -9, 2: 1}, {}, root_died + "a rank died", 1.0))[0] == "wrong"


def test_a_campaign_goes_on_where_it_was_interrupted(monkeypatch, tmp_path):
    ran = []

    def run(plan):
        ran.append(plan.number)
        return {"plan": {"seed": plan.seed, "number": plan.number}, "verdict": "went on", "faults": {"died": 2}}

    monkeypatch.setattr(healing, "run", run)
    file = tmp_path / "lines"
    options = {"seed": 1, "cases": ["one host"], "seconds": 60.0, "lane": "0/1", "out": file, "faults": 0}
    list(healing.campaign(Namespace(jobs=3, **options)))
    list(healing.campaign(Namespace(jobs=0, **{**options, "faults": 9})))
    assert ran == [0, 1, 2, 3, 4] and len(file.read_text().splitlines()) == 5
    list(healing.campaign(Namespace(jobs=9, **{**options, "lane": "1/2"})))
    assert ran == [0, 1, 2, 3, 4, 5, 7]
    of = Namespace(jobs=0, faults=20)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert healing.progress(lines, 5, of, 60.0) == "[14 of 20 faults, 7 jobs, 0 bad, 2 min left]"
