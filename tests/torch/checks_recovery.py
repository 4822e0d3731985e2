"""A training of which ranks are killed, as TEST_DEATHS says: {rank: [step, point]}. Reports what the survivors have.

TEST_OPTIONS are those of the optimizer.

At the point "SIGTERM" a rank gets that signal in its forward, and leaves after the step.
"""

from tests.campaigns.light_torch import import_torch

if __name__ == "__main__":
    import_torch()

import json
import os
import signal

import torch

import ring_plugins as ring
from ring_plugins.core.world import current
from ring_plugins.torch import DistributedOptimizer, broadcast_parameters
from tests.mortal import die, die_in_barrier
from tests.passes import members_of_passes
from tests.worker import report

STEPS = 8


def gradient(step: int, rank: int) -> float:
    """Of every parameter: its average over any of up to four ranks is exact."""
    return 12.0 * ((7 * step + 3 * rank) % 5 - 2)


def main() -> None:
    ring.init(ranks=int(os.environ["TEST_RANKS"]), on_failure="continue", min_ranks=int(os.environ["TEST_MIN"]))
    me = ring.rank()
    deaths = json.loads(os.environ["TEST_DEATHS"])
    step_of_death, point = deaths.get(str(me), (None, ""))
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(count)) for count in (10, 20_000, 300_000)])
    broadcast_parameters(model)
    optimizer = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5),
        model.named_parameters(),
        bucket_bytes=4096,
        **json.loads(os.environ.get("TEST_OPTIONS", "{}")),
    )
    history, changes, step, passes = [], [], 0, members_of_passes()

    @ring.on_membership_change
    def told(change: ring.MembershipChange) -> None:
        gone = [*change.lost, *change.left]
        assert bool(change.left) == ("SIGTERM" in {deaths[str(rank)][1] for rank in gone})
        everybody = ring.all_gather_object([step, gone, change.size_before, change.size])
        assert len(everybody) == ring.size() and all(one == everybody[0] for one in everybody)
        # Of two losses in one step the first is told when the second is known, too.
        assert change.rank_before >= change.rank >= ring.rank()
        changes.append(everybody[0])
        if os.environ.get("TEST_CALLBACK_RAISES") == str(me):
            _ = 1 / 0

    optimizer.optimizer.register_step_pre_hook(
        lambda *_: die() if point == "in step" and step == step_of_death else None
    )
    for step in range(STEPS):
        if step == step_of_death and point == "exception":
            raise ValueError("a bad sample")
        if step == step_of_death and point == "in forward":
            die()
        if step == step_of_death and point == "SIGTERM":
            os.kill(os.getpid(), signal.SIGTERM)
        if step == step_of_death and point.startswith("barrier"):
            _, number, when = point.split()
            die_in_barrier(int(number), when)
        if step == step_of_death and point == "in backward":
            model[1].register_post_accumulate_grad_hook(die)
        optimizer.zero_grad()
        (gradient(step, me) * sum(parameter.sum() for parameter in model)).backward()
        averaged_over = passes[-1]
        optimizer.step()
        mean = ring.all_reduce(torch.tensor([12.0 * me]))
        history.append([averaged_over, current().world_ranks, float(mean)])
        assert current().world_ranks[ring.rank()] == me and ring.size() == len(current().world_ranks)
    weights = [sorted(set(parameter.tolist())) for parameter in model]
    report(
        "found", {"weights": weights, "history": history, "changes": changes, "left": ring.all_gather_object(me)}, me
    )


if __name__ == "__main__":
    main()
