"""What a job of the healing campaign does and who is lost in it, drawn from a seed and a number."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

STEPS, REPLACING_STEPS = 8, 10
#: So many that all slots are taken at the end, although a process that joins may die, and its successor, too.
GROWING_STEPS = 16
#: Steps of an epoch, where something has epochs.
EPOCH = 4
#: Seconds that ranks wait for one that is stopped, and for which a rank is stopped: less, or more.
TIMEOUT, STOPS = "4", (0.3, 6.0)
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
PLUGINS = ("torch", "lightning", "keras")
#: Where a process dies if others are replaced: in a step, in a round of a join in that step, before it has joined, or
#: in one of its rounds.
STEP_POINTS = ("forward", "reduction", "update", "commit", "round")
NEW_POINTS = ("waiting", "round", "stopped", "reduction", "forward")
#: How jobs are started, and how often that is drawn. Which of these start them on several hosts, and on how many ranks
#: each; only some can start other numbers on each.
LAUNCHERS = {"python": 1, "ring run": 2, "mpirun": 1.5, "MPICH": 1, "torchrun": 1.5, "srun": 1}
LAYOUTS = ((2, 2), (1, 1, 1), (2, 2, 2), (3, 3))
UNEVEN_LAYOUTS = ((1, 3), (3, 2), (1, 2, 1), (2, 3))
#: What trains in such jobs, with which backend of Keras.
LAUNCHED_PLUGINS = {
    ("torch", "torch"): 22, ("lightning", "torch"): 1,
    ("keras", "torch"): 0.7, ("keras", "tensorflow"): 0.7, ("keras", "jax"): 0.6,
}  # fmt: skip
#: Since a start takes seconds, such a job is longer, and loses several processes one after the other.
LOSING_STEPS, LAUNCHED_STEPS = 12, 40
#: Of the latter, those at the end in which nobody is lost, so that all places can be filled again.
QUIET_STEPS = 8
#: How many of the processes that take others' places have a fault, of each host: a place is filled 5 times an hour.
NEW_FAULTS = 4
#: What happens there to a rank, and to a process that takes another's place.
LOST_AT = {
    "forward": 1, "between gradients": 1, "reduction": 3, "update": 1, "collective": 1, "healing": 2,
    "skipped step": 1, LEAVES: 1.5,
}  # fmt: skip
REPLACED_AT = {
    "forward": 1, "between gradients": 1, "reduction": 3, "update": 1, "collective": 0.7, "healing": 1.5, "commit": 1,
    "round": 2, LEAVES: 1,
}  # fmt: skip
NEW_AT = {**REPLACED_AT, "waiting": 2, "stopped": 0.7, "round": 3, "healing": 0.5}
#: Seconds for which a rank is stopped there, and RING_TIMEOUT where that is less.
LAUNCHED_STOPS, LAUNCHED_TIMEOUT = (0.3, 2.0, 12.0), "8"


@dataclass(frozen=True)
class Fault:
    """What a process does to itself.

    Attributes:
        process: its number: its rank for the first ones, and further ones in the order of their start.
        step: when, or how many steps after it has joined.
        point: one of those above.
        number: of the barrier or exchange, counted from the beginning of the reduction, collective or step; or of the
            round of a join.
        when: "before" or "in" that barrier; in healing, "before" it, once it has "decided", or when it is "over".
    """

    process: int
    step: int
    point: str
    number: int
    when: str


@dataclass(frozen=True)
class Plan:
    """A job.

    Attributes:
        seed, number: it was drawn from.
        ranks: of the job.
        faults: at most one for each process.
        in_place: whether gradients accumulate in the memory in which they are averaged.
        skips: in which step, and which rank cannot compute its gradients.
        stops: seconds for which a rank is stopped.
        nodes: of how many ranks each host is, as RING_VIRTUAL_NODES takes it; "" for one host.
        plugin: what trains: one of `PLUGINS`.
        compression: of gradients between hosts, with error feedback; "" for none.
        overlap: whether gradients are averaged while backward runs.
        steps: of the training.
        replaces: whether other processes take the places of lost ones.
        standbys: that wait.
        most: up to how many ranks the job grows; 0 for no more than at the start.
        adds: in which steps it is asked for how many added ranks.
        case: of `healing.CASES`.
        launcher: that starts the job, one of `LAUNCHERS`; "" if its ranks are forked.
        backend: of Keras.
    """

    seed: int
    number: int
    ranks: int
    faults: tuple[Fault, ...]
    in_place: bool = False
    skips: tuple[int, int] = (STEPS, 0)
    stops: float = STOPS[0]
    nodes: str = ""
    plugin: str = "torch"
    compression: str = ""
    overlap: bool = False
    steps: int = STEPS
    replaces: bool = False
    standbys: int = 0
    most: int = 0
    adds: tuple[tuple[int, int], ...] = ()
    case: str = ""
    launcher: str = ""
    backend: str = "torch"


def draw_losses(
    seed: int,
    number: int,
    *,
    case: str = "one host",
    hosts: bool = False,
    plugins: Sequence[str] = PLUGINS[:1],
    layout: Sequence[int] = (),
) -> Plan:
    """A job that goes on without the ranks that it loses.

    Args:
        seed, number: from which it is drawn.
        case: of `healing.CASES`.
        hosts: whether it has several hosts.
        plugins: one of which trains.
        layout: ranks of each host, if that is not drawn.
    """
    drawn = random.Random(f"{seed}:{number}")
    ranks = sum(layout) or drawn.randint(2, 6)
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
        parts = layout or [end - start for start, end in zip([0, *cuts], [*cuts, ranks], strict=True)]
        nodes = ",".join(map(str, parts))
        # Exchanges with other hosts count beside barriers, so there are more.
        faults = [fault if fault.point == "stop" else replace(fault, number=drawn.randint(1, 24)) for fault in faults]
    plugin, compression = drawn.choice(plugins), ""
    if hosts:
        compression = drawn.choice(["", "", "", "bf16", "fp16", "int8"])
        # One that leaves does so wherever the others are.
        is_leaving = [fault.point not in ("healing", "stop") and drawn.random() < 0.15 for fault in faults]
        faults = [replace(one, point=LEAVES) if leaves else one for one, leaves in zip(faults, is_leaving, strict=True)]
    if plugin != "torch":
        faults, skips = [_at_epoch_end(fault) for fault in faults], (STEPS, 0)
    options = in_place, skips, stops, nodes, plugin, compression, drawn.random() < 0.6
    return Plan(seed, number, ranks, tuple(faults), *options, case=case)


def _at_epoch_end(fault: Fault) -> Fault:
    """The counterpart of a fault in a training that has epochs."""
    if fault.point not in AT_EPOCH_END:
        return fault
    return replace(fault, point=AT_EPOCH_END[fault.point], step=fault.step // EPOCH * EPOCH + EPOCH - 1)


def draw_replacing(seed: int, number: int, *, case: str = "replaced", hosts: bool = False) -> Plan:
    """A job in which processes take the places of lost ones, on one host or on several.

    One of the first processes stays, of each host.
    """
    drawn = random.Random(f"{seed}:{number}")
    sizes = [drawn.randint(2, 4)]
    if hosts:  # with 6 ranks at most, over which averages are exact
        sizes = list(drawn.choice([(1, 2), (2, 2), (3, 1), (2, 3), (3, 3), (2, 1, 2), (1, 3, 1), (2, 2, 2), (1, 2, 3)]))
    ranks, standbys = sum(sizes), 0 if hosts else drawn.choice([0, 0, 1, 2])
    first = [sum(sizes[:host]) for host in range(len(sizes))]
    stays = {start + drawn.randrange(size) for start, size in zip(first, sizes, strict=True)}
    mortals = [rank for rank in range(ranks) if rank not in stays]
    victims = drawn.sample(mortals, drawn.randint(1, len(mortals)))
    at_once, step = drawn.random() < 0.4, drawn.randrange(REPLACING_STEPS - 4)
    faults = []
    for victim in victims:
        point = drawn.choice(STEP_POINTS) if faults else drawn.choice(("forward", "reduction", "update", "commit"))
        when = step if at_once or not faults else drawn.randrange(REPLACING_STEPS - 4)
        barrier = drawn.randint(1, 24 if hosts and point == "reduction" else 3)
        faults.append(Fault(victim, when, point, barrier, drawn.choice(["before", "in"])))
    for joiner in range(ranks, ranks + drawn.choice([0, 0, 1, 2]) * len(sizes)):
        point = drawn.choice(NEW_POINTS)
        faults.append(Fault(joiner, drawn.randrange(2), point, drawn.randint(1, 3), drawn.choice(["before", "in"])))
    nodes = ",".join(map(str, sizes)) if hosts else ""
    return Plan(
        seed, number, ranks, tuple(faults), skips=(REPLACING_STEPS, 0), nodes=nodes, steps=REPLACING_STEPS,
        replaces=True, standbys=standbys, case=case,
    )  # fmt: skip


def draw_launched(seed: int, number: int) -> Plan:
    """A job that is started as a user starts it, on one host or on several test hosts; it loses several processes."""
    drawn = random.Random(f"launched {seed}:{number}")
    launcher, (plugin, backend) = _drawn(drawn, LAUNCHERS), _drawn(drawn, LAUNCHED_PLUGINS)
    hosts = launcher != "python" and drawn.random() < 0.35
    is_uneven = launcher in ("ring run", "mpirun")  # others start equally many ranks on each host
    if plugin == "torch" and drawn.random() < 0.65:
        sizes = (drawn.choice([3, 4, 4, 5]),)
        if hosts:
            sizes = drawn.choice([(2, 2), (2, 3), (3, 1), (3, 2)][: 4 if is_uneven else 1])
        plan = _many_replaced(drawn, sizes)
        standbys = 0 if hosts else drawn.choice([0, 0, 1, 2])
        plan = replace(plan, standbys=standbys)
    else:
        most = 5 if plugin == "torch" else 4 if backend == "torch" else 3
        sizes = drawn.choice([(3,), (4,), (5,), (5,)][: most - 2])
        if hosts:
            layouts = LAYOUTS + UNEVEN_LAYOUTS if is_uneven else LAYOUTS
            sizes = drawn.choice([layout for layout in layouts if plugin == "torch" or sum(layout) <= 4])
        plan = _many_lost(drawn, sizes, plugin)
    plan = replace(plan, seed=seed, number=number, launcher=launcher, backend=backend, case="launchers")
    return replace(plan, nodes=",".join(map(str, sizes)) if hosts else "")


def _drawn(drawn: random.Random, weights: dict[Any, float]) -> Any:
    return drawn.choices(list(weights), list(weights.values()))[0]


def _many_lost(drawn: random.Random, sizes: Sequence[int], plugin: str) -> Plan:
    """All ranks but one or two are lost one after the other, perhaps all of a host at last."""
    ranks, is_torch = sum(sizes), plugin == "torch"
    number = lambda: drawn.randint(1, 4 if len(sizes) == 1 else 24)  # noqa: E731
    alive = list(range(ranks))
    lives = drawn.sample(alive, 1 if ranks < 4 else drawn.choice([1, 1, 2]))
    victims = drawn.sample([rank for rank in alive if rank not in lives], ranks - len(lives))
    kind, skips = drawn.random(), (LOSING_STEPS, 0)
    whole = list[int]()
    if len(sizes) > 1 and kind < 0.3:
        end = len(sizes) - 1 if drawn.random() < 0.5 else drawn.randrange(len(sizes))
        whole = [*range(sum(sizes[:end]), sum(sizes[: end + 1]))]
        lives = [rank for rank in lives if rank not in whole] or [next(rank for rank in alive if rank not in whole)]
        victims = [rank for rank in victims if rank not in whole and rank not in lives]
    faults, step = list[Fault](), drawn.randrange(2)
    for victim in victims:
        point, last = _drawn(drawn, LOST_AT), victim == victims[-1]
        if last and drawn.random() < (0.1 if is_torch else 0.3):
            point = "broadcast"  # which may end the job; with epochs, a checkpoint
        if point == "collective" and victim == alive[-1] and not last:
            point = "reduction"  # the broadcast behind it may end the job
        point, step = _while_others_recover(point, step, faults)
        if point == "skipped step":
            skips = skips if skips[0] < LOSING_STEPS else (step, drawn.choice(lives))
            point = point if skips[0] == step else "update"
        when = drawn.choice(["before", "decided", "over"] if point == "healing" else ["before", "in"])
        faults.append(Fault(victim, step, point, number(), when))
        alive.remove(victim)
        step = min(step + drawn.choice([0, 0, 1, 1, 2]), LOSING_STEPS - 2)
    point = drawn.choice(["forward", "reduction", "update"])
    faults += [Fault(rank, step, point, faults[0].number if faults else 1, "in") for rank in whole]
    stops = LAUNCHED_STOPS[0]
    if is_torch and 0.3 <= kind < 0.6:
        stops = drawn.choice([*LAUNCHED_STOPS[:2] * 3, LAUNCHED_STOPS[2]])
        when = LOSING_STEPS - 1 if stops == LAUNCHED_STOPS[2] else drawn.randrange(LOSING_STEPS)
        faults.append(Fault(lives[0], when, "stop", drawn.randint(1, 4), ""))
    if is_torch and kind > 0.97:
        faults = [Fault(drawn.randrange(ranks), 0, "init", drawn.randint(1, 4), drawn.choice(["before", "in"]))]
    if not is_torch:
        faults, skips = [_at_epoch_end(fault) for fault in faults], (LOSING_STEPS, 0)
    return Plan(
        0, 0, ranks, tuple(faults), drawn.random() < 0.3, skips, stops, plugin=plugin, steps=LOSING_STEPS,
    )  # fmt: skip


def _many_replaced(drawn: random.Random, sizes: Sequence[int]) -> Plan:
    """Ranks are lost one after the other, and so are processes that take their places; one stays of each host."""
    ranks, hosts = sum(sizes), len(sizes)
    first = [sum(sizes[:host]) for host in range(hosts)]
    stays = [start + drawn.randrange(size) for start, size in zip(first, sizes, strict=True)]
    mortals = [rank for rank in range(ranks) if rank not in stays]
    faults, step = list[Fault](), drawn.randrange(3)
    for victim in drawn.sample(mortals, len(mortals) if drawn.random() < 0.7 else max(1, len(mortals) - 1)):
        point = _drawn(drawn, REPLACED_AT)
        if point == "round" and not faults:
            point = "forward"  # nobody joins before somebody is lost
        point, step = _while_others_recover(point, step, faults)
        faults.append(_fault_of_replaced(drawn, victim, step, point, hosts))
        step += drawn.choice([0, 0, 1, 2, 3, 4])
    news = drawn.randint(2, NEW_FAULTS) * hosts
    for joiner in range(ranks, ranks + news):
        fault = _fault_of_replaced(drawn, joiner, drawn.randrange(4), _drawn(drawn, NEW_AT), hosts)
        if sizes[(joiner - ranks) % hosts] > 1:  # otherwise nobody is replaced on its host
            faults.append(fault)
    stops = LAUNCHED_STOPS[0]
    if drawn.random() < 0.3:
        stops = drawn.choice(LAUNCHED_STOPS[:2])
        faults.append(Fault(drawn.choice(stays), drawn.randrange(LAUNCHED_STEPS // 2), "stop", drawn.randint(1, 4), ""))
    skips = (drawn.randrange(1, LAUNCHED_STEPS - 1) if drawn.random() < 0.5 else LAUNCHED_STEPS, drawn.choice(stays))
    in_place = drawn.random() < 0.3
    return Plan(0, 0, ranks, tuple(faults), in_place, skips, stops, steps=LAUNCHED_STEPS, replaces=True)


def _while_others_recover(point: str, step: int, faults: Sequence[Fault]) -> tuple[str, int]:
    """Point and step of a further fault; nobody dies in healing unless another one has died in that step."""
    if point != "healing":
        return point, step
    if faults and faults[-1].point in ("forward", "reduction", "update", "healing"):
        return point, faults[-1].step
    return "reduction", step


def _fault_of_replaced(drawn: random.Random, process: int, step: int, point: str, hosts: int) -> Fault:
    number = drawn.randint(1, 3)
    if point == "reduction" and hosts > 1:
        number = drawn.randint(1, 24)
    if point == "collective":
        number = 1  # in the broadcast behind it, it may end the job
    when = drawn.choice(["before", "decided", "over"] if point == "healing" else ["before", "in"])
    return Fault(process, step, point, number, when)


def draw_growing(seed: int, number: int) -> Plan:
    """A job of `draw_replacing` that also grows; among those that die may be added ranks and what replaces them."""
    plan, drawn = draw_replacing(seed, number, case="growing"), random.Random(f"growing {seed}:{number}")
    further = drawn.randint(1, 2)
    steps = [drawn.randrange(REPLACING_STEPS - 5)] * further
    if drawn.random() < 0.5:
        steps = [drawn.randrange(REPLACING_STEPS - 5) for _ in range(further)]
    # The first processes of added slots have their numbers, and those that replace others have higher ones.
    moves = drawn.choice([0, 0, further])
    faults = [replace(one, process=one.process + moves) if one.process >= plan.ranks else one for one in plan.faults]
    adds = tuple((step, steps.count(step)) for step in sorted(set(steps)))
    return replace(
        plan, faults=tuple(faults), most=plan.ranks + further, adds=adds, steps=GROWING_STEPS, skips=(GROWING_STEPS, 0)
    )
