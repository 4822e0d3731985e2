"""A training script and every function of `ring_plugins.horovod.torch`, against one process."""

import pytest

from tests.launch import run_ranks

SCRIPT = """
import os
import time
import torch
import ring_plugins as ring
from tests.worker import report
if os.environ["TEST_STARTS"] == "spawned":
    ring.init(ranks=2)
import ring_plugins.horovod.torch as hvd

hvd.init()
rank, size = hvd.rank(), hvd.size()
report("place", [rank, size, hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()])

# Training, as scripts for Horovod do it
torch.manual_seed(rank)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * hvd.size(), momentum=0.9)
compression = hvd.Compression.none
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), compression=compression, op=hvd.Average, num_groups=2
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
start = [p.detach().clone() for p in model.parameters()]
data = torch.randn(5, 12, 4, generator=torch.Generator().manual_seed(1))
for batch in data:
    optimizer.zero_grad()
    model(batch[rank::size]).square().mean().backward()
    optimizer.synchronize()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with optimizer.skip_synchronize():
        optimizer.step()
    scheduler.step()
trained = [p.detach().clone() for p in model.parameters()]
report("bits", [hash(p.numpy().tobytes()) for p in trained])

with torch.no_grad():
    for parameter, value in zip(model.parameters(), start):
        parameter.copy_(value)
alone = torch.optim.SGD(model.parameters(), lr=0.1 * size, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(alone, 2)
for batch in data:
    alone.zero_grad()
    model(batch).square().mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    alone.step()
    scheduler.step()
report("apart", max(float((a - b).abs().max()) for a, b in zip(trained, model.parameters())))

# Two backwards a step
with torch.no_grad():
    for parameter, value in zip(model.parameters(), start):
        parameter.copy_(value)
optimizer.set_backward_passes_per_step(2)
optimizer.zero_grad()
for batch in data[:2]:
    model(batch[rank::size]).square().mean().backward()
twice = [p.grad.clone() for p in model.parameters()]
model.zero_grad()
for p in model.parameters():
    p.grad = None
optimizer.close()
for batch in data[:2]:
    model(batch).square().mean().backward()
report("twice apart", max(float((a - p.grad).abs().max()) for a, p in zip(twice, model.parameters())))

# Functions
x = torch.arange(4.0) + rank
report("average", hvd.allreduce(x, name="loss"))
report("sum", hvd.allreduce(x, average=False))
report("scaled", hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5))
report("largest", hvd.allreduce(x, op=hvd.Max))
report("half", hvd.allreduce(x, compression=hvd.Compression.fp16))
whole = torch.tensor([3, 5])  # integers are scaled in float64, and the rest is cut off
report("whole", [
    hvd.allreduce(whole, op=hvd.Sum, prescale_factor=0.5).tolist(),
    hvd.allreduce(whole, op=hvd.Sum, postscale_factor=0.75).tolist(),
    hvd.allreduce_(whole.clone(), op=hvd.Sum, prescale_factor=0.5, postscale_factor=1.5).tolist(),
    whole.tolist(),
])
odd = torch.tensor([3 + rank, -3 - rank])  # as their averages are: -3.5 becomes -3
report("whole averages", [
    hvd.allreduce(odd).tolist(), hvd.allreduce_(odd.clone(), postscale_factor=2.0).tolist(),
    hvd.grouped_allreduce([odd, x])[0].tolist(), hvd.synchronize(hvd.allreduce_async(odd)).tolist(),
    torch.cat([hvd.allgather(hvd.reducescatter(odd))]).tolist(),
])
report("kept", x)
handles = [hvd.allreduce_async_(y, op=hvd.Sum, name=f"y{i}") for i, y in enumerate((x.clone(), x.clone() * 2))]
report("in place", [hvd.synchronize(handle).tolist() for handle in handles])
report("polled", hvd.poll(handles[0]))
report("grouped", [y.tolist() for y in hvd.grouped_allreduce([x, x * 2], op=hvd.Sum)])
report("gathered", hvd.allgather(torch.full((1 + rank, 2), float(rank))))
report("broadcast", hvd.broadcast(x, 1))
report("broadcast in place", hvd.broadcast_(torch.nn.Parameter(x.clone()), 1).detach())
rows, counts = hvd.alltoall(torch.arange(3.0) + 10 * rank, splits=torch.tensor([1, 2]))
report("alltoall", [rows.tolist(), counts.tolist()])
report("reducescatter", hvd.reducescatter(torch.arange(3.0), op=hvd.Sum))
report("objects", [hvd.allgather_object(rank), hvd.broadcast_object({"rank": rank}, root_rank=1)])

# Handles of every kind
begun = {
    "grouped": hvd.grouped_allreduce_async([x, x * 2], op=hvd.Sum, name="g"),
    "grouped in place": hvd.grouped_allreduce_async_([x.clone()], op=hvd.Max, postscale_factor=2.0),
    "gathered": hvd.allgather_async(torch.full((1 + rank, 2), float(rank))),
    "all gathered": hvd.grouped_allgather_async([torch.tensor([rank]), torch.tensor([2.0] * rank)]),
    "broadcast": hvd.broadcast_async(x, 1),
    "alltoall": hvd.alltoall_async(torch.arange(4.0) + 10 * rank),
    "scattered": hvd.reducescatter_async(torch.arange(2.0), prescale_factor=4.0),
    "all scattered": hvd.grouped_reducescatter_async([torch.arange(2.0), torch.arange(4.0)], op=hvd.Sum),
    "sparse": hvd.sparse_allreduce_async(torch.diag(torch.tensor([1.0, rank])).to_sparse(), "s", hvd.Average),
}

def plain(result):
    if isinstance(result, (list, tuple)):
        return [plain(one) for one in result]
    return result.to_dense().tolist()

report("begun", {key: plain(hvd.synchronize(handle)) for key, handle in begun.items()})
report("over", all(map(hvd.poll, begun.values())))
report("lists", plain([
    hvd.grouped_allgather([torch.tensor([rank])]), hvd.grouped_reducescatter([torch.arange(2.0)]),
    hvd.grouped_allreduce_([x.clone()], average=False),
]))
report("dtype of splits", str(hvd.alltoall(x, splits=torch.tensor([1, 3]))[1].dtype))

# Gradients have Horovod's factors
def gradient_of(function):
    weight = torch.ones(2, requires_grad=True)
    result = function(weight * (rank + 1))
    (result * torch.arange(1.0, 1 + len(result))).sum().backward()
    return weight.grad

report("factors", plain([gradient_of(function) for function in (
    hvd.allreduce, hvd.allgather, lambda w: hvd.broadcast(w, 1), hvd.alltoall, hvd.reducescatter,
    lambda w: hvd.reducescatter(w, op=hvd.Sum), lambda w: hvd.alltoall(w, splits=[2, 0])[0],
    lambda w: torch.cat(hvd.grouped_allreduce([w, w])),
)]))

# Gradients pass through
weight = torch.ones(2, requires_grad=True)
hvd.allreduce(weight * (rank + 1), op=hvd.Sum).sum().backward()
report("gradient", weight.grad)
report("needs none", hvd.allreduce(weight.detach()).requires_grad)

# What is rejected
rejected = []
for call in (
    lambda: hvd.allreduce(x, op=hvd.Adasum),
    lambda: hvd.TensorFlowKerasState,
    lambda: hvd.allreduce(x, process_set=[0]),
    lambda: hvd.allreduce(x, average=True, op=hvd.Sum),
    lambda: hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), op=hvd.Max),
    lambda: hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), [*model.named_parameters(), *model.named_parameters()]
    ),
    lambda: hvd.init(comm=[1]),
    lambda: hvd.ProcessSet(["0"]),
):
    try:
        call()
    except (ring.ArgumentError, AttributeError) as error:
        rejected.append(str(error))
report("rejected", rejected)
# A call that ranks make differently is an error, and the next one works
caught = []
for call in (lambda: hvd.allreduce(torch.ones(2 + rank)), lambda: hvd.grouped_allreduce([x[rank:], x[1 - rank:]]),
             lambda: hvd.allgather(torch.ones(2, 2 + rank)), lambda: hvd.reducescatter(torch.ones(()))):
    try:
        call()
    except hvd.HorovodInternalError:
        caught.append(hvd.allreduce(x, op=hvd.Sum).tolist())
report("caught", caught)

class Doubling(hvd.Compressor):
    @staticmethod
    def compress(tensor):
        return tensor * 2, "context"

report("own compressor", hvd.allreduce(x, compression=Doubling))
for op in (hvd.Average, hvd.Sum):
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), op=op, backward_passes_per_step=2)
    hvd.broadcast_parameters(list(model.parameters()), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for _ in range(2):
        optimizer.zero_grad()
        for _ in range(2):
            (model(torch.ones(1, 2)) * (rank + 1)).sum().backward()
        report(op.name, model.weight.grad)
        with torch.no_grad():
            optimizer.step()
    optimizer.close()
hvd.barrier(process_set=hvd.global_process_set)
if rank == 1:
    time.sleep(0.2)
report("last", hvd.join())
try:
    hvd.allreduce(x, name=f"rank{rank}")
except ring.DeadlockError as error:
    report("names", str(error))
"""


