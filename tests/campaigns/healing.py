"""Random faults in jobs that heal: the others must go on whole, or end as the documentation says.

    python -m tests.campaigns.healing --jobs 300 --seed 1                       # all cases; about ten minutes
    python -m tests.campaigns.healing --only 1:17                               # job 17 of seed 1 again, with output
    python -m tests.campaigns.healing --cases "one host" replaced --jobs 300    # of these cases alone
    python -m tests.campaigns.healing --faults 1000 --out healing.jsonl         # until there were so many faults
    python -m tests.campaigns.healing --table healing.jsonl                     # what it has found
    python -m tests.campaigns.healing --keep NAME healing.jsonl                 # also into benchmarks/results

A job is drawn from its seed and number, and from the cases that may be drawn, alone. Its processes train, and kill or
stop themselves at the points that were drawn. Then it is judged:

    went on   the others finished every step, with the weights of a replay of the membership log in one process, to the
              last bit; they agree on that log, and it has nobody who was gone, and lacks nobody who was not; where
              others take the places of lost ranks, all places were filled again
    ended     every rank ended with an error that names the dead or stopped one, where docs/fault_tolerance.md says so
    hang      a process still ran after a minute; if users' launchers start it on a busy machine, after a longer time
    left      a process or a file stayed behind
    wrong     anything else

With `--out`, each job adds a line of JSON to the file when it has ended, and jobs that it already has are not run
again. So an interrupted campaign goes on where it was, and several may share the file (`--lane 0/2` and `--lane 1/2`).

plans.py draws, training.py is what a process does, judging.py judges. **To add a case**: write a `draw_...` there that
returns a `Plan` (a new field has a default, so that other cases need not know it), let training.py act on it, and add a
line to `CASES`, which says how its jobs are started: forked here, or as a user starts them. What only jobs of one kind
must hold is a `_problems_of_...` in judging.py.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # the ranks are forked
os.environ.setdefault("KERAS_BACKEND", "torch")

import torch

from tests.campaigns.judging import HANGS, compare, judge
from tests.campaigns.launching import missing, run_launched
from tests.campaigns.plans import (
    PLUGINS,
    TIMEOUT,
    Plan,
    draw_growing,
    draw_launched,
    draw_losses,
    draw_replacing,
)
from tests.campaigns.replacing import run_replaced, run_replaced_between_hosts
from tests.campaigns.training import train
from tests.forked_ranks import Ended, run_forked
from tests.launch import hear_interrupts

ROOT = Path(__file__).parent.parent.parent
RESULT = ROOT / "benchmarks" / "results" / "healing_campaign.json"
GOOD = ("went on", "ended")


@dataclass(frozen=True)
class Case:
    """A kind of job.

    Attributes:
        draw: its plan, from a seed and a number.
        run: starts it, and waits for its end.
    """

    draw: Callable[[int, int], Plan]
    run: Callable[[Plan], Ended]


def _forked(plan: Plan) -> Ended:
    is_stopped = any(fault.point == "stop" for fault in plan.faults)
    environment = {"RING_TIMEOUT": TIMEOUT} if is_stopped else {}
    return run_forked(plan.ranks, partial(train, plan), HANGS, environment, plan.stops, plan.nodes)


def _replaced(plan: Plan) -> Ended:
    if plan.nodes:
        return run_replaced_between_hosts([*map(int, plan.nodes.split(","))], partial(train, plan), HANGS)
    return run_replaced(plan.ranks, plan.standbys, partial(train, plan), HANGS, plan.most)


CASES = {
    "one host": Case(draw_losses, _forked),
    "several hosts": Case(partial(draw_losses, case="several hosts", hosts=True), _forked),
    "faces": Case(partial(draw_losses, case="faces", hosts=True, plugins=PLUGINS[1:]), _forked),
    "replaced": Case(draw_replacing, _replaced),
    "launchers": Case(draw_launched, run_launched),
    "growing": Case(draw_growing, _replaced),
    "replaced on hosts": Case(partial(draw_replacing, case="replaced on hosts", hosts=True), _replaced),
}


def draw(seed: int, number: int, cases: Sequence[str]) -> Plan:
    """The plan of a job of one of these cases, which take turns."""
    return CASES[cases[number % len(cases)]].draw(seed, number)


def run(plan: Plan) -> dict[str, Any]:
    """Run a plan; returns a line of the result."""
    job = CASES[plan.case].run(plan)
    verdict, why = judge(plan, job)
    if verdict == "went on" and plan.compression:
        verdict, why = compare(plan, job)
    points = {fault.process: fault.point for fault in plan.faults}
    return {
        "plan": asdict(plan), "verdict": verdict, "why": why, "seconds": round(job.seconds, 2),
        "killed": len(job.killed), "faults": Counter(job.faults.values()),
        "points": Counter(points[process] for process in job.faults),
        "joined": len(set(re.findall(r"\((process \d+)\) (?:in the place of rank \d+|as an added rank)", job.output))),
        "output": "" if verdict in GOOD else job.output, "commit": commit(),
    }  # fmt: skip


@cache
def commit() -> str:
    """What is tested; "" without git, and with a plus if it has changed since."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


