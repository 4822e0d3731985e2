"""Random deaths in jobs with `on_failure="replace"`, of ranks, spares and processes that join: all are whole at last.

    python -m tests.campaigns.replacing --runs 200 --seed 1           # about five minutes
    python -m tests.campaigns.replacing --only 1:17                   # run 17 of seed 1 again, with all it printed

As tests/campaigns/healing.py, but this process also does what `ring run` does: it fills the seats of ranks that died,
with the launcher's own `Replacements` and `Spares`. So several processes in a row may have a seat. A run is judged:

    whole     the processes of all seats finished every step, with the weights of a replay in one process, to the last
              bit; they agree on who had each seat in each step, and nobody died but who was to
    hang      a process still ran after a minute
    left      a process stayed behind
    wrong     anything else
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # the ranks are forked

import torch

import ring_plugins as ring
from ring_plugins.core.base import config
from ring_plugins.core.control import admission
from ring_plugins.core.control.liveness import MOST_MEMBERS
from ring_plugins.core.linux.process import children, descendants
from ring_plugins.core.linux.shared_memory import Segment
from ring_plugins.core.rendezvous.spawn import SharedMemoryRendezvous, child_environment, seats
from ring_plugins.core.world import current
from ring_plugins.launcher.replacements import Replacements
from ring_plugins.launcher.spares import Spares
from ring_plugins.launcher.supervision import Supervisor
from ring_plugins.torch import DistributedOptimizer, TrainingState, broadcast_parameters
from tests.campaigns.healing import COUNTS, averages_log, checksums, gradient, patterns, replayed
from tests.forked_ranks import be_rank
from tests.mortal import die, die_in_barrier, end_in_round

STEPS, HANGS = 10, 60.0
#: Seconds for which a step waits for processes that are to join, so that most do; and members for one that is stopped.
AWAITED, PATIENCE = 5.0, 1.0
#: Where a process dies: in a step, in a round of a join in that step, before it has joined, or in one of its rounds.
STEP_POINTS = ("forward", "reduction", "update", "commit", "round")
NEW_POINTS = ("waiting", "round", "stopped", "reduction", "forward")


@dataclass(frozen=True)
class Fault:
    """What a process does to itself.

    Attributes:
        process: its number: that of its seat for the first ones, and further ones in the order of their start.
        step: when, or how many steps after it has joined.
        point: one of those above.
        number: of the barrier of the reduction, or of the round.
        when: "before" or "in" it.
    """

    process: int
    step: int
    point: str
    number: int
    when: str


@dataclass(frozen=True)
class Plan:
    """A run, drawn from a seed and its number."""

    seed: int
    number: int
    ranks: int
    spares: int
    faults: tuple[Fault, ...]


def draw(seed: int, number: int) -> Plan:
    """The plan of a run; one of the first processes stays."""
    drawn = random.Random(f"{seed}:{number}")
    ranks, spares = drawn.randint(2, 4), drawn.choice([0, 0, 1, 2])
    victims = drawn.sample(range(ranks), drawn.randint(1, ranks - 1))
    at_once, step = drawn.random() < 0.4, drawn.randrange(STEPS - 4)
    faults = []
    for victim in victims:
        point = drawn.choice(STEP_POINTS) if faults else drawn.choice(("forward", "reduction", "update", "commit"))
        when = step if at_once or not faults else drawn.randrange(STEPS - 4)
        faults.append(Fault(victim, when, point, drawn.randint(1, 3), drawn.choice(["before", "in"])))
    for newcomer in range(ranks, ranks + drawn.choice([0, 0, 1, 2])):
        point = drawn.choice(NEW_POINTS)
        faults.append(Fault(newcomer, drawn.randrange(2), point, drawn.randint(1, 3), drawn.choice(["before", "in"])))
    return Plan(seed, number, ranks, spares, tuple(faults))


# A process ----------------------------------------------------------------------------------------


def taken() -> list[int]:
    """The seats of the members."""
    return [current()._seats[rank] for rank in current().world_ranks]


def await_newcomers(ranks: int) -> None:
    """Let processes come, so that they join after this step."""
    end, missing = time.monotonic() + AWAITED, set(range(ranks)).difference(taken())
    places = seats()
    assert places is not None
    while not missing.issubset(one.seat for one in places.waiting() if one.is_there()) and time.monotonic() < end:
        time.sleep(0.002)


def train(plan: Plan, process: int) -> dict[str, Any]:
    """What a process does."""
    admission._PATIENCE = PATIENCE
    fault = next((fault for fault in plan.faults if fault.process == process), None)
    ends_waiting = threading.Timer(0.05 * fault.number if fault is not None else 0.0, die)
    ends_waiting.daemon = True
    if fault is not None and fault.point == "waiting":
        ends_waiting.start()
    ring.init(on_failure="replace")
    seat, is_new = ring.rank(), current().is_joining
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(count)) for count in COUNTS])
    broadcast_parameters(model)
    optimizer = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5), model.named_parameters(), bucket_bytes=4096
    )
    if fault is not None and is_new and fault.point == "stopped":
        end_in_round(fault.number, "stopped")
    if fault is not None and is_new and fault.point == "round":
        end_in_round(fault.number, fault.when)
    log, factors = averages_log(optimizer), patterns()
    state = TrainingState(model=model, optimizer=optimizer, step=0, history=[])
    ends_waiting.cancel()  # behind its last step, the others could not tell that it has not finished
    seat_of = dict(current()._seats)
    ends_at = None if fault is None else fault.step + (state.step if is_new else 0)
    while state.step < STEPS:
        point = fault.point if fault is not None and state.step == ends_at else ""
        if point == "round" and not is_new:
            assert fault is not None
            end_in_round(fault.number, fault.when)
        await_newcomers(plan.ranks)
        if point == "forward":
            die()
        log.clear()
        optimizer.zero_grad()
        loss = sum((p * (gradient(state.step, seat) * factor)).sum() for p, factor in zip(model, factors, strict=True))
        if point == "reduction":
            assert fault is not None
            die_in_barrier(fault.number, fault.when)
        loss.backward()  # type: ignore[union-attr]
        if point == "reduction":
            die()  # if it had fewer barriers
        seat_of |= current()._seats
        state.history = [*state.history, [seat_of[rank] for rank in log[0]]]
        if point == "update":
            die()
        optimizer.step()
        state.step += 1
        if point == "commit":
            die()
        state.commit()
    return {"seat": seat, "history": state.history, "weights": checksums(list(model)), "members": taken()}


# The job ------------------------------------------------------------------------------------------


class Forked:
    """A forked process, as `subprocess.Popen` has one."""

    def __init__(self, plan: Plan, process: int, variables: dict[str, str], directory: Path) -> None:
        self.process, self.returncode = process, None
        self.pid = os.fork()
        if not self.pid:
            be_rank(process, lambda number: train(plan, number), variables, directory)

    def poll(self) -> int | None:
        if self.returncode is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if done else None
        return self.returncode

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def run(plan: Plan) -> dict[str, Any]:
    """Run a plan; returns a line of the result."""
    segment = Segment.create(SharedMemoryRendezvous.nbytes(plan.ranks))
    places = SharedMemoryRendezvous(segment, 0, plan.ranks, []).seats
    supervisor, told, started, began = Supervisor(tolerates_losses=True), list[str](), list[Forked](), time.monotonic()
    with TemporaryDirectory() as name:

        def start(seat: int | None, process: int) -> Any:
            variables = child_environment(segment, seat, plan.ranks, os.getpid()) | {config.LOSSES_TOLERATED.name: "1"}
            variables |= {config.JOINS.name: str(process)} if process >= plan.ranks else {}
            started.append(one := Forked(plan, process, variables, Path(name)))
            kept: Any = one
            if seat is None:
                supervisor.spares.append(kept)
            elif process < plan.ranks:
                supervisor.processes.append(kept)
            else:
                supervisor.processes[seat] = kept
            return one

        for rank in range(plan.ranks):
            start(rank, rank)
        unused = iter(range(plan.ranks, MOST_MEMBERS))
        spares = Spares(supervisor, places, plan.spares, unused, lambda rank: start(None, rank), lambda *_: None)
        replacements = Replacements(supervisor, places, plan.ranks, unused, start, told.append, spares)
        supervisor.is_out = replacements.is_out
        codes = [process.poll() for process in supervisor.processes]
        while None in codes and time.monotonic() < began + HANGS:
            replacements.tick()
            time.sleep(0.002)
            codes = [process.poll() for process in supervisor.processes]
        if None in codes:
            for process in supervisor.processes:
                if process.poll() is None:
                    os.kill(process.pid, signal.SIGUSR1)
            time.sleep(1.0)
        for one in started:
            if one.poll() is None:
                one.kill()
                os.waitpid(one.pid, 0)
        last = [one.process for one in supervisor.processes]  # type: ignore[attr-defined]
        files = [file for one in last if (file := Path(name) / f"{one}.json").exists()]
        found = [json.loads(file.read_text()) for file in files]
        output = "".join(file.read_text(errors="replace") for file in sorted(Path(name).glob("*.txt")))
    left = [pid for pid in descendants(os.getpid(), children()) if Path(f"/proc/{pid}/exe").exists()]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    segment.close_file()
    verdict, why = judge(plan, codes, found, left)
    died = sum(one.returncode == -signal.SIGKILL for one in started)
    return {
        "plan": asdict(plan), "verdict": verdict, "why": why, "seconds": time.monotonic() - began, "killed": died,
        "joined": output.count(" joined; the job goes on"), "output": output,
        "told": told,
    }  # fmt: skip


def judge(plan: Plan, codes: list[int | None], found: list[Any], left: list[int]) -> tuple[str, str]:
    """The verdict, and why where it is a bad one."""
    if left:
        return "left", f"processes {left}"
    if None in codes:
        return "hang", f"{codes}"
    # One that was to join may die, or find that the job is over, after the others' last step.
    ended = [code for code in codes if code not in (0, -signal.SIGKILL)]
    if ended or not found:
        return "wrong", f"ended with {codes}"
    history = found[0]["history"]
    weights = replayed([[averaged] for averaged in history], STEPS)
    problems = [
        (any(one["history"] != history for one in found), "the histories differ"),
        (any(one["weights"] != weights for one in found), "the weights are not those of the replay"),
        (any(one["members"] != found[0]["members"] for one in found), "the members differ"),
        ([one["seat"] for one in found] != found[0]["members"], f"members {found[0]['members']}"),
        (len(history) != STEPS, f"{len(history)} steps"),
        (sum(len(averaged) < plan.ranks for averaged in history) > 3 * len(plan.faults), "seats stayed empty"),
    ]
    problem = next((why for bad, why in problems if bad), "")
    return ("wrong", problem) if problem else ("whole", "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no run begins")
    parser.add_argument("--only", help="SEED:NUMBER of a run to repeat")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.only:
        line = run(draw(*map(int, options.only.split(":"))))  # type: ignore[misc]
        print(line.pop("output"), json.dumps(line, indent=1), sep="\n")
        return int(line["verdict"] != "whole")
    lines, end = [], time.monotonic() + options.seconds
    for number in range(options.runs):
        if time.monotonic() > end:
            break
        lines.append(line := run(draw(options.seed, number)))
        if line["verdict"] != "whole":
            print(
                f"{options.seed}:{number} {line['verdict']}: {line['why']}\n{line['plan']}\n{line['output']}",
                flush=True,
            )
    verdicts = Counter(line["verdict"] for line in lines)
    bad = len(lines) - verdicts["whole"]
    killed, joined = (sum(line[name] for line in lines) for name in ("killed", "joined"))
    print(f"{len(lines)} jobs, {killed} processes killed, {joined} joins, {bad} bad: {dict(verdicts)}")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