MORE = [pytest.param(launcher, marks=pytest.mark.slow) for launcher in ("mpirun", "torchrun")]


@pytest.mark.parametrize("launcher", ["spawned", *MORE])
def test_a_script_for_horovod(launcher):
    result = run_ranks(SCRIPT, 2, launcher, env={"TEST_STARTS": launcher, "PYTHONHASHSEED": "0"})
    assert result.values("place") == [[rank, 2, rank, 2, 0, 1] for rank in range(2)]
    assert result.values("bits")[0] == result.values("bits")[1]
    assert max(result.values("apart") + result.values("twice apart")) < 1e-6
    for key, expected in {
        "average": [0.5, 1.5, 2.5, 3.5],
        "sum": [1, 3, 5, 7],
        "scaled": [1, 3, 5, 7],
        "largest": [1, 2, 3, 4],
        "half": [0.5, 1.5, 2.5, 3.5],
        "whole": [[2, 4], [4, 7], [3, 6], [3, 5]],
        "whole averages": [[3, -3], [7, -7], [3, -3], [3, -3], [3, -3]],
        "in place": [[1, 3, 5, 7], [2, 6, 10, 14]],
        "polled": True,
        "grouped": [[1, 3, 5, 7], [2, 6, 10, 14]],
        "gathered": [[0, 0], [1, 1], [1, 1]],
        "broadcast": [1, 2, 3, 4],
        "broadcast in place": [1, 2, 3, 4],
        "objects": [[0, 1], {"rank": 1}],
        "needs none": False,
    }.items():
        assert result.values(key) == [expected, expected], key
    assert result.values("kept") == [[0, 1, 2, 3], [1, 2, 3, 4]]
    assert result.values("alltoall") == [[[0, 10], [1, 1]], [[1, 2, 11, 12], [2, 2]]]
    assert result.values("reducescatter") == [[0, 2], [4]]
    for rank, begun in enumerate(result.values("begun")):
        assert begun == {
            "grouped": [[1, 3, 5, 7], [2, 6, 10, 14]],
            "grouped in place": [[2, 4, 6, 8]],
            "gathered": [[0, 0], [1, 1], [1, 1]],
            "all gathered": [[0, 1], [2]],
            "broadcast": [1, 2, 3, 4],
            "alltoall": [[[0, 1, 10, 11], [2, 2]], [[2, 3, 12, 13], [2, 2]]][rank],
            "scattered": [4 * rank],
            "all scattered": [[[0], [0, 2]], [[2], [4, 6]]][rank],
            "sparse": [[1, 0], [0, 0.5]],
        }
    assert result.values("over") == [True, True]
    assert result.values("lists") == [[[[0, 1]], [[rank]], [[1, 3, 5, 7]]] for rank in range(2)]
    assert result.values("dtype of splits") == ["torch.int64"] * 2
    # The derivatives of the sum of both losses: allgather and broadcast divided by two, reducescatter times two.
    assert result.values("factors") == [
        [[1, 2], [1, 2], [0, 0], [1, 1], [1, 1], [2, 2], [1, 2], [4, 6]],
        [[2, 4], [6, 8], [2, 4], [4, 4], [2, 2], [4, 4], [6, 8], [8, 12]],
    ]
    assert result.values("gradient") == [[2, 2], [4, 4]], "the sum's gradient is the sum of the ranks' gradients"
    for texts in result.values("rejected"):
        assert len(texts) == 8 and "ranks=['0'] is not a list of ranks" in texts[7], texts
        assert "hvd.Adasum" in texts[0] and "no attribute" in texts[1] and "process_set=[0]" in texts[2]
        assert "pass only op" in texts[3] and "hvd.Sum" in texts[4] and "the name '0.weight' of 2" in texts[5]
    assert result.values("caught") == [[[1, 3, 5, 7]] * 4] * 2
    assert result.values("own compressor") == [[1, 3, 5, 7]] * 2
    assert [result.values("AVERAGE"), result.values("SUM")] == [[[[3, 3]]] * 2, [[[6, 6]]] * 2]
    assert result.values("last") == [1, 1]
    assert all(
        "allreduce(name='rank0')" in text and "allreduce(name='rank1')" in text for text in result.values("names")
    )


