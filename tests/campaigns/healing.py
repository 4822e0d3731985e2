"""Random deaths in jobs with `on_failure="continue"`: the others must go on whole, or end as the documentation says.

    python -m tests.campaigns.healing --runs 300 --seed 1             # about ten minutes
    python -m tests.campaigns.healing --only 1:17                     # run 17 of seed 1 again, with all it printed
    python -m tests.campaigns.healing --runs 300 --seed 1 --keep      # also writes benchmarks/results
    python -m tests.campaigns.healing --runs 300 --seed 1 --hosts     # ranks that act as several hosts
    python -m tests.campaigns.healing --runs 300 --hosts --faces lightning keras   # instead of a plain loop

A run is drawn from its seed and number alone. Its ranks are forked (tests/forked_ranks.py), train, and kill or stop
themselves at the points that were drawn. Then it is judged:

    went on   the others finished every step, with the weights of a replay of the membership log in one process, to the
              last bit; they agree on that log, and it has nobody who was gone, and lacks nobody who was not
    ended     every rank ended with an error that names the dead or stopped one, where docs/healing.md says so
    hang      a rank still ran after a minute
    left      a process or a file stayed behind
    wrong     anything else
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import os
import platform
import random
import re
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # the ranks are forked

import torch

import ring_plugins as ring
from ring_plugins.core.control.consensus import Consensus
from ring_plugins.core.control.membership import Membership
from ring_plugins.core.control.mesh import Mesh
from ring_plugins.core.world import World, current
from ring_plugins.torch import DistributedOptimizer, broadcast_parameters
from tests.campaigns.healing_faces import EPOCH, train_keras, train_lightning
from tests.forked_ranks import Ended, run_forked
from tests.mortal import die, die_in_barrier

RESULT = Path(__file__).parent.parent.parent / "benchmarks" / "results" / "healing_campaign.json"
STEPS, HANGS = 8, 60.0
#: Seconds that ranks wait for one that is stopped, and for which a rank is stopped: less, or more.
TIMEOUT, STOPS = "4", (0.3, 6.0)
COUNTS = (10, 20_000, 600_000)
#: Times whole numbers, it has exact averages over up to 6 ranks.
UNIT = 60.0
#: Where a rank dies, and how often that is drawn.
POINTS = {
    "forward": 1, "between gradients": 1, "reduction": 3, "update": 1, "collective": 2, "broadcast": 0.7,
    "skipped step": 2, "healing": 2, "stop": 0.5,
}  # fmt: skip
#: What takes the place of some of them in a training with Lightning or Keras, where an epoch ends.
AT_EPOCH_END = {
    "between gradients": "validation", "collective": "epoch end", "broadcast": "checkpoint",
    "skipped step": "epoch end", "stop": "validation",
}  # fmt: skip
#: On several hosts some ranks get SIGTERM instead.
LEAVES = "SIGTERM"
FACES = ("torch", "lightning", "keras")
#: A rank prints this, and the root, if the root of a broadcast died.
_ROOT = "no broadcast from"
COLLECTIVES = ("all_reduce", "all_gather", "barrier", "all_gather_object", "broadcast_object")


@dataclass(frozen=True)
class Fault:
    """What a rank does to itself.

    Attributes:
        rank, step: which, and when.
        point: one of `POINTS`.
        number: of the barrier or exchange, counted from the beginning of the reduction, collective or step.
        when: "before" or "in" that barrier; in healing, "before" it, once it has "decided", or when it is "over".
    """

    rank: int
    step: int
    point: str
    number: int
    when: str


@dataclass(frozen=True)
class Plan:
    """A run.

    Attributes:
        seed, number: it was drawn from.
        ranks: of the job.
        faults: at most one for each rank.
        in_place: whether gradients accumulate in the memory in which they are averaged.
        skips: in which step, and which rank cannot compute its gradients.
        stops: seconds for which a rank is stopped.
        nodes: of how many ranks each host is, as RING_VIRTUAL_NODES takes it; "" for one host.
        face: what trains: one of `FACES`.
        compression: of gradients between hosts, with error feedback; "" for none.
    """

    seed: int
    number: int
    ranks: int
    faults: tuple[Fault, ...]
    in_place: bool
    skips: tuple[int, int]
    stops: float
    nodes: str = ""
    face: str = "torch"
    compression: str = ""


def draw(seed: int, number: int, hosts: bool = False, faces: Sequence[str] = FACES[:1]) -> Plan:
    """The plan of a run, on one host or on several, with one of these faces."""
    drawn = random.Random(f"{seed}:{number}")
    ranks = drawn.randint(2, 6)
    skips = drawn.randrange(1, STEPS - 1), drawn.randrange(ranks)
    point = drawn.choices(list(POINTS), list(POINTS.values()))[0]
    most = ranks - 1
    victims = drawn.sample(range(ranks), ranks)
    first = drawn.choice([0, ranks - 1, ranks // 2, victims[0]])
    victims = [first, *(rank for rank in victims if rank != first)]
    count = drawn.choice([1, 1, min(2, most), min(2, most), drawn.randint(1, most), most])
    if point == "healing":
        count = max(count, min(2, most))
    step = skips[0] if point == "skipped step" else drawn.randrange(STEPS)
    faults = []
    at_once = drawn.random() < 0.5
    for place, victim in enumerate(victims[: 1 if point == "stop" else count]):
        own = point if place == 0 else drawn.choice([point, "forward", "reduction", "collective"])
        if point == "healing":
            own = "healing" if place else drawn.choice(["forward", "reduction", "update"])
        when = step if place == 0 or at_once or own in ("healing", "skipped step") else drawn.randrange(STEPS)
        side = drawn.choice(["before", "decided", "over"] if own == "healing" else ["before", "in"])
        faults.append(Fault(victim, when, own, drawn.randint(1, 4), side))
    in_place, stops = drawn.random() < 0.3, drawn.choice(STOPS)
    nodes = ""
    if hosts:
        cuts = sorted(drawn.sample(range(1, ranks), drawn.randint(1, ranks - 1)))
        nodes = ",".join(str(end - start) for start, end in zip([0, *cuts], [*cuts, ranks], strict=True))
        # Exchanges with other hosts count beside barriers, so there are more.
        faults = [fault if fault.point == "stop" else replace(fault, number=drawn.randint(1, 24)) for fault in faults]
    face, compression = drawn.choice(faces), ""
    if hosts:
        compression = drawn.choice(["", "", "", "bf16", "fp16"])
        # One that leaves does so wherever the others are.
        is_leaving = [fault.point not in ("healing", "stop") and drawn.random() < 0.15 for fault in faults]
        faults = [replace(one, point=LEAVES) if leaves else one for one, leaves in zip(faults, is_leaving, strict=True)]
    if face != "torch":
        faults, skips = [_at_epoch_end(fault) for fault in faults], (STEPS, 0)
    return Plan(seed, number, ranks, tuple(faults), in_place, skips, stops, nodes, face, compression)


def _at_epoch_end(fault: Fault) -> Fault:
    """The counterpart of a fault in a training that has epochs."""
    if fault.point not in AT_EPOCH_END:
        return fault
    return replace(fault, point=AT_EPOCH_END[fault.point], step=fault.step // EPOCH * EPOCH + EPOCH - 1)


# A rank -------------------------------------------------------------------------------------------


def gradient(step: int, rank: int) -> float:
    """The factor of all gradients of a rank in a step."""
    return UNIT * ((7 * step + 3 * rank) % 5 - 2)


def patterns(compression: str = "") -> list[torch.Tensor]:
    """What the gradients of each parameter are multiples of; with compression, numbers that are rounded."""
    return [(torch.arange(count) % 251 + 1) / 77 if compression else torch.arange(count) % 3 + 1.0 for count in COUNTS]


def checksums(model: Sequence[Any]) -> list[str]:
    """Of the weights."""
    arrays = [one.detach().numpy() if isinstance(one, torch.Tensor) else one for one in model]
    return [hashlib.blake2b(array.tobytes(), digest_size=8).hexdigest() for array in arrays]


def die_in_healing(when: str) -> None:
    """Die in the first agreement on who is left, see `Fault.when`."""
    agree, go_on, decide = Membership.agree, World._go_on_without, None
    if when == "before":
        Membership.agree = lambda *_: die()  # type: ignore[method-assign, assignment, return-value]
        Mesh.agree = lambda *_: die()  # type: ignore[method-assign, assignment, return-value]
    elif when == "over":
        World._go_on_without = lambda *args: (go_on(*args), die())  # type: ignore[method-assign, assignment, return-value]
    elif isinstance(current()._membership, Mesh):  # half of the time, before it has told anybody
        adopt = Consensus._adopt
        Consensus._adopt = lambda *args: (os.getpid() % 2 and adopt(*args), die())  # type: ignore[method-assign, assignment, return-value]
    else:
        own = current()._membership._peers.own  # type: ignore[union-attr]
        decide = own.decide
        own.decide = lambda *args: (decide(*args), die())  # type: ignore[method-assign, assignment, return-value]
        Membership.agree = lambda *args: (agree(*args), die())  # type: ignore[method-assign, assignment, return-value]


class Mortal:
    """A rank that may have a fault."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self._fault = next((fault for fault in plan.faults if fault.rank == rank), None)
        self._dies_in_barrier = False
        self.step = 0

    def at(self, point: str) -> None:
        """Do what is planned for this point of the step."""
        fault = self._fault
        if fault is None or fault.step != self.step:
            return
        if fault.point == "stop" and point == ("forward", "update", "collective", "broadcast")[fault.number - 1]:
            os.kill(os.getpid(), signal.SIGSTOP)
        if fault.point != point:
            return
        if point in ("forward", "between gradients", "update", "checkpoint"):
            die()
        self._fault = None
        if point == LEAVES:
            os.kill(os.getpid(), signal.SIGTERM)
            return
        if point == "healing":
            die_in_healing(fault.when)
        else:
            self._dies_in_barrier = True
            die_in_barrier(fault.number, fault.when)

    def over(self) -> None:
        """Die if the operation that has just ended had fewer barriers than that."""
        if self._dies_in_barrier:
            die()


