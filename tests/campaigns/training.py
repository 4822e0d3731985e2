"""What a process of the healing campaign does: it trains, and dies, leaves or stops where its plan says so."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

import ring_plugins as ring
from ring_plugins.core.control import mesh_admission
from ring_plugins.core.control.consensus import Consensus
from ring_plugins.core.control.mesh import Mesh
from ring_plugins.core.members.members import Elastic
from ring_plugins.core.rendezvous.spawn import slots
from ring_plugins.core.world import current
from ring_plugins.launcher.growth import request_ranks
from ring_plugins.torch import DistributedOptimizer, TrainingState, broadcast_parameters
from tests import mortal
from tests.campaigns.healing_plugins import train_keras, train_lightning
from tests.campaigns.plans import LEAVES, QUIET_STEPS, Plan
from tests.joiners import wait_for_joiners
from tests.mortal import die, die_in_barrier, end_in_round
from tests.worker import report

COUNTS = (10, 20_000, 600_000)
#: Times whole numbers, it has exact averages over up to 6 ranks.
UNIT = 60.0
#: A rank prints this, and the root, if the root of a broadcast died.
LOST_ROOT = "no broadcast from"
#: A step in which no fault is planned.
NEVER = -1
COLLECTIVES = ("all_reduce", "all_gather", "barrier", "all_gather_object", "broadcast_object")
#: Seconds for which a step waits for processes that are to join, so that most do; and members for one that is stopped.
PENDING, PATIENCE = 5.0, 1.0
#: The same where new processes must import torch.
LAUNCHED_PENDING, LAUNCHED_PATIENCE = 60.0, 3.0


def gradient(step: int, slot: int) -> float:
    """The factor of all gradients of a rank in a step."""
    return UNIT * ((7 * step + 3 * slot) % 5 - 2)


def patterns(compression: str = "") -> list[torch.Tensor]:
    """What the gradients of each parameter are multiples of; with compression, numbers that are rounded."""
    return [(torch.arange(count) % 251 + 1) / 77 if compression else torch.arange(count) % 3 + 1.0 for count in COUNTS]


def checksums(model: Sequence[Any]) -> list[str]:
    """Of the weights."""
    arrays = [one.detach().numpy() if isinstance(one, torch.Tensor) else one for one in model]
    return [hashlib.blake2b(array.tobytes(), digest_size=8).hexdigest() for array in arrays]


def die_in_healing(when: str) -> None:
    """Die in the first agreement on who is left, see `Fault.when`."""
    follow = Elastic._follow
    if when == "before":
        Mesh.agree = lambda *_: die()  # type: ignore[method-assign, assignment, return-value]
    elif when == "over":

        def follow_and_die(
            elastic: Elastic, began: float, lost: Sequence[int] = (), *others: Any, **joined: Any
        ) -> None:
            follow(elastic, began, lost, *others, **joined)
            if lost:
                die()

        Elastic._follow = follow_and_die  # type: ignore[method-assign]
    else:  # half of the time, before it has told anybody
        adopt = Consensus._adopt
        Consensus._adopt = lambda *args: (os.getpid() % 2 and adopt(*args), die())  # type: ignore[method-assign, assignment, return-value]


class Mortal:
    """A process that may have a fault.

    Args:
        plan: of the job.
        process: its number.

    Attributes:
        step: in which it is, counted from its first one.
    """

    def __init__(self, plan: Plan, process: int) -> None:
        self._process = process
        self._fault = next((fault for fault in plan.faults if fault.process == process), None)
        self._dies_in_barrier = False
        self.step = 0
        mortal.last_words[:] = [lambda: self._tell("died")]
        self._timer = threading.Timer(0.05 * self._fault.number if self._fault else 0.0, die)
        self._timer.daemon = True
        if self._fault and self._fault.point in ("waiting", "init"):
            self._timer.start()

    def _tell(self, what: str) -> None:
        if "TEST_REPORTS" in os.environ:
            report("fault", what, self._process)

    def before_init(self) -> None:
        """Die before `init`."""
        if self._fault and self._fault.point == "init" and self._fault.when == "before":
            die()

    def after_init(self) -> None:
        """Die if `init` took less time than that."""
        if self._fault and self._fault.point == "init":
            die()

    def before_joining(self) -> None:
        """Die or stop in a round of the own join."""
        if self._fault and self._fault.point in ("round", "stopped"):
            if self._fault.point == "stopped":
                self._tell("stopped")
            end_in_round(self._fault.number, "stopped" if self._fault.point == "stopped" else self._fault.when)
            self._fault = None

    def has_joined(self) -> None:
        """No longer die while waiting: behind its last step, the others could not tell that it has not finished."""
        self._timer.cancel()

    def at(self, point: str) -> None:
        """Do what is planned for this point of the step."""
        fault = self._fault
        if fault is None or fault.step != self.step:
            return
        if fault.point == "stop" and point == ("forward", "update", "collective", "broadcast")[fault.number - 1]:
            self._tell("stopped")
            os.kill(os.getpid(), signal.SIGSTOP)
        if fault.point != point:
            return
        if point in ("forward", "between gradients", "update", "checkpoint", "commit"):
            die()
        self._fault = None
        if point == LEAVES:
            self._tell("left")
            os.kill(os.getpid(), signal.SIGTERM)
            return
        if point == "healing":
            die_in_healing(fault.when)
        elif point == "round":
            end_in_round(fault.number, fault.when)
        else:
            self._dies_in_barrier = True
            die_in_barrier(fault.number, fault.when)

    def over(self) -> None:
        """Die if the operation that has just ended had fewer barriers than that."""
        if self._dies_in_barrier:
            die()


def taken() -> list[int]:
    """The slots of the members; without replacements, the numbers with which they started."""
    return [current().members.known[rank].slot for rank in current().world_ranks]


def train(plan: Plan, process: int) -> dict[str, Any]:
    """What a process does."""
    mortal = Mortal(plan, process)
    if plan.plugin != "torch":
        trained = train_lightning if plan.plugin == "lightning" else train_keras
        options = {
            "compression": plan.compression or None, "error_feedback": bool(plan.compression), "overlap": plan.overlap
        }  # fmt: skip
        found = trained(mortal, process, plan.steps, patterns(plan.compression), gradient, UNIT * process, options)
        return {"slot": process, **found, "weights": checksums(found["weights"])}
    mesh_admission._PATIENCE = LAUNCHED_PATIENCE if plan.launcher else PATIENCE
    mortal.before_init()
    ring.init(on_failure="replace" if plan.replaces else "continue")
    mortal.after_init()
    loop = Loop(plan, mortal)
    while loop.state.step < plan.steps:
        loop.step()
    left = ring.all_gather_object(loop.slot)
    return {
        "slot": loop.slot, "history": loop.state.history, "weights": checksums(list(loop.model)), "left": left,
        "told": loop.told,
    }  # fmt: skip


class Loop:
    """A plain training loop.

    Attributes:
        slot: of this process.
        state: its `step` and `history`: for each step, over whose gradients it averaged (None if it was skipped), who
            was left after it, and what a collective gave.
        told: ranks that are gone, as `on_membership_change` tells them.
    """

    def __init__(self, plan: Plan, mortal: Mortal) -> None:
        self._plan, self._mortal, self.slot, is_new = plan, mortal, ring.rank(), current().is_joining
        self._asks = min(set(range(plan.ranks)).difference(fault.process for fault in plan.faults), default=-1)
        self.model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(count)) for count in COUNTS])
        broadcast_parameters(self.model)
        self._optimizer = DistributedOptimizer(
            torch.optim.SGD(self.model.parameters(), lr=0.5, momentum=0.5), self.model.named_parameters(),
            bucket_bytes=4096, compression=plan.compression or None, error_feedback=bool(plan.compression),
            overlap=plan.overlap,
        )  # fmt: skip
        self.model[1].register_post_accumulate_grad_hook(lambda _: mortal.at("between gradients"))
        self._optimizer.optimizer.register_step_pre_hook(lambda *_: mortal.at("update"))
        self._factors, self._log, self.told = patterns(plan.compression), averages_log(self._optimizer), list[int]()
        ring.on_membership_change(lambda change: self.told.extend([*change.lost, *change.left]))
        if is_new:
            mortal.before_joining()
        self.state: Any = SimpleNamespace(step=0, history=[])
        if plan.replaces:
            self.state = TrainingState(model=self.model, optimizer=self._optimizer, step=0, history=[])
        mortal.has_joined()
        self._first = self.state.step if is_new else 0

    def step(self) -> None:
        """A step, and what may follow it."""
        state, mortal = self.state, self._mortal
        mortal.step = state.step - self._first
        if self._plan.replaces and self._plan.launcher and state.step >= self._plan.steps - QUIET_STEPS:
            mortal.step = NEVER
        mortal.at("healing")
        mortal.at("round")
        if self._plan.replaces:
            places = slots()
            if self.slot == self._asks and current().world_rank == self.slot:
                for number in [number for step, number in self._plan.adds if step == state.step]:
                    request_ranks(number, os.getppid())
            in_use = places.in_use if places is not None else 0
            wanted = set(range(max(self._plan.ranks, in_use)))
            wait_for_joiners(wanted.difference(taken()), LAUNCHED_PENDING if self._plan.launcher else PENDING)
        for point in ("forward", LEAVES, "skipped step"):
            mortal.at(point)
        averaged = self._update()
        mortal.at("collective")
        value = collective(COLLECTIVES[state.step % len(COLLECTIVES)], self.slot)
        mortal.over()
        after = taken()
        mortal.at("broadcast")
        broadcast(current().world_ranks[-1], current().world_rank)
        mortal.over()
        state.history = [*state.history, [averaged, after, value]]
        assert current().world_ranks[ring.rank()] == current().world_rank
        assert ring.size() == len(current().world_ranks)
        state.step += 1
        mortal.at("commit")
        if self._plan.replaces:
            state.commit()

    def _update(self) -> list[int] | None:
        """Train on a batch; returns over whose gradients was averaged, None if the step was skipped."""
        step, mortal = self.state.step, self._mortal
        self._log.clear()
        with self._optimizer.skip_step_on(MemoryError) as outcome:
            self._optimizer.zero_grad(set_to_none=not self._plan.in_place)
            if self._plan.skips == (step, self.slot):
                raise MemoryError("no room")
            factor = gradient(step, self.slot)
            loss = sum((p * (factor * one)).sum() for p, one in zip(self.model, self._factors, strict=True))
            mortal.at("reduction")
            loss.backward()  # type: ignore[union-attr]
            mortal.over()
            self._optimizer.step()
        mortal.over()
        assert len(self._log) == (not outcome.skipped)
        return None if outcome.skipped else [current().members.known[rank].slot for rank in self._log[0]]


def averages_log(optimizer: DistributedOptimizer) -> list[tuple[int, ...]]:
    """A list that gets the members at the end of each pass; the next death may be found in the same backward."""
    log: list[tuple[int, ...]] = []
    check = optimizer.averager._recovery
    assert check is not None
    after_pass = check.after_pass
    check.after_pass = lambda named: (log.append(current().world_ranks), after_pass(named))  # type: ignore[method-assign, assignment, func-returns-value, return-value]
    return log


def collective(name: str, slot: int) -> Any:
    """A public function's result, as a number or a list."""
    if name == "all_reduce":
        return float(ring.all_reduce(torch.tensor([UNIT * slot])))
    if name == "all_gather":
        return ring.all_gather(torch.tensor([float(slot)])).tolist()
    if name == "barrier":
        return ring.barrier()
    if name == "all_gather_object":
        return ring.all_gather_object(slot)
    with contextlib.suppress(ring.PeerFailed):  # the root may die, but rank 0 of those that are left is another then
        return ring.broadcast_object(f"from {slot}", 0)[:5]
    return "from "


def broadcast(root: int, me: int) -> None:
    """From the process with the number `root`."""
    told = torch.full((5,), float(me))
    try:
        told = ring.broadcast(told, current().world_ranks.index(root))
    except ring.PeerFailed:
        print(f"{LOST_ROOT} {root}", flush=True)
        raise
    assert set(told.tolist()) == {root}


def expected(name: str, ranks: Sequence[int]) -> Any:
    """What `collective` returns if these took part."""
    if name == "all_reduce":
        return UNIT * sum(ranks) / len(ranks)
    return {"barrier": None, "broadcast_object": "from "}.get(name, list(ranks))