# The campaign -------------------------------------------------------------------------------------


def faults(lines: Sequence[dict[str, Any]]) -> int:
    """How many processes died, left or were stopped as planned."""
    return sum(sum(line["faults"].values()) for line in lines)


def summary(
    lines: Sequence[dict[str, Any]], group: Callable[[dict[str, Any]], str] | None = None
) -> dict[str, dict[str, Any]]:
    """By the point of the first fault, or another group: numbers of jobs and verdicts, of faults and what came of them.

    Args:
        lines: of the jobs.
        group: of the plan of a job.
    """
    group = group or point_of
    rows: dict[str, dict[str, Any]] = {}
    for name in sorted({group(line["plan"]) for line in lines}):
        chosen = [line for line in lines if group(line["plan"]) == name]
        verdicts = Counter(line["verdict"] for line in chosen)
        rows[name] = {
            "jobs": len(chosen),
            "faults": faults(chosen),
            "deaths": sum(line["killed"] for line in chosen),
            "joins": sum(line["joined"] for line in chosen),
            "went on": verdicts.pop("went on", 0),
            "ended": verdicts.pop("ended", 0),
            "bad": sum(verdicts.values()),
            "seconds": round(statistics.median(line["seconds"] for line in chosen), 2),
        }
    return rows


def point_of(plan: dict[str, Any]) -> str:
    """Where the first process dies, if none does in healing or in a join."""
    points = [fault["point"] for fault in plan["faults"]]
    return next((point for point in ("healing", "round", "stopped", "waiting") if point in points), str(points[0]))


def starter_of(plan: dict[str, Any]) -> str:
    """How a job is started."""
    policy = "replace" if plan["replaces"] else "continue"
    return f"{plan['launcher']}{', several hosts' * bool(plan['nodes'])}: {policy}"


def plugin_of(plan: dict[str, Any]) -> str:
    """What trains."""
    return f"Keras on {plan['backend']}" if plan["plugin"] == "keras" else str(plan["plugin"])


def table(rows: dict[str, dict[str, Any]]) -> str:
    """The summary as text."""
    columns = list(next(iter(rows.values()), {}))
    text = [" " * 50 + "".join(f"{name:>9}" for name in columns)]
    return "\n".join(
        [*text, *(f"{name:<50}" + "".join(f"{row[one]:>9}" for one in columns) for name, row in rows.items())]
    )


def told(lines: Sequence[dict[str, Any]]) -> str:
    """All there is to say of these jobs."""
    bad = sum(line["verdict"] not in GOOD for line in lines)
    killed, joined = (sum(line[name] for line in lines) for name in ("killed", "joined"))
    last = f"{len(lines)} jobs, {faults(lines)} faults, {killed} processes killed, {joined} joins, {bad} bad"
    launched = [line for line in lines if line["plan"]["launcher"]]
    rows = summary(lines) | summary(launched, starter_of) | summary(launched, plugin_of)
    return f"{table(rows)}\n{last}"