def train(plan: Plan, rank: int) -> dict[str, Any]:
    """What a rank does."""
    mortal, me = Mortal(plan, rank), rank
    if plan.face != "torch":
        trained = train_lightning if plan.face == "lightning" else train_keras
        options = {"compression": plan.compression or None, "error_feedback": bool(plan.compression)}
        found = trained(mortal, me, STEPS, patterns(plan.compression), gradient, UNIT * me, options)
        return {**found, "weights": checksums(found["weights"])}
    ring.init(on_failure="continue")
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(count)) for count in COUNTS])
    broadcast_parameters(model)
    optimizer = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5), model.named_parameters(), bucket_bytes=4096,
        compression=plan.compression or None, error_feedback=bool(plan.compression),
    )  # fmt: skip
    model[1].register_post_accumulate_grad_hook(lambda _: mortal.at("between gradients"))
    optimizer.optimizer.register_step_pre_hook(lambda *_: mortal.at("update"))
    factors, history, told = patterns(plan.compression), [], []
    log = averages_log(optimizer)
    ring.on_membership_change(lambda change: told.extend([*change.lost, *change.left]))
    for step in range(STEPS):
        mortal.step = step
        mortal.at("healing")
        mortal.at("forward")
        mortal.at(LEAVES)
        mortal.at("skipped step")
        log.clear()
        with optimizer.skip_step_on(MemoryError) as outcome:
            optimizer.zero_grad(set_to_none=not plan.in_place)
            if plan.skips == (step, me):
                raise MemoryError("no room")
            loss = sum((p * (gradient(step, me) * factor)).sum() for p, factor in zip(model, factors, strict=True))
            mortal.at("reduction")
            loss.backward()  # type: ignore[union-attr]
            mortal.over()
            optimizer.step()
        mortal.over()
        mortal.at("collective")
        value = collective(COLLECTIVES[step % len(COLLECTIVES)], me)
        mortal.over()
        after = current().world_ranks
        mortal.at("broadcast")
        broadcast(current().world_ranks[-1], me)
        mortal.over()
        assert len(log) == (not outcome.skipped)
        history.append([None if outcome.skipped else log[0], after, value])
        assert current().world_ranks[ring.rank()] == me and ring.size() == len(current().world_ranks)
    left = ring.all_gather_object(me)
    return {"history": history, "weights": checksums(list(model)), "left": left, "told": told}


