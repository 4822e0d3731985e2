"""A training in which other processes take the places of ranks that are killed. Reports what all have in the end.

TEST_DEATHS says who dies: [[slot, step, point], ...], each by its first process at that slot, or by the joiner whose
number is the next if the point begins with "joiner", or by every joiner at that slot if it begins with "every
joiner". Where there are standbys, it dies once one of them waits; TEST_KILLED_STANDBY is the number of one that dies
while it waits. With TEST_PENDING, members that lack others wait in each step until processes wait to join, at most for
that many seconds. TEST_ADDED says who asks for added ranks: [[slot, step, number], ...], of up to TEST_MOST in all;
on several hosts the number may be followed by a host, and TEST_WHERE says where the added slots are: {slot: host}.
TEST_REMOTE_JOINERS has the slots of a lost host for which members wait then.
"""

from tests.campaigns.light_torch import import_torch

if __name__ == "__main__":
    import_torch()

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ring_plugins as ring
from ring_plugins.core.base.errors import LaunchError
from ring_plugins.core.control import mesh_admission
from ring_plugins.core.rendezvous.spawn import slots
from ring_plugins.core.world import current
from ring_plugins.launcher.growth import request_ranks
from ring_plugins.torch import DistributedOptimizer, TrainingState, broadcast_parameters
from tests.joiners import wait_for_joiners
from tests.mortal import die, end_at, end_in_round
from tests.passes import members_of_passes
from tests.worker import report

EPOCHS, BATCHES = int(os.environ.get("TEST_EPOCHS", "2")), 6


def slots_taken(ranks: Sequence[int] | None = None) -> list[int]:
    """The slots of all members now, or of those with these world ranks."""
    return [current().members.known[rank].slot for rank in (current().world_ranks if ranks is None else ranks)]


def gradient(step: int, slot: int) -> float:
    """Of every parameter: its average over any of up to four ranks is exact."""
    return 12.0 * ((7 * step + 3 * slot) % 5 - 2)


#: Joiners that fail write their process ids there, if the test waits for so many.
FAILURES, MOST_FAILURES = Path(os.environ.get("TEST_FAILURES", "")), 5


def note_failure() -> None:
    """Say that this process, a joiner, is about to fail."""
    if FAILURES.name:
        with FAILURES.open("a") as file:
            file.write(f"{os.getpid()}\n")


def have_all_failed() -> bool:
    """Whether the last joiner that `ring run` starts has failed, and `ring run` knows."""
    pids = FAILURES.read_text().split() if FAILURES.exists() else []
    return len(pids) == MOST_FAILURES and not Path(f"/proc/{pids[-1]}").exists()


#: Up to how many ranks there may be.
MOST = int(os.environ.get("TEST_MOST", os.environ.get("TEST_RANKS", "0")))
#: On how many hosts they are.
HOSTS = int(os.environ.get("TEST_HOSTS", "1"))
#: Who asks for added ranks, and on which hosts these are.
ADDED, WHERE = json.loads(os.environ.get("TEST_ADDED", "[]")), json.loads(os.environ.get("TEST_WHERE", "{}"))
#: Slots that processes on hosts without ranks are to have, for whom members wait when they are asked for.
REMOTE_JOINERS = set(json.loads(os.environ.get("TEST_REMOTE_JOINERS", "[]")))
#: Of a standby that dies while it waits.
KILLED_STANDBY = int(os.environ.get("TEST_KILLED_STANDBY", "-1"))


def ask(number: int, job: int | None, host: str | None = None) -> str:
    """Ask for added ranks, again and again until a host is found to be lost whose places are free then."""
    end = time.monotonic() + 20
    while True:
        try:
            return request_ranks(number, job, host)
        except LaunchError:
            if not REMOTE_JOINERS or time.monotonic() > end:
                raise
            time.sleep(0.02)


def remote_joiners() -> list[int]:
    """Slots for which processes wait on hosts without ranks."""
    own = current().own_slot
    return [one.slot for one in own.remote_joiners()] if own is not None else []


def slots_here(ranks: int, number: int) -> set[int]:
    """The slots that are in use in a step, of the further ones those that are on this host."""
    places = slots()
    if places is not None:
        return set(range(max(ranks, places.in_use)))
    in_use = ranks + sum(wanted for _, step, wanted, *_ in ADDED if step <= number and not REMOTE_JOINERS)
    known = {f"host{1 + number}" for number in range(HOSTS)} | {WHERE.get(str(slot)) for slot in slots_taken()}
    awaited = {slot for slot in range(ranks, in_use) if WHERE[str(slot)] not in known - {socket.gethostname()}}
    return awaited.union(range(ranks))


def wait_for_standby() -> None:
    """Wait until a standby waits that has no slot yet and lives on; return at once if there are none."""
    others = [number for number in range(100) if number != KILLED_STANDBY]
    places, wanted = slots(), os.environ.get("RING_STANDBYS", "0") != "0"
    while wanted and not any(places.has_come(one) and places.given(one) is None for one in others):
        time.sleep(0.01)


def own_deaths(slot: int, ranks: int) -> list[tuple[int, str]]:
    """The (step, point)s of TEST_DEATHS that are of this process."""
    number, deaths = current().world_rank, json.loads(os.environ["TEST_DEATHS"])
    mine = [(step, point) for of, step, point in deaths if of == slot and (number >= ranks) == ("joiner" in point)]
    if number > (slot if slot >= ranks else MOST + HOSTS - 1):
        mine = [(step, point.removeprefix("every ")) for step, point in mine if point.startswith("every")]
    return [(step, point.removeprefix("every ").removeprefix("joiner ")) for step, point in mine]


