"""Functions that ranks call which may lose some of theirs, for `ring_plugins.run`, Spark and Ray."""

import os
import time

import ring_plugins as ring


def sum_up(victims, how):
    """Adds up over five steps; ranks of the start that are `victims` end in the third, by a signal or a call."""
    ring.init()
    start, total = ring.rank(), 0.0
    for step in range(5):
        if step == 2 and start in victims:
            how() if callable(how) else os.kill(os.getpid(), how)
        total += float(ring.all_reduce(1.0, ring.SUM))
    return start, ring.rank(), ring.size(), total


def train(how, steps):
    """Takes this many steps, of which rank 1 gets a signal in the sixth, or as many with the process in its place."""
    import torch

    from ring_plugins.torch import DistributedOptimizer, TrainingState, broadcast_parameters

    ring.init()
    rank = ring.rank()
    model = torch.nn.Linear(2, 1)
    broadcast_parameters(model)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.01), model.named_parameters())
    state = TrainingState(model=model, optimizer=optimizer, step=0, last=steps)
    first, awaits = state.step, os.environ["RING_ON_FAILURE"] == "replace"
    while state.step < state.last:
        state.commit()
        if awaits and ring.size() < 3:
            state.last = state.step + steps
        if state.step == 5 and rank == 1 and not first:
            os.kill(os.getpid(), how)
        optimizer.zero_grad()
        model(torch.full((1, 2), float(rank))).sum().backward()
        optimizer.step()
        state.step += 1
        time.sleep(0.001)
    return rank, ring.rank(), ring.size(), bool(first), model.weight.tolist()