def averages_log(optimizer: DistributedOptimizer) -> list[tuple[int, ...]]:
    """A list that gets the members at the end of each pass; the next death may be found in the same backward."""
    log: list[tuple[int, ...]] = []
    check = optimizer.averager._healing
    assert check is not None
    after_pass = check.after_pass
    check.after_pass = lambda named: (log.append(current().world_ranks), after_pass(named))  # type: ignore[method-assign, assignment, func-returns-value, return-value]
    return log


def collective(name: str, me: int) -> Any:
    """A public function's result, as a number or a list."""
    if name == "all_reduce":
        return float(ring.all_reduce(torch.tensor([UNIT * me])))
    if name == "all_gather":
        return ring.all_gather(torch.tensor([float(me)])).tolist()
    if name == "barrier":
        return ring.barrier()
    if name == "all_gather_object":
        return ring.all_gather_object(me)
    with contextlib.suppress(ring.PeerFailed):  # the root may die, but rank 0 of those that are left is another then
        return ring.broadcast_object(f"from {me}", 0)[:5]
    return "from "


def broadcast(root: int, me: int) -> None:
    """From the rank that started as `root`."""
    told = torch.full((5,), float(me))
    try:
        told = ring.broadcast(told, current().world_ranks.index(root))
    except ring.PeerFailed:
        print(f"{_ROOT} {root}", flush=True)
        raise
    assert set(told.tolist()) == {root}


