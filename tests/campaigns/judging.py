"""What the healing campaign demands of a job that has ended."""

from __future__ import annotations

import itertools
import re
import signal
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from tests.campaigns.plans import EPOCH, LEAVES, TIMEOUT, Fault, Plan
from tests.campaigns.training import (
    COLLECTIVES,
    COUNTS,
    LOST_ROOT,
    UNIT,
    checksums,
    expected,
    gradient,
    patterns,
    train,
)
from tests.forked_ranks import LAUNCHER, Ended, run_forked

#: Seconds after which a job of forked ranks hangs.
HANGS = 60.0


def replayed(history: Sequence[Any], period: int) -> list[str]:
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
    leaving = {fault.process for fault in plan.faults if fault.point == LEAVES}
    unplanned = job.departed - leaving | job.killed - {fault.process for fault in plan.faults}
    # A process that was to join may find that the job is over, or be ended then.
    if any(process < plan.ranks for process in unplanned):
        return "wrong", f"killed: {sorted(job.killed)}, left: {sorted(job.departed)}"
    if any(code not in (0, -signal.SIGKILL) for code in job.codes.values()):
        return _judge_end(plan, job)
    if not job.found:
        return "wrong", f"nobody is left: {job.codes}"
    found = sorted(job.found.values(), key=lambda one: one["slot"])
    history = found[0]["history"]
    problem = next((why for bad, why in _problems(plan, found, history) if bad), "")
    return ("wrong", problem) if problem else ("went on", "")


def _problems(plan: Plan, found: list[Any], history: list[Any]) -> list[tuple[bool, str]]:
    alive = [one["slot"] for one in found]
    # Where they are rounded, `compare` replays.
    period = plan.steps if plan.plugin == "torch" else EPOCH
    weights = found[0]["weights"] if plan.compression else replayed(history, period)
    problems = [
        (any(one["history"] != history for one in found), "the histories differ"),
        (any(one["weights"] != weights for one in found), "the weights are not those of the replay"),
        (any(one["left"] != alive for one in found), f"left: {found[0]['left']}, alive: {alive}"),
        (len(history) != plan.steps, f"{len(history)} steps"),
    ]
    for step, (averaged, after, value) in enumerate(history):
        problems += [
            (value != _expected(plan, step, after, value), f"step {step}: {value} over {after}"),
            (plan.skips[0] == step and plan.skips[1] in alive and averaged is not None, f"step {step}: not skipped"),
            (plan.skips[0] != step and averaged is None, f"step {step}: skipped"),
        ]
    return problems + (_problems_of_joins if plan.replaces else _problems_of_losses)(plan, found, history)


def _problems_of_losses(plan: Plan, found: list[Any], history: list[Any]) -> list[tuple[bool, str]]:
    """Nobody who is gone comes back, and nobody who lives is left out."""
    alive = [one["slot"] for one in found]
    problems = [
        (any(one["told"] != found[0]["told"] for one in found), "ranks were told of different losses"),
        (not set(found[0]["told"]).isdisjoint(alive), f"told of the loss of {found[0]['told']}"),
    ]
    died = {fault.process: fault.step for fault in plan.faults if fault.process not in alive}
    before = tuple(range(plan.ranks))
    for step, (averaged, after, _) in enumerate(history):
        # It may have died at the next barrier; with epochs, at one until the end of its epoch.
        earlier = [rank for rank, when in died.items() if _last_step(plan, when) < step - 1]
        problems += [
            (averaged is not None and not set(averaged) <= set(before), f"step {step}: a lost rank came back"),
            (not set(alive) <= set(after), f"step {step}: {after} lacks a rank that lives"),
            (not {r for r in range(plan.ranks) if r in alive or died[r] > step} <= set(after), f"step {step}: too few"),
            (bool(set(earlier) & set(after)), f"step {step}: {after} has ranks that were gone"),
        ]
        before = after
    return problems


def _problems_of_joins(plan: Plan, found: list[Any], history: list[Any]) -> list[tuple[bool, str]]:
    """Places are filled again."""
    few = sum(averaged is not None and len(averaged) < plan.ranks for averaged, *_ in history)
    left = found[0]["left"]  # not those of the last step, behind which others may have joined
    return [
        (few > 3 * len(plan.faults), f"slots stayed empty in {few} steps"),
        (len(left) < plan.most, f"{left} at the end, of {plan.most}"),
        (bool(plan.launcher) and len(left) < plan.ranks, f"{left} at the end, of {plan.ranks}"),
    ]


def _last_step(plan: Plan, step: int) -> int:
    """The last one in which a rank can be that is to die in a step."""
    return step if plan.plugin == "torch" else step // EPOCH * EPOCH + EPOCH - 1


def _expected(plan: Plan, step: int, after: Sequence[int], value: Any) -> Any:
    """The value that goes with a step after which these ranks were left."""
    if plan.plugin == "torch":
        return expected(COLLECTIVES[step % len(COLLECTIVES)], after)
    if step % EPOCH < EPOCH - 1 or value is None:
        return None
    ranks, mean = value  # some may have died in validation, and Lightning takes the mean of a metric before others
    died = [rank for rank in after if rank not in ranks]
    parts = itertools.chain.from_iterable(itertools.combinations(died, count) for count in range(len(died) + 1))
    means = [UNIT * sum([*ranks, *part]) / len([*ranks, *part]) for part in parts]
    return value if mean in means and set(ranks) <= set(after) else means


def _judge_end(plan: Plan, job: Ended) -> tuple[str, str]:
    """A job may end if the root of a broadcast dies, or a rank in `init`, or if one is stopped for too long."""
    alive = [process for process, code in job.codes.items() if code not in (0, -signal.SIGKILL)]
    # A launcher ends the others as soon as the first one has failed.
    tell = 1 if plan.launcher else len(alive)
    causes = {root for root in job.killed if job.output.count(f"{LOST_ROOT} {root}\n") >= tell}
    causes |= {fault.process for fault in plan.faults if fault.point == "stop" and plan.stops > float(TIMEOUT)}
    causes |= {fault.process for fault in plan.faults if fault.point == "init"}
    is_named = any(re.search(rf"\brank {rank}\b", job.output) for rank in causes)
    if is_named and not job.found and all(job.codes[process] == 1 for process in alive if process != LAUNCHER):
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
    skips = plan.skips if len(steps) < plan.steps else (plan.steps, 0)
    like = replace(plan, faults=faults, skips=skips)
    other = run_forked(plan.ranks, lambda rank: train(like, rank), HANGS, {}, nodes=plan.nodes)
    if not other.found:
        return "wrong", f"a job that is like it, {like}, ended with {other.codes}: {other.output}"
    if any(one["weights"] != found["weights"] for one in other.found.values()):
        return "wrong", f"the weights are not those of {like}: {other.codes}"
    return "went on", ""
