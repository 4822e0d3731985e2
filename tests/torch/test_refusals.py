"""What one rank rejects reaches the ranks that wait for it, in process groups and averagers too."""

import functools
import importlib
import re
from types import SimpleNamespace

import pytest
import torch

import ring_plugins as ring
import ring_plugins.horovod.torch as hvd
import ring_plugins.torch as rt
from ring_plugins.core import functions
from ring_plugins.core.collectives.single import SingleCommunicator
from ring_plugins.core.joining import state_transfer
from ring_plugins.core.members.changes import ChangeCallbacks
from ring_plugins.torch import differentiable
from tests.launch import run_ranks

SCRIPT = """
import os, sys, time
import torch, torch.distributed as dist
import ring_plugins as ring, ring_plugins.torch as rt
from tests.worker import report
ring.init(ranks=2)
rank = ring.rank()
rejects = rank == 1

def group():
    dist.init_process_group("ring")
    return torch.ones(4)

def sparse_or(x):
    return x.to_sparse() if rejects else x

def reduce_sparse():
    x = group()
    dist.all_reduce(sparse_or(x))

def reduce_in_background():
    x = group()
    works = [dist.all_reduce(x, async_op=True) for _ in range(3)]
    dist.all_reduce(x.bool() if rejects else x, dist.ReduceOp.AVG, async_op=True).wait()

def gather_shapes():
    x = group()
    parts = [torch.ones(4 + rejects), torch.ones(4 + rejects)]
    dist.all_gather(parts, x)

def scatter_counts():
    x = group()
    dist.reduce_scatter_tensor(torch.ones(3 if rejects else 2), x)

def averager_argument():
    rt.DistributedOptimizer(torch.optim.SGD(model().parameters(), 0.1), sparse="no" if rejects else "gather")

def optimizer_argument():
    rt.DistributedOptimizer(None if rejects else torch.optim.SGD(model().parameters(), 0.1))

def model():
    return torch.nn.Linear(2, 1)

def averager_model():
    built = model()
    if rejects:
        built.to("meta")
    rt.GradientAverager(built)

def broadcast_sparse():
    rt.broadcast_parameters([("x", sparse_or(torch.ones(4)))])

def loss_shape():
    averager = rt.GradientAverager(model())
    averager.average_loss(torch.ones(2 if rejects else 1))

try:
    globals()[sys.argv[1]]()
    outcome = None
except Exception as error:
    outcome = [type(error).__name__, str(error)]
report("outcome", outcome)
if rejects:
    time.sleep(60)  # alive until rank 0 has raised, and ended the job
else:
    os._exit(1)  # which ends the job
"""

CASES = {
    "reduce_sparse": "allreduce.* in process group '.*'",
    "reduce_in_background": "all_reduce in process group '.*'",
    "gather_shapes": "allgather in process group '.*'",
    "scatter_counts": "reduce_scatter_.* in process group '.*'",
    "averager_argument": "the construction of a gradient averager",
    "optimizer_argument": "the construction of a DistributedOptimizer",
    "averager_model": "the construction of a gradient averager",
    "broadcast_sparse": "broadcast_parameters",
    "loss_shape": "averaging a loss",
}


#: What runs by default: each start takes 3 s.
QUICK = "reduce_in_background", "averager_argument"


@pytest.mark.parametrize(
    ("case", "launcher", "nodes"),
    [
        pytest.param(case, *where, marks=[pytest.mark.slow] * (where[0] != "spawned" or case not in QUICK))
        for case in CASES
        for where in (("spawned", ""), ("exported", "1,1"))
    ],
)
def test_what_one_rank_rejects_reaches_the_other(case: str, launcher: str, nodes: str) -> None:
    env = {"RING_VIRTUAL_NODES": nodes} if nodes else {}
    result = run_ranks(SCRIPT, 2, launcher, args=[case], env=env, timeout=90, check=False)  # type: ignore[arg-type]
    waited, rejected = result.values("outcome")
    assert rejected is not None and rejected[0] not in ("PeerRejected", "PeerFailed"), rejected
    assert waited is not None and waited[0] == "PeerRejected", (waited, rejected)
    assert re.match(f"rank 1 rejected the arguments of ({CASES[case]}): ", waited[1]), waited


WHOLE = torch.ones(2, dtype=torch.int64)  # which has no gradient
#: What each function of `ring_plugins.torch` rejects.
WRONG = {
    **dict.fromkeys(["all_gather", "all_reduce", "all_to_all", "broadcast", "reduce_scatter"], WHOLE),
    "broadcast_optimizer_state": "adam",
    "broadcast_parameters": None,
    "join": "adam",
}


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What rank 0 of 2 rejects, and tells the other of."""
    rejected: list[str] = []

    class Telling(SingleCommunicator):
        def reject(self, operation: str, error: BaseException) -> None:
            rejected.append(operation)

    topology = SimpleNamespace(rank=0, size=2)
    world = SimpleNamespace(
        communicator=Telling("test"),
        topology=topology,
        elastic=SimpleNamespace(changes=ChangeCallbacks(), end_if_all_are_told=lambda: None),
        refuse_to_recover=lambda what: None,
        is_joining=False,
        world_rank=0,
        world_ranks=(0, 1),
    )
    shadowed = [importlib.import_module(f"ring_plugins.torch.{name}") for name in ("broadcast", "join")]
    for module in (functions, *shadowed, differentiable, state_transfer):
        monkeypatch.setattr(module, "current", lambda: world)
    return rejected


def test_every_function_tells_the_other_ranks_what_it_rejects(told: list[str]) -> None:
    assert sorted(WRONG) == [name for name in rt.__all__ if name.islower()]
    for name, argument in WRONG.items():
        with pytest.raises((ValueError, TypeError, AttributeError)):
            getattr(rt, name)(argument)
    assert told == list(WRONG)


def test_a_broadcast_of_nothing_is_rejected_on_all_ranks(told: list[str]) -> None:
    read = torch.nn.Linear(2, 1).named_parameters()
    assert len(list(read)) == 2  # as an optimizer does that gets them before the broadcast
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters())
    lazy = torch.nn.Sequential(torch.nn.LazyLinear(2))
    for function in (rt.broadcast_parameters, functools.partial(hvd.broadcast_parameters, root_rank=0)):
        for parameters, words in (
            (read, "parameters is empty: what named_parameters() returned can be read only once"),
            ([], "parameters is empty"),
            (optimizer.state_dict(), "parameters holds other items than names and tensors"),
            (lazy.state_dict(), "0.weight is not initialized yet: run a forward"),
        ):
            with pytest.raises(ring.ArgumentError, match=re.escape(words)):
                function(parameters)
    assert told == ["broadcast_parameters"] * 8
    for parameters, words in (
        (torch.nn.Linear(2, 1).parameters(), "as parameters() does: pass the model, its named_parameters() or its"),
        (torch.ones(2), "parameters is one tensor: pass the model"),
    ):
        with pytest.raises(ring.ArgumentError, match=re.escape(words)):
            rt.broadcast_parameters(parameters)  # type: ignore[arg-type]
    with pytest.raises(ring.ArgumentError, match=re.escape("as parameters() does: pass the model, or its named_para")):
        rt.GradientAverager(torch.nn.Linear(2, 1).parameters())  # type: ignore[arg-type]
