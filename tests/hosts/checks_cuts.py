"""A job without a framework, so that it starts soon, in which other processes take the places of lost ones.

TEST_DEATHS and TEST_PENDING are as in tests/torch/checks_replacement.py. TEST_ADDED says that rank 0 asks for added
ranks: [step, number, host]. Then the job takes more steps until there are TEST_MOST ranks. Each reports what it has in
the end, or the error with which it ends.
"""

import json
import os
import time

import numpy as np

import ring_plugins as ring
from ring_plugins.core.joining.join import admit, join
from ring_plugins.core.joining.state_transfer import fails_alone, transfer_state
from ring_plugins.core.world import current
from ring_plugins.launcher.growth import request_ranks
from tests.joiners import wait_for_joiners
from tests.mortal import end_at, end_in_round
from tests.worker import report

PENDING, ADDED = float(os.environ.get("TEST_PENDING", "0")), json.loads(os.environ.get("TEST_ADDED", "null"))
STEPS, MOST, LAST = 10, int(os.environ.get("TEST_MOST", "0")), 1000


def gradient(step: int, slot: int) -> float:
    return 12.0 * ((7 * step + 3 * slot) % 5 - 2)


def begin(points: list[str]) -> None:
    for point in points:
        if point.startswith("round"):
            end_in_round(int(point.split()[1]), point.split()[2])
        else:
            end_at(point)


class Training:
    """Adds averaged gradients up; the second weight comes from an operation of its own."""

    def __init__(self) -> None:
        self.step, self.history = 0, list[list[int]]()
        self.weights, self.large = 0.0, np.zeros(30_000)

    def take_step(self, slot: int) -> None:
        elastic, own = current().elastic, gradient(self.step, slot)
        told = ring.all_gather_object((slot, own, elastic.wants_change))
        self.weights += sum(one for _, one, _ in told) / len(told)
        self.history.append([one for one, _, _ in told])
        self.large += ring.all_reduce(np.full(self.large.size, own))
        self.step += 1
        if any(wants for *_, wants in told):
            elastic.change_members()
        if elastic.pending:
            self.share(admit("here", added=True))

    def share(self, joined: tuple[int, ...]) -> None:
        if not joined:
            return
        communicator = current().communicator
        large = [self.large]

        def send(_: object, giver: object) -> None:
            large[0] = communicator.broadcast_object(self.large, giver())

        state = transfer_state(lambda: (None, (self.step, self.history, self.weights)), joined, send)
        if state is not None:
            with fails_alone():
                (self.step, self.history, self.weights), self.large = state, large[0].copy()
        current().elastic.tell_changes()


def main() -> None:
    ring.init()
    world, slot = current(), ring.rank()
    is_new, ranks = world.is_joining, int(os.environ["TEST_RANKS"])
    deaths = [(step, point) for of, step, point in json.loads(os.environ["TEST_DEATHS"]) if of == slot]
    mine = [(step, point.removeprefix("joiner ")) for step, point in deaths if ("joiner" in point) == is_new]
    if is_new:
        report("came", world.world_rank, slot)
    training = Training()
    try:
        if is_new:
            begin([point for _, point in mine])
            training.share(join("here"))
        while training.step < STEPS or (len(training.history[-1]) < MOST and training.step < LAST):
            if ADDED and slot == 0 and training.step == ADDED[0]:
                report("answer", request_ranks(ADDED[1], None, ADDED[2]), slot)
            begin([point for step, point in mine if step == training.step and not is_new])
            if PENDING:
                missing = set(range(ranks)).difference(world.members.taken_slots)
                wait_for_joiners(missing, PENDING)
            training.take_step(slot)
            time.sleep(0.1 if MOST else 0)
        numbers = ring.all_gather_object(world.world_rank)
    except ring.PeerFailed as error:
        report("ended", str(error), slot)
        raise
    report("found", [training.weights, sorted(set(training.large.tolist())), training.history, numbers], slot)


main()