def expected(name: str, ranks: Sequence[int]) -> Any:
    """What `collective` returns if these ranks took part."""
    if name == "all_reduce":
        return UNIT * sum(ranks) / len(ranks)
    return {"barrier": None, "broadcast_object": "from "}.get(name, list(ranks))


# Judging ------------------------------------------------------------------------------------------


def replayed(history: Sequence[Any], period: int = STEPS) -> list[str]:
    """The checksums of the weights after one process has taken the same averages, of gradients of so many steps."""
    model = [torch.nn.Parameter(torch.zeros(count)) for count in COUNTS]
    optimizer = torch.optim.SGD(model, lr=0.5, momentum=0.5)
    factors = patterns()
    for step, (ranks, *_) in enumerate(history):
        if ranks is not None:
            average = sum(gradient(step % period, rank) for rank in ranks) / len(ranks)
            for parameter, factor in zip(model, factors, strict=True):
                parameter.grad = average * factor
            optimizer.step()
    return checksums(model)


def judge(plan: Plan, job: Ended) -> tuple[str, str]:
    """The verdict, and why where it is a bad one."""
    if job.left:
        return "left", ", ".join(job.left)
    if None in job.codes.values():
        return "hang", f"{job.codes}"
    gone = job.killed | job.departed
    alive = [rank for rank in range(plan.ranks) if rank not in gone]
    leaving = {fault.rank for fault in plan.faults if fault.point == LEAVES}
    unplanned = job.departed - leaving or job.killed - {fault.rank for fault in plan.faults}
    if unplanned or not alive:
        return "wrong", f"killed: {sorted(job.killed)}, left: {sorted(job.departed)}"
    if any(job.codes[rank] for rank in alive):
        return _judge_end(plan, job, alive)
    found = [job.found[rank] for rank in alive]
    history = found[0]["history"]
    problem = next((why for bad, why in _problems(plan, alive, found, history) if bad), "")
    return ("wrong", problem) if problem else ("went on", "")