def keep(kind: str, lines: Sequence[dict[str, Any]]) -> None:
    """Write the summary of a campaign beside those of other kinds."""
    kept = json.loads(RESULT.read_text()) if RESULT.exists() else {"campaigns": {}}
    campaigns = kept["campaigns"]
    models = re.findall(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    machine = f"{models[0] if models else platform.machine()}, {os.cpu_count()} cores, ranks of 1 thread, "
    machine += f"Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}"
    seed = lines[0]["plan"]["seed"]
    campaigns[kind] = {"seed": seed, "load": os.getloadavg()[0], "points": summary(lines)}
    if all(line["plan"]["launcher"] for line in lines):
        struck, tested = Counter[str](), Counter(line["commit"] for line in lines)
        for line in lines:
            struck.update(line["points"])
        campaigns[kind] |= {"machine": machine, "commits": tested, "struck": dict(sorted(struck.items()))}
        campaigns[kind] |= {"launchers": summary(lines, starter_of), "faces": summary(lines, plugin_of)}
    else:
        kept["machine"] = machine
    RESULT.write_text(json.dumps(kept, indent=1) + "\n")


def read(file: Path | None) -> list[dict[str, Any]]:
    """The lines of a campaign so far."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file and file.exists() else []


def progress(lines: Sequence[dict[str, Any]], began: int, options: argparse.Namespace, seconds: float) -> str:
    """How far a campaign is, and how long it will take; `began` of its lines were there before it."""
    done, wanted = (faults(lines), options.faults) if options.faults else (len(lines), options.jobs)
    now = done - (faults(lines[:began]) if options.faults else began)
    left = f"{(wanted - done) / now * seconds / 60:.0f} min left" if now else "no estimate yet"
    bad = sum(line["verdict"] not in GOOD for line in lines)
    of = f"{done} of {wanted} {'faults' if options.faults else 'jobs'}"
    return f"[{of}, {len(lines)} jobs, {bad} bad, {left}]"


def campaign(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Run the jobs that are not in the file yet, and add them to it."""
    began, lane, lanes = time.monotonic(), *map(int, options.lane.split("/"))
    before = read(options.out)
    lines, number, shown = list(before), lane, began
    is_done = {(line["plan"]["seed"], line["plan"]["number"]) for line in before}
    while (faults(lines) < options.faults) if options.faults else (number < options.jobs):
        if time.monotonic() > began + options.seconds:
            return
        if (options.seed, number) not in is_done:
            line = run(draw(options.seed, number, options.cases))
            if options.out:
                with options.out.open("a") as file:
                    file.write(json.dumps(line) + "\n")
            lines = read(options.out) if options.out else [*lines, line]
            yield line
            if time.monotonic() > shown + 10:
                shown = time.monotonic()
                print(progress(lines, len(before), options, shown - began), file=sys.stderr, flush=True)
        number += lanes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=300)
    parser.add_argument("--faults", type=int, default=0, help="run until there were so many, instead of --jobs")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="that are drawn")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no job begins")
    parser.add_argument("--lane", default="0/1", help="K/N: only every Nth job, from the Kth on")
    parser.add_argument("--out", type=Path, help="a line of JSON a job is added to this file")
    parser.add_argument("--only", metavar="SEED:NUMBER", help="repeat one job and print what it printed")
    parser.add_argument("--table", type=Path, help="print what is in such a file, and end")
    parser.add_argument("--keep", nargs=2, metavar=("NAME", "FILE"), help=f"as --table, and write {RESULT.name}")
    options = parser.parse_args()
    if options.table or options.keep:
        lines = read(options.table or Path(options.keep[1]))
        print(told(lines))
        if options.keep:
            keep(options.keep[0], lines)
        return 0
    if "launchers" in options.cases and (lacking := missing()):
        parser.error(f"--cases launchers: {lacking}")
    hear_interrupts()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # launched jobs do not outlive this one
    torch.set_num_threads(1)
    if "faces" in options.cases:
        import ring_plugins.keras
        import ring_plugins.lightning  # noqa: F401
    if options.only:
        line = run(draw(*map(int, options.only.split(":")), options.cases))  # type: ignore[misc]
        print(line.pop("output"), json.dumps(line, indent=1), sep="\n")
        return int(line["verdict"] not in GOOD)
    lines = []
    for line in campaign(options):
        lines.append(line)
        if line["verdict"] not in GOOD:
            plan = line["plan"]
            print(
                f"{plan['seed']}:{plan['number']} {line['verdict']}: {line['why']}\n{plan}\n{line['output']}",
                flush=True,
            )
    print(told(lines))
    return int(any(line["verdict"] not in GOOD for line in lines))


if __name__ == "__main__":
    sys.exit(main())