JOINS = """
import os
import torch
import ring_plugins as ring
from tests.worker import report
ring.init(ranks=int(os.environ["TEST_RANKS"]))
import ring_plugins.horovod.torch as hvd

hvd.init()
rank, size = hvd.rank(), hvd.size()
data = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
steps = [3 + 2 * i for i in range(size)]

def start():
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

model, optimizer = start()
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
dropped = hvd.DistributedOptimizer(start()[1])
last, losses = [], []
for epoch in range(2):
    for i in range(steps[rank]):
        optimizer.zero_grad()
        loss = model(data[i * size + rank]).square().sum()
        loss.backward()
        optimizer.step()
        hvd.allreduce(loss.detach(), name=f"loss {i}")
        hvd.allreduce(loss.detach())
    dropped = None
    last.append(hvd.join())
report("last", last)
report("bits", [hash(p.detach().numpy().tobytes()) for p in model.parameters()])
alone, inner = start()
for epoch in range(2):
    for i in range(max(steps)):
        inner.zero_grad()
        # a rank that has joined counts as zeros, as with Horovod
        sum(alone(data[i * size + r]).square().sum() / size for r in range(size) if i < steps[r]).backward()
        inner.step()
report("apart", max(float((a - b).detach().abs().max()) for a, b in zip(model.parameters(), alone.parameters())))
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [2, 3])
def test_ranks_that_have_joined_count_as_zeros_in_averages_of_gradients(number):
    result = run_ranks(JOINS, number, env={"PYTHONHASHSEED": "0"})
    assert result.values("last") == [[number - 1] * 2] * number
    assert all(bits == result.values("bits")[0] for bits in result.values("bits"))
    assert max(result.values("apart")) < 1e-5
