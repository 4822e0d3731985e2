"""A process of a job that the healing campaign starts as a user starts it: `launched_rank.py PLAN`, a plan as JSON."""

import json
import os
import sys

from tests.campaigns.light_torch import import_torch
from tests.campaigns.plans import LAUNCHED_TIMEOUT, Fault, Plan
from tests.worker import report


def plan_of(text: str) -> Plan:
    """The plan that `json.dumps(asdict(plan))` has written."""
    told = json.loads(text)
    told["faults"] = tuple(Fault(**fault) for fault in told["faults"])
    told["skips"], told["adds"] = tuple(told["skips"]), tuple(map(tuple, told["adds"]))
    return Plan(**told)


def own_number() -> int:
    """The number of this process, which it must know before `init` does."""
    spawned = os.environ.get("RING_SPAWNED", "::").split(":")[1]
    return int(os.environ.get("RING_JOINS") or spawned or os.environ["RANK"])


def main() -> None:
    plan = plan_of(sys.argv[1])
    os.environ["KERAS_BACKEND"] = plan.backend
    if plan.standbys:
        os.environ["RING_STANDBYS"] = str(plan.standbys)
    if plan.stops > float(LAUNCHED_TIMEOUT):
        os.environ["RING_TIMEOUT"] = LAUNCHED_TIMEOUT
    if not {"RING_LOSSES_TOLERATED", "RING_SLOT"} & set(os.environ):  # `ring run` starts this script again
        import ring_plugins as ring

        ring.init(ranks=plan.ranks, on_failure="replace" if plan.replaces else "continue")
        raise SystemExit("init() has returned in a process that is no rank")

    if plan.plugin == "torch":
        import_torch()
    from tests.campaigns.training import train  # imports torch

    process = own_number()
    report("found", train(plan, process), process)


if __name__ == "__main__":
    main()