if "stopped" in os.environ.get("TEST_DEATHS", ""):
    mesh_admission._PATIENCE = 2.0


def prepare_joiner(mine: list[tuple[int, str]]) -> None:
    """Die, before or while this process joins, if it is one that is to."""
    for _, point in mine:
        if current().is_joining and point.startswith("round"):
            end_in_round(int(point.split()[1]), point.split()[2])
        if point == "raises":
            note_failure()
            raise ValueError("a script that fails")


def begin_step(number: int, mine: list[tuple[int, str]], ranks: int, slot: int = -1) -> None:
    """Ask for added ranks and die in this step if it is time, and else wait for joiners if ranks are missing."""
    for by, step, wanted, *host in ADDED:
        if by == slot and step == number and current().world_rank == slot:
            report("answer", ask(wanted, os.getppid() if HOSTS == 1 else None, *host), slot)
        end = time.monotonic() + 60
        while step == number and REMOTE_JOINERS.difference(remote_joiners()) and time.monotonic() < end:
            time.sleep(0.005)
    for point in [point for step, point in mine if step == number]:
        if point.startswith("round"):
            end_in_round(int(point.split()[1]), point.split()[2])
        else:
            wait_for_standby()
            end_at(point)
    if FAILURES.name and len(slots_taken()) < ranks:
        while not slots().has_waiting() and not have_all_failed():
            time.sleep(0.01)
    if "TEST_PENDING" in os.environ:
        wait_for_joiners(slots_here(ranks, number) - set(slots_taken()), float(os.environ["TEST_PENDING"]))


class Loads:
    """A part of the state whose loading fails as a point says: "load raises" or "load exits"."""

    def __init__(self, points: Sequence[str]) -> None:
        self.points = points

    def state_dict(self) -> dict[str, Any]:
        if os.environ.get("TEST_GIVES") == str(current().world_rank) and len(current().world_ranks) == 3:
            raise KeyError("a state that cannot be made")
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "load raises" in self.points:
            note_failure()
            raise KeyError("a script that cannot load")
        if "load exits" in self.points:
            sys.exit(3)


def main() -> None:
    ranks, least = int(os.environ["TEST_RANKS"]), int(os.environ.get("TEST_MIN", "1"))
    most = MOST if HOSTS == 1 or ranks < MOST else None
    ring.init(ranks=ranks, on_failure="replace", min_ranks=least, max_ranks=most)
    slot, number = ring.rank(), current().world_rank
    is_new = current().is_joining
    mine = own_deaths(slot, ranks)
    assert ring.rank() == slot and ranks <= ring.size() <= max(ranks, MOST)
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(count)) for count in (10, 20_000, 300_000)])
    if is_new:
        with torch.no_grad():
            model[0].add_(1)  # which the others' state overwrites
    broadcast_parameters(model)
    optimizer = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5), model.named_parameters(), bucket_bytes=4096,
        drift_check_every=3,
    )  # fmt: skip
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    data = TensorDataset(torch.arange(BATCHES * ranks))
    sampler = DistributedSampler(data, ring.size(), ring.rank(), shuffle=False)
    loader = DataLoader(data, batch_size=1, sampler=sampler, num_workers=int(os.environ.get("TEST_WORKERS", "0")))
    changes: list[Any] = []
    exchanges: list[int] = []  # of each commit
    passes = members_of_passes()
    ring.on_membership_change(
        lambda change: changes.append([*map(list, (change.lost, change.left, change.joined)), change.size_before])
    )
    prepare_joiner(mine)
    points = [point for _, point in mine]
    mean = torch.nn.Parameter(torch.zeros(3 if "load misfits" in points else 2))  # which nobody averages
    if "load has fewer batches" in points:
        data = TensorDataset(torch.arange(ranks))
        loader = DataLoader(data, sampler=DistributedSampler(data, ring.size(), ring.rank(), shuffle=False))
    state = TrainingState(
        model=model, optimizer=optimizer, scheduler=scheduler, epoch=0, step=0, history=[], ends=[],
        loads=Loads(points), mean=torch.nn.ParameterList([mean]),
    )  # fmt: skip
    joined_at = state.step if is_new else None
    for state.epoch in range(state.epoch, EPOCHS):  # noqa: B020 - the range is made once
        for (sample,) in state.batches(loader):
            batch = state.step - ([0, *state.ends][-1])
            assert int(sample) == (batch * current().members.shards + slot) % len(data)
            begin_step(state.step, mine, ranks, slot)
            optimizer.zero_grad()
            (gradient(state.step, slot) * sum(parameter.sum() for parameter in model)).backward()
            state.history.append(slots_taken(passes[-1]))
            optimizer.step()
            state.step += 1
            before = current().operations()
            state.commit()
            exchanges.append(current().operations() - before)
        scheduler.step()
        state.ends = [*state.ends, state.step]
    weights = [sorted(set(parameter.tolist())) for parameter in model]
    found = {
        "weights": weights,
        "history": state.history,
        "ends": state.ends,
        # Of a size that two ranks reduce with one barrier, and three with two.
        "sum": sorted(set(ring.all_reduce(np.full(12_000, slot + 1, np.float32), ring.SUM).tolist())),
        "rates": scheduler.get_last_lr(),
        "numbers": ring.all_gather_object(number),
        "ranks": ring.all_gather_object([ring.rank(), ring.size(), slot]),
    }
    report("found", found, slot)
    report("own", {"changes": changes, "joined at": joined_at, "number": number, "exchanges": exchanges}, slot)


if __name__ == "__main__":
    if os.environ.get("RING_JOINS") == str(KILLED_STANDBY):
        threading.Timer(0.5, die).start()
    main()