def _problems(plan: Plan, alive: list[int], found: list[Any], history: list[Any]) -> list[tuple[bool, str]]:
    # Where they are rounded, `compare` replays.
    weights = found[0]["weights"] if plan.compression else replayed(history, STEPS if plan.face == "torch" else EPOCH)
    problems = [
        (any(one["history"] != history for one in found), "the histories differ"),
        (any(one["weights"] != weights for one in found), "the weights are not those of the replay"),
        (any(one["left"] != alive for one in found), f"left: {found[0]['left']}, alive: {alive}"),
        (any(one["told"] != found[0]["told"] for one in found), "ranks were told of different losses"),
        (not set(found[0]["told"]).isdisjoint(alive), f"told of the loss of {found[0]['told']}"),
        (len(history) != STEPS, f"{len(history)} steps"),
    ]
    died = {fault.rank: fault.step for fault in plan.faults if fault.rank not in alive}
    before = tuple(range(plan.ranks))
    for step, (averaged, after, value) in enumerate(history):
        # It may have died at the next barrier; with epochs, at one until the end of its epoch.
        earlier = [rank for rank, when in died.items() if _last_step(plan, when) < step - 1]
        problems += [
            (averaged is not None and not set(averaged) <= set(before), f"step {step}: a lost rank came back"),
            (not set(alive) <= set(after), f"step {step}: {after} lacks a rank that lives"),
            (not {r for r in range(plan.ranks) if r in alive or died[r] > step} <= set(after), f"step {step}: too few"),
            (bool(set(earlier) & set(after)), f"step {step}: {after} has ranks that were gone"),
            (value != _expected(plan, step, after, value), f"step {step}: {value} over {after}"),
            (plan.skips[0] == step and plan.skips[1] in alive and averaged is not None, f"step {step}: not skipped"),
            (plan.skips[0] != step and averaged is None, f"step {step}: skipped"),
        ]
        before = after
    return problems


def _last_step(plan: Plan, step: int) -> int:
    """The last one in which a rank can be that is to die in a step."""
    return step if plan.face == "torch" else step // EPOCH * EPOCH + EPOCH - 1


def _expected(plan: Plan, step: int, after: Sequence[int], value: Any) -> Any:
    """The value that goes with a step after which these ranks were left."""
    if plan.face == "torch":
        return expected(COLLECTIVES[step % len(COLLECTIVES)], after)
    if step % EPOCH < EPOCH - 1 or value is None:
        return None
    ranks, mean = value  # some may have died in validation, and Lightning takes the mean of a metric before others
    died = [rank for rank in after if rank not in ranks]
    parts = itertools.chain.from_iterable(itertools.combinations(died, count) for count in range(len(died) + 1))
    means = [UNIT * sum([*ranks, *part]) / len([*ranks, *part]) for part in parts]
    return value if mean in means and set(ranks) <= set(after) else means


def _judge_end(plan: Plan, job: Ended, alive: list[int]) -> tuple[str, str]:
    """A job may end if the root of a broadcast dies, or if a rank is stopped for longer than RING_TIMEOUT."""
    lost_roots = {root for root in job.killed if job.output.count(f"{_ROOT} {root}\n") == len(alive)}
    overdue = {fault.rank for fault in plan.faults if fault.point == "stop" and plan.stops > float(TIMEOUT)}
    is_named = any(re.search(rf"\brank {rank}\b", job.output) for rank in lost_roots | overdue)
    if is_named and all(job.codes[rank] == 1 for rank in alive):
        return "ended", ""
    return "wrong", f"ended with {job.codes}"


def compare(plan: Plan, job: Ended) -> tuple[str, str]:
    """The verdict on a job whose gradients were rounded: another one has its weights that is like it, but for deaths.

    Its ranks die between steps. So nothing is repeated, and all rounding errors are added to the next step.
    """
    found = next(iter(job.found.values()))
    passes = [set(ranks) for ranks, *_ in found["history"] if ranks is not None]
    steps = [step for step, (ranks, *_) in enumerate(found["history"]) if ranks is not None]
    absent = {rank: step for step, ranks in reversed([*zip(steps, passes, strict=True)])
              for rank in range(plan.ranks) if rank not in ranks}  # fmt: skip
    faults = tuple(Fault(rank, step, "forward", 1, "in") for rank, step in absent.items())
    skips = plan.skips if len(steps) < STEPS else (STEPS, 0)
    like = replace(plan, faults=faults, skips=skips)
    other = run_forked(plan.ranks, lambda rank: train(like, rank), HANGS, {}, nodes=plan.nodes)
    same = [one["weights"] == found["weights"] for one in other.found.values()]
    if not same or not all(same):
        return "wrong", f"the weights are not those of {like}: {other.codes}"
    return "went on", ""


