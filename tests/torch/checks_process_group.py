"""Run by every rank for test_process_group.py: each function is one check, run by all ranks of a launch.

The default group is "ring"; where gloo has an operation too, a gloo group of the same ranks gives the expected result.
"""

import functools
import gc
import os
import threading
import time
import traceback
from datetime import timedelta

import ring_plugins as ring

# Ranks that start before torch is imported import it in parallel.
if __name__ == "__main__" and os.environ.get("TEST_SPAWN"):
    ring.init(ranks=int(os.environ["TEST_RANKS"]))

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn

import ring_plugins.torch  # registers the backend
from tests.worker import report

REAL = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int16, torch.int32, torch.int64]
MOVED = [*REAL, torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn]
SHAPES = [(), (0,), (1,), (7,), (3, 5), (0, 3), (40_000,)]


def make(rank, shape=(7,), dtype=torch.float32, seed=0):
    """Any rank's tensor, so that every rank can compute the expected result. Small whole numbers: sums are exact."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    values = torch.randint(0, 4, shape, generator=generator, device="cpu").to(torch.get_default_device())
    if dtype.is_complex:
        return torch.complex(values.double(), values.double() + 1).to(dtype)
    return values.to(dtype)


def everyones(**arguments):
    return [make(rank, **arguments) for rank in range(dist.get_world_size())]


def equal(found, right):
    assert found.dtype == right.dtype and found.shape == right.shape, (found, right)
    # torch compares no 8-bit floats.
    found, right = (value.float() if value.dtype.itemsize == 1 else value for value in (found, right))
    assert torch.equal(found, right), (found, right)


def awkward(tensor):
    """The same values in memory that is not contiguous."""
    wide = torch.zeros(*tensor.shape, 2, dtype=tensor.dtype)
    wide[..., 1] = tensor
    return wide[..., 1]


def raises(kind, text, function, *arguments, **options):
    error = None
    try:
        function(*arguments, **options)
    except kind as caught:
        error = caught
    assert error is not None and text in str(error), error


def all_reduce():
    reductions = {
        dist.ReduceOp.SUM: lambda stack: stack.sum(0),
        dist.ReduceOp.PRODUCT: lambda stack: stack.prod(0),
        dist.ReduceOp.MIN: lambda stack: stack.amin(0),
        dist.ReduceOp.MAX: lambda stack: stack.amax(0),
    }
    for dtype in REAL:
        for shape in SHAPES:
            stack = torch.stack([tensor.double() for tensor in everyones(shape=shape, dtype=dtype)])
            for op, reduce in reductions.items():
                for mine in (make(RANK, shape, dtype), awkward(make(RANK, shape, dtype))):
                    dist.all_reduce(mine, op)
                    equal(mine, reduce(stack).to(dtype))
            if dtype.is_floating_point:
                mine = make(RANK, shape, dtype)
                dist.all_reduce(mine, dist.ReduceOp.AVG)
                torch.testing.assert_close(mine, stack.mean(0).to(dtype))
    summed = make(RANK, dtype=torch.complex64)
    dist.all_reduce(summed)
    equal(summed, torch.stack(everyones(dtype=torch.complex64)).sum(0))
    flags = torch.tensor([RANK == 0, False, True])
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    equal(flags, torch.tensor([True, False, True]))


def all_reduce_has_the_bits_of_gloo_for_two_ranks():
    mine = make(RANK, (30_000,))
    theirs = mine.cpu().clone()
    dist.all_reduce(mine)
    dist.all_reduce(theirs, group=GLOO)
    if SIZE <= 2:
        equal(mine.cpu(), theirs)
    torch.testing.assert_close(mine.cpu(), theirs)


def all_reduce_of_a_parameter():
    weight = nn.Parameter(make(RANK))
    dist.all_reduce(weight.data)
    with torch.no_grad():
        dist.all_reduce(weight)
    equal(weight.data, SIZE * torch.stack(everyones()).sum(0))


def coalesced():
    kinds = [((3,), torch.float32), ((2, 2), torch.float32), ((5,), torch.int64)]
    tensors = [make(RANK, shape, dtype, seed) for seed, (shape, dtype) in enumerate(kinds)]
    with dist.distributed_c10d._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    for seed, (found, (shape, dtype)) in enumerate(zip(tensors, kinds, strict=True)):
        equal(found, sum(everyones(shape=shape, dtype=dtype, seed=seed)))
    mine = [make(RANK, (4,), seed=1), make(RANK, (6,), seed=2)]
    gathered = [torch.empty(4 * SIZE), torch.empty(6 * SIZE)]
    with dist.distributed_c10d._coalescing_manager():
        for output, source in zip(gathered, mine, strict=True):
            dist.all_gather_into_tensor(output, source)
    equal(gathered[0], torch.cat(everyones(shape=(4,), seed=1)))
    equal(gathered[1], torch.cat(everyones(shape=(6,), seed=2)))
    parts = [torch.empty(4), torch.empty(6)]
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as running:
        for output, source in zip(parts, gathered, strict=True):
            dist.reduce_scatter_tensor(output, source)
    running.wait()
    equal(parts[1], SIZE * make(RANK, (6,), seed=2))


def broadcast():
    for dtype in MOVED:
        for shape in SHAPES:
            for root in range(SIZE):
                for mine in (make(RANK, shape, dtype), awkward(make(RANK, shape, dtype))):
                    dist.broadcast(mine, root)
                    equal(mine, make(root, shape, dtype))


def reduce():
    for root in range(SIZE):
        mine = awkward(make(RANK))
        dist.reduce(mine, root)
        equal(mine, torch.stack(everyones()).sum(0) if root == RANK else make(RANK))


def all_gather():
    for dtype in MOVED:
        for shape in SHAPES:
            right = everyones(shape=shape, dtype=dtype)
            found = [torch.empty(shape, dtype=dtype) for _ in range(SIZE)]
            dist.all_gather(found, awkward(make(RANK, shape, dtype)))
            for got, wanted in zip(found, right, strict=True):
                equal(got, wanted)
    uneven = [torch.empty(rank + 1, 2) for rank in range(SIZE)]
    dist.all_gather(uneven, make(RANK, (RANK + 1, 2)))
    for rank, got in enumerate(uneven):
        equal(got, make(rank, (rank + 1, 2)))
    whole = torch.empty(SIZE, 5)
    dist.all_gather(list(whole), make(RANK, (5,)))  # straight into the rows
    equal(whole, torch.stack(everyones(shape=(5,))))


def all_gather_into_tensor():
    for shape in [(4,), (2, 3), (0,)]:
        right = torch.cat(everyones(shape=shape))
        found = torch.empty_like(right)
        dist.all_gather_into_tensor(found, make(RANK, shape))
        equal(found, right)
        stacked = torch.empty(SIZE, *shape)
        dist.all_gather_into_tensor(awkward_out := awkward(stacked), make(RANK, shape))
        equal(awkward_out, torch.stack(everyones(shape=shape)))
    own = torch.zeros(SIZE * 4)  # FSDP's way: the input is a part of the output
    part = own[RANK * 4 : RANK * 4 + 4]
    part.copy_(make(RANK, (4,)))
    dist.all_gather_into_tensor(own, part)
    equal(own, torch.cat(everyones(shape=(4,))))


def gather_and_scatter():
    for root in range(SIZE):
        found = [torch.empty(3, 2) for _ in range(SIZE)] if root == RANK else None
        dist.gather(awkward(make(RANK, (3, 2))), found, dst=root)
        if found is not None:
            for got, wanted in zip(found, everyones(shape=(3, 2)), strict=True):
                equal(got, wanted)
        mine = torch.empty(4, dtype=torch.int64)
        sources = [make(root, (4,), torch.int64, seed) for seed in range(SIZE)]
        dist.scatter(mine, sources if root == RANK else None, src=root)
        equal(mine, make(root, (4,), torch.int64, RANK))


def reduce_scatter():
    for dtype in REAL:
        sources = [[make(rank, (part + 1,), dtype, part) for part in range(SIZE)] for rank in range(SIZE)]
        mine = torch.empty(RANK + 1, dtype=dtype)  # uneven
        dist.reduce_scatter(mine, sources[RANK])
        equal(mine, torch.stack([sources[rank][RANK].double() for rank in range(SIZE)]).sum(0).to(dtype))
    full = torch.cat([make(RANK, (6,), seed=part) for part in range(SIZE)])
    mine = torch.empty(6)
    right = torch.stack(everyones(shape=(6,), seed=RANK))
    dist.reduce_scatter_tensor(mine, full)
    equal(mine, right.sum(0))
    dist.reduce_scatter_tensor(mine, full, dist.ReduceOp.AVG)
    torch.testing.assert_close(mine, right.mean(0))
    inside = full.clone()  # FSDP's way: the output is a part of the input
    dist.reduce_scatter_tensor(inside[6 * RANK : 6 * RANK + 6], inside)
    equal(inside[6 * RANK : 6 * RANK + 6], right.sum(0))


def all_to_all():
    sizes = [[(sender + 2 * receiver) % 3 for receiver in range(SIZE)] for sender in range(SIZE)]
    sources = [make(RANK, (sizes[RANK][to],), seed=to) for to in range(SIZE)]
    found = [torch.empty(sizes[sender][RANK]) for sender in range(SIZE)]
    dist.all_to_all(found, sources)
    for sender, got in enumerate(found):
        equal(got, make(sender, (sizes[sender][RANK],), seed=RANK))
    for dtype in MOVED[:-1]:
        rows = make(RANK, (2 * SIZE, 3), dtype)
        even, theirs = torch.empty_like(rows), torch.empty_like(rows)
        dist.all_to_all_single(even, rows)
        if dtype not in (torch.int16, torch.bool):
            dist.all_to_all_single(theirs, rows, group=GLOO)
            equal(even, theirs)
        equal(even, torch.cat([make(sender, (2 * SIZE, 3), dtype)[2 * RANK : 2 * RANK + 2] for sender in range(SIZE)]))
    sent, received = sizes[RANK], [sizes[sender][RANK] for sender in range(SIZE)]
    rows = make(RANK, (sum(sent), 3))
    uneven, theirs = torch.empty(sum(received), 3), torch.empty(sum(received), 3)
    dist.all_to_all_single(uneven, rows, received, sent)
    dist.all_to_all_single(theirs, rows, received, sent, group=GLOO)
    equal(uneven, theirs)


def barriers():
    dist.barrier()
    dist.barrier(async_op=True).wait()
    dist.group.WORLD.monitored_barrier()
    dist.monitored_barrier(GLOO)


def point_to_point():
    right, left = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    # Everyone sends before anyone receives.
    sends = [dist.isend(make(RANK, (5,), seed=tag), right, tag=tag) for tag in (3, 4)]
    second, first = torch.empty(5), torch.empty(5)
    receives = [dist.irecv(first, left, tag=3), dist.irecv(second, left, tag=4)]
    for work in (*sends, *receives):
        work.wait()
    equal(first, make(left, (5,), seed=3))
    equal(second, make(left, (5,), seed=4))
    for number in range(20):  # order within a tag, and messages of all sizes, awkward ones too
        outgoing = dist.isend(awkward(make(RANK, (number * 997,), torch.bfloat16, number)), right)
        found = awkward(torch.zeros(number * 997, dtype=torch.bfloat16))
        assert dist.recv(found, left) == left
        outgoing.wait()
        equal(found, make(left, (number * 997,), torch.bfloat16, number))
    found = torch.empty(6, dtype=torch.complex64)
    operations = [
        dist.P2POp(dist.irecv, found, left),
        dist.P2POp(dist.isend, make(RANK, (6,), torch.complex64), right),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    equal(found, make(left, (6,), torch.complex64))
    for dtype in (torch.bool, torch.int64, torch.float64):
        expected = make(left, (5,)).gt(0) if dtype is torch.bool else (9 * make(left, (5,))).to(dtype)
        mine = make(RANK, (5,)).gt(0) if dtype is torch.bool else (9 * make(RANK, (5,))).to(dtype)
        received = torch.zeros(5, dtype=dtype)
        works = dist.isend(mine, right), dist.irecv(received, left)
        assert [work.wait() and work.source_rank() for work in works] == [-1, left]
        equal(received, expected)
    large = make(RANK, (3_000_000,)), torch.empty(3_000_000)  # nothing keeps as much for a receiver
    operations = [dist.P2POp(dist.isend, large[0], right), dist.P2POp(dist.irecv, large[1], left)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    equal(large[1], make(left, (3_000_000,)))
    if RANK == 0:
        dist.send_object_list([{"from": 0}, "text"], 1)
    elif RANK == 1:
        items = [None, None]
        dist.recv_object_list(items, 0)
        assert items == [{"from": 0}, "text"]
    if not ON_GPU:
        a_thousand_tags(left, right)
    raises(ring.ArgumentError, "new_group(backend='gloo')", dist.recv, torch.empty(1), None)
    raises(ring.ArgumentError, f"rank {RANK} cannot send to itself", dist.isend, torch.empty(1), RANK)


def a_thousand_tags(left, right):
    def counts():
        gc.collect()
        with open("/proc/self/maps") as maps:
            return threading.active_count(), len(os.listdir("/proc/self/fd")), sum(1 for _ in maps)

    def exchange(tag):
        sending = dist.isend(torch.full((4,), float(tag)), right, tag=tag)
        source = dist.recv(found, left, tag=tag)
        sending.wait()
        assert (source, found.tolist()) == (left, [float(tag)] * 4)

    found = torch.zeros(4)
    exchange(100)
    dist.barrier()
    before = counts()
    for tag in range(101, 1101):
        exchange(tag)
    threads, files, mappings = (after - before for before, after in zip(before, counts(), strict=True))
    assert threads <= 0 and files <= 0 and mappings <= 8, (threads, files, mappings)  # 8: the allocator's own


def objects():
    mine = {"rank": RANK, "text": "x" * (RANK * 100)}
    found = [None] * SIZE
    dist.all_gather_object(found, mine)
    assert found == [{"rank": rank, "text": "x" * (rank * 100)} for rank in range(SIZE)]
    for root in range(SIZE):
        items = [mine, RANK]
        dist.broadcast_object_list(items, root)
        assert items == [found[root], root]
        gathered = [None] * SIZE if root == RANK else None
        dist.gather_object(mine, gathered, root)
        assert gathered is None or gathered == found
        part = [None]
        dist.scatter_object_list(part, found if root == RANK else None, root)
        assert part == [mine]


def works_and_futures():
    tensors = [make(RANK, (1000,), seed=number) for number in range(10)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for number, work in reversed(list(enumerate(works))):
        assert work.wait()
        if ON_GPU:
            torch.cuda.synchronize()  # for which `wait` did not wait
        assert work.is_completed() and work.is_success() and work.exception() is None
        equal(work.result()[0], sum(everyones(shape=(1000,), seed=number)))
    halved = dist.all_reduce(make(RANK), async_op=True).get_future().then(lambda done: done.value()[0] / 2)
    equal(halved.wait(), sum(everyones()) / 2)
    gathered = [torch.empty(7) for _ in range(SIZE)]
    future = dist.all_gather(gathered, make(RANK), async_op=True).get_future()
    equal(torch.stack(future.wait()), torch.stack(everyones()))
    both = torch.futures.collect_all([future, dist.barrier(async_op=True).get_future()])
    both.wait()
    equal(future.value()[0], make(0))


def callbacks_that_use_the_group():
    """What a callback calls has the same place on all ranks, whether the work is over before it is attached or not."""

    def again(done):
        return dist.all_reduce(done.value()[0] * 2, async_op=True).get_future().wait()[0]

    def everything(done):
        tensor = done.value()[0].clone()
        dist.all_reduce(tensor)
        dist.broadcast(tensor, SIZE - 1)
        if SIZE > 1:
            received = torch.empty(7)
            messages = dist.isend(tensor, (RANK + 1) % SIZE), dist.irecv(received, (RANK - 1) % SIZE)
            for message in messages:
                message.wait()
            equal(received, tensor)
        dist.all_reduce(tensor, async_op=True).wait(timedelta(seconds=60))
        return tensor

    total = sum(everyones())
    futures = []
    for step in range(20):
        if (RANK + step) % 3 == 0:
            time.sleep(0.003)
        futures.append(
            dist.all_reduce(make(RANK), async_op=True).get_future().then(again).then(lambda f: f.value() + 1)
        )
        behind = make(RANK)
        dist.all_reduce(behind, async_op=step % 2 == 0)
        futures.append(dist.all_reduce(make(RANK), async_op=True).get_future().then(everything))
    for first, second in zip(futures[::2], futures[1::2], strict=True):
        equal(first.wait(), 2 * SIZE * total + 1)
        equal(second.wait(), SIZE * SIZE * total)
    failed = dist.all_reduce(make(RANK), async_op=True).get_future().then(lambda done: 1 / 0)
    raises(RuntimeError, "division by zero", failed.wait)
    several = [dist.all_reduce(make(RANK), async_op=True).get_future() for _ in range(3)]
    collected = torch.futures.collect_all(several).then(lambda done: again(done.value()[0]))
    equal(collected.wait(), 2 * SIZE * total)
    if SIZE > 1:  # the thread that moves messages must go on, too
        received, answer = torch.empty(7), torch.empty(7)
        second = (
            dist.irecv(received, (RANK - 1) % SIZE).get_future().then(lambda done: dist.recv(answer, (RANK - 1) % SIZE))
        )
        dist.barrier()  # or the message may have come already, and torch calls the function in this thread
        dist.isend(make(RANK), (RANK + 1) % SIZE)
        time.sleep(0.1)
        dist.send(make(RANK), (RANK + 1) % SIZE)
        second.wait()
        equal(answer, make((RANK - 1) % SIZE))


def rejections():
    raises(ring.ArgumentError, "BAND", dist.all_reduce, torch.ones(1, dtype=torch.int32), dist.ReduceOp.BAND)
    whole = torch.ones(1, dtype=torch.int32)
    raises(ring.ArgumentError, "AVERAGE of dtype=int32", dist.all_reduce, whole, dist.ReduceOp.AVG)
    if not ON_GPU:  # simulated ones have no sparse tensors
        raises(ring.ArgumentError, "to_dense()", dist.all_reduce, torch.eye(2).to_sparse())
    raises(ring.ArgumentError, "is on device meta", dist.broadcast, torch.empty(2, device="meta"), 0)
    short = [torch.empty(1)] * SIZE
    raises(ring.ArgumentError, "input has 2 elements", dist.all_gather, short, torch.ones(2))
    if SIZE > 1:
        uneven = torch.ones(SIZE + 1)
        raises(ring.ArgumentError, "do not divide among", dist.all_to_all_single, uneven, uneven)
    dist.barrier()  # all ranks are still in step


def an_error_reaches_the_waiting_caller():
    group = dist.new_group(list(range(SIZE)))
    wrong = dist.all_reduce(torch.ones(3 if RANK == 0 else 4), group=group, async_op=True)
    raises(ring.MismatchError, "rank 0 calls all_reduce(3 x float32", wrong.wait)
    assert isinstance(wrong.exception(), ring.MismatchError) and not wrong.is_success()
    raises(RuntimeError, "MismatchError: ranks disagree", wrong.get_future().wait)
    raises(ring.MismatchError, "rank 0 calls all_reduce(3 x float32", dist.all_reduce, torch.ones(1), group=group)
    dist.all_reduce(torch.ones(1))  # other groups go on
    dist.destroy_process_group(group)


def subgroups():
    if SIZE == 1:
        assert dist.new_group([0]).size() == 1
        return
    everyone = list(range(SIZE))
    groups = [[0, 1], everyone[1:], everyone[::-1], *([rank] for rank in everyone)]
    made = [(ranks, dist.new_group(ranks)) for ranks in groups]
    works = []
    for ranks, group in made[:: 1 if RANK % 2 else -1]:  # each rank in its own order
        if RANK in ranks:
            tensor = torch.tensor([float(RANK + 1)])
            works.append((ranks, tensor, dist.all_reduce(tensor, group=group, async_op=True)))
    for ranks, tensor, work in works:
        work.wait()
        assert tensor.item() == sum(rank + 1 for rank in ranks)
    last = made[1][1]
    if RANK in groups[1]:
        assert dist.get_group_rank(last, RANK) == RANK - 1 and dist.get_world_size(last) == SIZE - 1
        value = torch.tensor([RANK])
        dist.broadcast(value, SIZE - 1, group=last)
        assert value.item() == SIZE - 1
        if SIZE > 2 and RANK == 1:
            dist.send(torch.tensor([7]), SIZE - 1, group=last)
        if SIZE > 2 and RANK == SIZE - 1:
            dist.recv(value, 1, group=last)
            assert value.item() == 7
    for ranks, group in made:
        if RANK in ranks:
            dist.destroy_process_group(group)
    dist.barrier()


def train(wrap):
    torch.manual_seed(0)
    model = wrap(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        torch.manual_seed(100 * step + RANK)
        loss = model(torch.randn(5, 6)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [value.clone() for value in model.state_dict().values()]


def distributed_data_parallel():
    small_buckets = {"gradient_as_bucket_view": True, "bucket_cap_mb": 1e-4}
    for options in ({}, small_buckets, {"find_unused_parameters": True}, {"static_graph": True}):
        ours = train(functools.partial(nn.parallel.DistributedDataParallel, **options))
        theirs = train(functools.partial(nn.parallel.DistributedDataParallel, process_group=GLOO, **options))
        for found, wanted in zip(ours, theirs, strict=True):
            if SIZE <= 2:
                equal(found, wanted)
            torch.testing.assert_close(found, wanted)


def a_communication_hook():
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    def hooked(group):
        def wrap(model):
            model = nn.parallel.DistributedDataParallel(model, process_group=group)
            model.register_comm_hook(group, default_hooks.fp16_compress_hook)
            return model

        return wrap

    for found, wanted in zip(train(hooked(dist.group.WORLD)), train(hooked(GLOO)), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-3)  # half precision, summed in another order


def a_communication_hook_whose_callbacks_wait():
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd

    def hooked(group, **options):
        def wrap(model):
            model = nn.parallel.DistributedDataParallel(model, process_group=group, **options)
            state = power_sgd.PowerSGDState(group, 1, start_powerSGD_iter=2, min_compression_rate=0.5)
            model.register_comm_hook(state, power_sgd.powerSGD_hook)
            return model

        return wrap

    for found, wanted in zip(train(hooked(dist.group.WORLD)), train(hooked(GLOO)), strict=True):
        equal(found, wanted)
    trained = train(hooked(dist.group.WORLD, bucket_cap_mb=1e-4))  # several buckets, whose callbacks interleave
    for value in trained[:4] + trained[-2:]:  # without statistics of the batches
        others = [torch.empty_like(value) for _ in range(SIZE)]
        dist.all_gather(others, value)
        equal(others[0], others[-1])


def functional_collectives_and_dtensor():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    summed = functional.all_reduce(make(RANK), "sum", dist.group.WORLD)
    equal(functional.wait_tensor(summed), sum(everyones()))
    gathered = functional.all_gather_tensor(make(RANK, (2, 3)), 0, dist.group.WORLD)
    equal(functional.wait_tensor(gathered), torch.cat(everyones(shape=(2, 3))))
    scattered = functional.reduce_scatter_tensor(make(0, (2 * SIZE,)), "sum", 0, dist.group.WORLD)
    equal(functional.wait_tensor(scattered), SIZE * make(0, (2 * SIZE,))[2 * RANK : 2 * RANK + 2])
    swapped = functional.all_to_all_single(make(RANK, (SIZE,)), None, None, dist.group.WORLD)
    equal(functional.wait_tensor(swapped), torch.stack([make(rank, (SIZE,))[RANK] for rank in range(SIZE)]))
    mesh = init_device_mesh("cuda" if ON_GPU else "cpu", (SIZE,))
    whole = torch.arange(24.0).view(8, 3)
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    equal(sharded.redistribute(placements=[Replicate()]).to_local(), whole)
    equal(sharded.sum().full_tensor(), whole.sum())
    equal(DTensor.from_local(torch.ones(2), mesh, [Shard(0)]).full_tensor(), torch.ones(2 * SIZE))


def fully_sharded():
    from torch.distributed.fsdp import fully_shard

    def shard(model):
        fully_shard(model[0])
        fully_shard(model)
        return model

    def loss_of(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            torch.manual_seed(step * 10 + RANK)
            loss = model(torch.randn(4, 6)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return loss.detach()

    def model():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))

    right = loss_of(nn.parallel.DistributedDataParallel(model(), process_group=GLOO))
    torch.testing.assert_close(loss_of(shard(model())), right)


def torchmetrics_synchronize():
    import torchmetrics

    mean = torchmetrics.MeanMetric()
    mean.update(torch.tensor([float(RANK)] * (RANK + 1)))
    values = [float(rank) for rank in range(SIZE) for _ in range(rank + 1)]
    torch.testing.assert_close(mean.compute(), torch.tensor(sum(values) / len(values)))
    cat = torchmetrics.CatMetric()
    cat.update(torch.arange(RANK + 1.0))
    equal(cat.compute().reshape(-1), torch.cat([torch.arange(rank + 1.0) for rank in range(SIZE)]))
    accuracy = torchmetrics.classification.MulticlassAccuracy(num_classes=3)
    predicted = torch.tensor([0, 1, 2])
    accuracy.update(predicted, torch.tensor([0, 1, RANK % 3]))
    whole = torchmetrics.classification.MulticlassAccuracy(num_classes=3, sync_on_compute=False)
    whole.update(predicted.repeat(SIZE), torch.tensor([[0, 1, rank % 3] for rank in range(SIZE)]).flatten())
    equal(accuracy.compute(), whole.compute())


def autograd_through_collectives():
    import torch.distributed.nn.functional as differentiable

    mine = make(RANK).requires_grad_()
    differentiable.all_reduce(mine * (RANK + 1)).sum().backward()
    equal(mine.grad, torch.full((7,), float(SIZE * (RANK + 1))))


def zero_optimizer():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    torch.manual_seed(0)
    model, whole = nn.Linear(5, 5), nn.Linear(5, 5)
    whole.load_state_dict(model.state_dict())
    sharded = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    for each, optimizer in ((model, sharded), (whole, torch.optim.Adam(whole.parameters(), lr=0.1))):
        each(torch.ones(2, 5)).sum().backward()
        optimizer.step()
    equal(model.weight.detach(), whole.weight.detach())
    equal(model.bias.detach(), whole.bias.detach())


def again_after_destroy():
    """Last: the groups that the other checks use are gone afterwards."""
    for _ in range(2):
        dist.destroy_process_group()
        assert not dist.is_initialized()
        dist.init_process_group("ring")
        value = torch.ones(1)
        dist.all_reduce(value)
        assert value.item() == SIZE
        if SIZE > 1:
            pair = dist.new_group([0, 1])
            if RANK < 2:
                dist.barrier(pair)
                (dist.send if RANK == 0 else dist.recv)(value, 1 - RANK)
    dist.destroy_process_group()


def messages_between_gpus():
    """By NCCL, each channel on a separate CUDA stream: an answer may overtake an earlier message."""
    from tests.gpu_rehearsal.devices import count

    other, before = 1 - RANK, count("ncclSend") + count("ncclRecv")
    late = dist.isend(make(RANK, (9,)), other, tag=30)  # fetched only at the end
    for number in range(5):
        question, answer = torch.full((3, 4), float(number)), torch.zeros(3, 4)
        if RANK == 0:
            dist.send(question, 1, tag=31)
            assert dist.recv(answer, 1, tag=32) == 1
            equal(answer, question + 1)
        else:
            asked = awkward(torch.zeros(3, 4))
            work = dist.irecv(asked, 0, tag=31)
            future = work.get_future()
            work.wait()
            equal(asked, question)
            equal(future.wait()[0], question)
            dist.isend(asked + 1, 0, tag=32).wait()
    dist.all_reduce(torch.ones(2))
    assert not late.is_completed()
    found = torch.empty(9)
    dist.recv(found, other, tag=30)
    equal(found, make(other, (9,)))
    late.wait()
    assert count("ncclSend") + count("ncclRecv") - before == 12


#: They spend most of their time importing what they test, so they run on two ranks only.
HEAVY = {
    a_communication_hook,
    a_communication_hook_whose_callbacks_wait,
    fully_sharded,
    torchmetrics_synchronize,
    zero_optimizer,
}
#: NCCL does not notice that ranks call different things, and wants groups used in one order. Nor is there a thread that
#: holds a queue while callbacks run.
HOST_ONLY = {an_error_reaches_the_waiting_caller, subgroups, callbacks_that_use_the_group}
#: One rank has no other to send to or to disagree with.
AMONG_SEVERAL = {point_to_point, an_error_reaches_the_waiting_caller}
GPU_ONLY = {messages_between_gpus}


def is_done(check, ranks, on_several_nodes, on_gpu):
    """Whether the ranks of such a launch run this check."""
    if ranks > 2 and on_several_nodes and check is an_error_reaches_the_waiting_caller:
        return False  # one of three ranks on two nodes only sees that its neighbor is missing
    left_out = HEAVY if on_gpu or ranks != 2 else set()
    return check not in left_out | (HOST_ONLY if on_gpu else GPU_ONLY) | (AMONG_SEVERAL if ranks == 1 else set())


CHECKS = [
    all_reduce,
    all_reduce_has_the_bits_of_gloo_for_two_ranks,
    all_reduce_of_a_parameter,
    coalesced,
    broadcast,
    reduce,
    all_gather,
    all_gather_into_tensor,
    gather_and_scatter,
    reduce_scatter,
    all_to_all,
    barriers,
    point_to_point,
    messages_between_gpus,
    objects,
    works_and_futures,
    callbacks_that_use_the_group,
    rejections,
    an_error_reaches_the_waiting_caller,
    subgroups,
    distributed_data_parallel,
    a_communication_hook,
    a_communication_hook_whose_callbacks_wait,
    functional_collectives_and_dtensor,
    fully_sharded,
    torchmetrics_synchronize,
    autograd_through_collectives,
    zero_optimizer,
    again_after_destroy,
]

if __name__ == "__main__":
    dist.init_process_group("ring")
    ON_GPU = os.environ.get("TEST_DEVICE") == "cuda"
    if ON_GPU:
        from tests.gpu_rehearsal.devices import make_default

        REAL.remove(torch.int16)  # NCCL has no such type
        LAUNCHES = make_default()
    RANK, SIZE = dist.get_rank(), dist.get_world_size()
    GLOO = dist.new_group(backend="gloo")
    for check in CHECKS:
        if not is_done(check, SIZE, bool(os.environ.get("RING_VIRTUAL_NODES")), ON_GPU):
            continue
        try:
            check()
        except Exception:
            report(check.__name__, traceback.format_exc())
            if not ON_GPU:
                raise
            continue
        report(check.__name__, "ok")
    report("launched by NCCL", len(LAUNCHES) if ON_GPU else 0)
