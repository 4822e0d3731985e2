"""Local updates of which ranks are lost, as TEST_DEATHS says: {rank: [step, point]}. Reports what the survivors have.

TEST_OPTIONS are those of the optimizer. At the point "SIGTERM" a rank gets that signal in the step, and leaves at the
next exchange. A "barrier" is one from the backward of that step on; where no host has several ranks, only exchanges of
weights have some.
"""

from tests.campaigns.light_torch import import_torch

if __name__ == "__main__":
    import_torch()

import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

import ring_plugins as ring
from ring_plugins.core.gradients.local_updates import OuterSteps
from ring_plugins.core.world import current
from ring_plugins.torch import LocalUpdates, TrainingState
from tests.joiners import wait_for_joiners
from tests.mortal import end_at
from tests.worker import report

STEPS = 14


def network() -> nn.Module:
    # A bias before the normalization would have rounding errors for gradients, which Adam makes large.
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 16, bias=False), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3)).double()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.05)


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    data = torch.from_numpy(np.random.default_rng(1000 * step + rank).standard_normal((4, 5)))
    loss: torch.Tensor = (model(data) - data[:, :3].square()).square().mean()
    return loss


def slot_of(rank: int) -> int:
    """The place of a process, by its world rank."""
    return current().members.known[rank].slot


def main() -> None:
    policy, ranks = os.environ.get("TEST_POLICY", "continue"), int(os.environ["TEST_RANKS"])
    ring.init(ranks=ranks, on_failure=policy, min_ranks=int(os.environ["TEST_MIN"]))
    me = ring.rank()
    is_new = current().is_joining
    step_of_death, point = (None, "") if is_new else json.loads(os.environ["TEST_DEATHS"]).get(str(me), (None, ""))
    model, history, changes, teams, step = network(), list[Any](), list[Any](), list[Any](), 0
    optimizer = LocalUpdates(optimizer_of(model), model, **json.loads(os.environ["TEST_OPTIONS"]))
    outer, exchange = optimizer._outer, OuterSteps._exchange

    def logged(self: OuterSteps, fragment: int, told: Mapping[int, Any]) -> None:
        before = self.exchanges
        exchange(self, fragment, told)
        if self.exchanges > before:
            since = {slot_of(rank): told[rank].since[fragment] for rank in self._communicator.ranks}
            history.append([step, self._cuts[fragment], since])

    OuterSteps._exchange = logged  # type: ignore[method-assign]

    @ring.on_membership_change
    def told(change: ring.MembershipChange) -> None:
        mine = [step, [*change.lost], [*change.left], change.size_before, change.size]
        assert policy == "replace" or ring.all_gather_object(mine) == [mine] * ring.size()
        changes.append([*mine, [*map(slot_of, change.joined)]])

    state = TrainingState(model=model, optimizer=optimizer, step=0)
    for step in range(state.step, STEPS):
        if policy == "replace":
            missing = {*range(ranks)} - {*map(slot_of, current().world_ranks)}
            wait_for_joiners(missing, 60.0)
        optimizer.zero_grad()
        if step == step_of_death and point.startswith("barrier"):
            end_at(point)
        loss_of(model, step, me).backward()  # type: ignore[no-untyped-call, unused-ignore]
        teams.append([*optimizer.averager.communicator.ranks])
        if step == step_of_death and not point.startswith("barrier"):
            end_at(point)
        optimizer.step()
        state.step = step + 1
        if policy == "replace":
            state.commit()
    step = STEPS
    if step_of_death == STEPS:
        end_at(point)
    optimizer.finish()
    assert slot_of(current().world_ranks[ring.rank()]) == me
    whole = outer.anchor.tobytes().hex()
    found = {"anchor": outer.anchor.tolist(), "history": history, "changes": changes, "bits": whole}
    report("found", found, me)
    report("teams", teams, me)


if __name__ == "__main__":
    main()
