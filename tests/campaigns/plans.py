"""What a job of the healing campaign does and who is lost in it, drawn from a seed and a number."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

STEPS, REPLACING_STEPS = 8, 10
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
FACES = ("torch", "lightning", "keras")
#: Where a process dies if others are replaced: in a step, in a round of a join in that step, before it has joined, or
#: in one of its rounds.
STEP_POINTS = ("forward", "reduction", "update", "commit", "round")
NEW_POINTS = ("waiting", "round", "stopped", "reduction", "forward")
#: How jobs are started, and how often that is drawn. Which of these start them on several hosts, and on how many ranks
#: each; only some can start other numbers on each.
LAUNCHERS = {"python": 1, "ring run": 2, "mpirun": 1.5, "MPICH": 1, "torchrun": 1.5, "srun": 1}
LAYOUTS = ((1, 1), (2, 2), (1, 1, 1), (2, 2, 2))
UNEVEN_LAYOUTS = ((2, 1), (1, 3), (1, 2, 1))
#: What trains in such jobs, with which backend of Keras.
LAUNCHED_FACES = {
    ("torch", "torch"): 17, ("lightning", "torch"): 1,
    ("keras", "torch"): 0.7, ("keras", "tensorflow"): 0.7, ("keras", "jax"): 0.6,
}  # fmt: skip


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
        face: what trains: one of `FACES`.
        compression: of gradients between hosts, with error feedback; "" for none.
        steps: of the training.
        replaces: whether other processes take the places of lost ones.
        spares: that wait.
        most: up to how many ranks the job grows; 0 for no more than at the start.
        adds: in which steps it is asked for how many further ranks.
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
    face: str = "torch"
    compression: str = ""
    steps: int = STEPS
    replaces: bool = False
    spares: int = 0
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
    faces: Sequence[str] = FACES[:1],
    layout: Sequence[int] = (),
) -> Plan:
    """A job that goes on without the ranks that it loses.

    Args:
        seed, number: from which it is drawn.
        case: of `healing.CASES`.
        hosts: whether it has several hosts.
        faces: one of which trains.
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
    face, compression = drawn.choice(faces), ""
    if hosts:
        compression = drawn.choice(["", "", "", "bf16", "fp16"])
        # One that leaves does so wherever the others are.
        is_leaving = [fault.point not in ("healing", "stop") and drawn.random() < 0.15 for fault in faults]
        faults = [replace(one, point=LEAVES) if leaves else one for one, leaves in zip(faults, is_leaving, strict=True)]
    if face != "torch":
        faults, skips = [_at_epoch_end(fault) for fault in faults], (STEPS, 0)
    return Plan(seed, number, ranks, tuple(faults), in_place, skips, stops, nodes, face, compression, case=case)


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
    ranks, spares = sum(sizes), 0 if hosts else drawn.choice([0, 0, 1, 2])
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
    for newcomer in range(ranks, ranks + drawn.choice([0, 0, 1, 2]) * len(sizes)):
        point = drawn.choice(NEW_POINTS)
        faults.append(Fault(newcomer, drawn.randrange(2), point, drawn.randint(1, 3), drawn.choice(["before", "in"])))
    nodes = ",".join(map(str, sizes)) if hosts else ""
    return Plan(
        seed, number, ranks, tuple(faults), skips=(REPLACING_STEPS, 0), nodes=nodes, steps=REPLACING_STEPS,
        replaces=True, spares=spares, case=case,
    )  # fmt: skip


def draw_launched(seed: int, number: int) -> Plan:
    """A job that is started as a user starts it, on one host or on several test hosts."""
    drawn = random.Random(f"launched {seed}:{number}")
    launcher = drawn.choices(list(LAUNCHERS), list(LAUNCHERS.values()))[0]
    hosts = launcher != "python" and drawn.random() < 0.5
    layout: tuple[int, ...] = (drawn.choice([2, 3, 3, 4]),)
    if hosts:
        layout = drawn.choice(LAYOUTS + UNEVEN_LAYOUTS if launcher in ("ring run", "mpirun") else LAYOUTS)
    face, backend = drawn.choices(list(LAUNCHED_FACES), list(LAUNCHED_FACES.values()))[0]
    case = "launchers"
    if face == "torch" and (not hosts or launcher == "ring run") and drawn.random() < 0.5:
        plan = draw_replacing(seed, number, case=case, hosts=hosts)
    else:
        plan = draw_losses(seed, number, case=case, hosts=hosts, faces=[face], layout=layout)
    plan = replace(plan, launcher=launcher, backend=backend, compression="")
    if hosts and plan.replaces:  # of a host that loses all ranks, nobody takes the places
        return plan
    kind = drawn.random()
    step, victim, at = drawn.randrange(4), drawn.randrange(plan.ranks), drawn.randint(1, 4)
    if kind < 0.05 and face == "torch":
        return replace(plan, faults=(Fault(victim, 0, "init", at, drawn.choice(["before", "in"])),))
    if kind < 0.12 and face == "torch":
        return replace(plan, faults=(Fault(victim, step, "stop", at, ""),), stops=drawn.choice(STOPS))
    if kind < 0.3 and hosts:
        return replace(plan, faults=_all_of_a_host(drawn, layout, plan.faults[0]))
    faults = list(plan.faults)
    for place, fault in enumerate(faults):
        is_first = fault.process < plan.ranks and fault.point not in ("healing", "stop", "round")
        if is_first and not hosts and drawn.random() < 0.15:
            faults[place] = replace(fault, point=LEAVES)
    return replace(plan, faults=tuple(faults))


def _all_of_a_host(drawn: random.Random, layout: Sequence[int], like: Fault) -> tuple[Fault, ...]:
    """All ranks of a host die at once."""
    host = drawn.randrange(len(layout))
    ranks = range(sum(layout[:host]), sum(layout[: host + 1]))
    point = "reduction" if like.point in ("healing", "stop", LEAVES) else like.point
    return tuple(replace(like, process=rank, point=point, when="in") for rank in ranks)


def draw_growing(seed: int, number: int) -> Plan:
    """A job of `draw_replacing` that also grows; among those that die may be further ranks and what replaces them."""
    plan, drawn = draw_replacing(seed, number, case="growing"), random.Random(f"growing {seed}:{number}")
    further = drawn.randint(1, 2)
    steps = [drawn.randrange(REPLACING_STEPS - 5)] * further
    if drawn.random() < 0.5:
        steps = [drawn.randrange(REPLACING_STEPS - 5) for _ in range(further)]
    # The first processes of further seats have their numbers, and those that replace others have higher ones.
    moves = drawn.choice([0, 0, further])
    faults = [replace(one, process=one.process + moves) if one.process >= plan.ranks else one for one in plan.faults]
    adds = tuple((step, steps.count(step)) for step in sorted(set(steps)))
    return replace(plan, faults=tuple(faults), most=plan.ranks + further, adds=adds)