def run(plan: Plan) -> dict[str, Any]:
    """Run a plan; returns a line of the result."""
    is_stopped = any(fault.point == "stop" for fault in plan.faults)
    environment = {"RING_TIMEOUT": TIMEOUT} if is_stopped else {}
    job = run_forked(plan.ranks, lambda rank: train(plan, rank), HANGS, environment, plan.stops, plan.nodes)
    verdict, why = judge(plan, job)
    if verdict == "went on" and plan.compression:
        verdict, why = compare(plan, job)
    return {
        "plan": asdict(plan), "verdict": verdict, "why": why, "seconds": job.seconds, "killed": len(job.killed),
        "output": "" if verdict in ("went on", "ended") else job.output,
    }  # fmt: skip


# The campaign -------------------------------------------------------------------------------------


def summary(lines: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By the point of the first fault: numbers of jobs, of ranks that died, and of verdicts; seconds of a job."""
    rows: dict[str, dict[str, Any]] = {}
    for point in dict.fromkeys([*POINTS, *AT_EPOCH_END.values(), LEAVES]):
        of_point = [line for line in lines if line["plan"]["faults"] and _point(line) == point]
        if not of_point:
            continue
        verdicts = Counter(line["verdict"] for line in of_point)
        rows[point] = {
            "jobs": len(of_point),
            "deaths": sum(line["killed"] for line in of_point),
            "went on": verdicts.pop("went on", 0),
            "ended": verdicts.pop("ended", 0),
            "bad": sum(verdicts.values()),
            "seconds": round(statistics.median(line["seconds"] for line in of_point), 2),
        }
    return rows


def _point(line: dict[str, Any]) -> str:
    points = [fault["point"] for fault in line["plan"]["faults"]]
    return "healing" if "healing" in points else str(points[0])


def table(rows: dict[str, dict[str, Any]]) -> str:
    """The summary as text."""
    text = [f"{'point':<18} {'jobs':>5} {'deaths':>7} {'went on':>8} {'ended':>6} {'bad':>4} {'median s':>9}"]
    for point, row in rows.items():
        numbers = (row[name] for name in ("jobs", "deaths", "went on", "ended", "bad", "seconds"))
        text.append("{:<18} {:>5} {:>7} {:>8} {:>6} {:>4} {:>9}".format(point, *numbers))
    return "\n".join(text)


def keep(kind: str, seed: int, rows: dict[str, dict[str, Any]]) -> None:
    """Write the summary of a campaign beside that of the other kind."""
    campaigns = json.loads(RESULT.read_text())["campaigns"] if RESULT.exists() else {}
    models = re.findall(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    machine = f"{models[0] if models else platform.machine()}, {os.cpu_count()} cores, forked ranks of 1 thread, "
    machine += f"Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}"
    campaigns[kind] = {"seed": seed, "load": os.getloadavg()[0], "points": rows}
    RESULT.write_text(json.dumps({"machine": machine, "campaigns": campaigns}, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no run begins")
    parser.add_argument("--only", help="SEED:NUMBER of a run to repeat")
    parser.add_argument("--hosts", action="store_true", help="let the ranks act as several hosts")
    parser.add_argument("--faces", nargs="+", choices=FACES, default=FACES[:1], help="what trains")
    parser.add_argument("--keep", action="store_true", help=f"write {RESULT.name}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if "keras" in options.faces:
        os.environ.setdefault("KERAS_BACKEND", "torch")
        import ring_plugins.keras
    if "lightning" in options.faces:
        import ring_plugins.lightning  # noqa: F401
    if options.only:
        line = run(draw(*map(int, options.only.split(":")), options.hosts, options.faces))  # type: ignore[misc]
        print(line.pop("output"), json.dumps(line, indent=1), sep="\n")
        return int(line["verdict"] not in ("went on", "ended"))
    lines, end = [], time.monotonic() + options.seconds
    for number in range(options.runs):
        if time.monotonic() > end:
            break
        lines.append(line := run(draw(options.seed, number, options.hosts, options.faces)))
        if line["verdict"] not in ("went on", "ended"):
            print(f"{options.seed}:{number} {line['verdict']}: {line['why']}\n{line['output']}", flush=True)
    rows = summary(lines)
    print(table(rows))
    bad = sum(row["bad"] for row in rows.values())
    print(f"{len(lines)} jobs, {sum(row['deaths'] for row in rows.values())} deaths, {bad} bad")
    if options.keep:
        keep("several hosts" if options.hosts else "one host", options.seed, rows)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
