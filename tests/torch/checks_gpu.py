"""Checks on a real GPU against results on the CPU. Run by test_gpu.py with one rank, and with two on one card."""

import os
import time

import torch
import torch.distributed as dist
from torch import nn

import ring_plugins as ring
import ring_plugins.torch
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.torch import DistributedOptimizer, GradientAverager, broadcast_parameters
from tests.checks import run

ring.init(ranks=int(os.environ["TEST_RANKS"]))
RANK, SIZE = ring.rank(), ring.size()
GPU = torch.device("cuda", RANK % torch.cuda.device_count())
torch.cuda.set_device(GPU)
CHECKS = []


def check(function):
    CHECKS.append(function)
    return function


def values(dtype=torch.float32, size=1000):
    return torch.randint(0, 4, (size,), generator=torch.Generator().manual_seed(RANK)).to(dtype)


def settled():
    torch.cuda.synchronize()  # a kernel that fills the card could keep a peer's from starting on the same card


@check
def the_process_groups_collectives():
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN):
            host = values(dtype)
            device = host.to(GPU)
            settled()
            dist.all_reduce(host, op)
            dist.all_reduce(device, op)
            assert torch.equal(device.cpu(), host), (dtype, op)
    host = values()
    device = host.to(GPU)
    settled()
    work = dist.all_reduce(device, dist.ReduceOp.AVG, async_op=True)
    dist.all_reduce(host, dist.ReduceOp.AVG)
    work.wait()
    assert torch.allclose(device.cpu(), host)
    root = SIZE - 1
    host, device = values(), values().to(GPU)
    dist.broadcast(host, root)
    dist.broadcast(device, root)
    assert torch.equal(device.cpu(), host)
    parts = [torch.empty(RANK_ + 1, device=GPU) for RANK_ in range(SIZE)]
    dist.all_gather(parts, torch.full((RANK + 1,), float(RANK), device=GPU))
    assert [part.tolist() for part in parts] == [[float(r)] * (r + 1) for r in range(SIZE)]
    out = torch.empty(3, device=GPU)
    dist.reduce_scatter_tensor(out, torch.arange(3.0 * SIZE, device=GPU))
    assert out.tolist() == [SIZE * (3.0 * RANK + i) for i in range(3)]
    swapped = torch.empty(2 * SIZE, device=GPU)
    dist.all_to_all_single(swapped, torch.full((2 * SIZE,), float(RANK), device=GPU))
    assert swapped.tolist() == [float(r) for r in range(SIZE) for _ in range(2)]
    dist.barrier()


@check
def messages_between_two_ranks():
    if SIZE == 1:
        return
    other = 1 - RANK
    for number in range(3):
        sent, found = values(size=1000 * number + 1).to(GPU), torch.empty(1000 * number + 1, device=GPU)
        settled()
        works = [dist.isend(sent, other, tag=1), dist.irecv(found, other, tag=1)]
        for work in works:
            work.wait()
        expected = torch.randint(0, 4, (1000 * number + 1,), generator=torch.Generator().manual_seed(other))
        assert torch.equal(found.cpu(), expected.float())


@check
def the_public_functions():
    x = torch.arange(4.0, device=GPU) + RANK
    settled()
    assert torch.equal(ring.all_reduce(x).cpu(), ring.all_reduce(x.cpu()))
    assert ring.all_gather(x).shape == (4 * SIZE,)
    assert torch.equal(ring.broadcast(x, SIZE - 1).cpu(), torch.arange(4.0) + SIZE - 1)
    ring.all_reduce(x, ring.SUM, out=x)
    assert torch.equal(x.cpu(), torch.arange(4.0) * SIZE + sum(range(SIZE)))


def model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 700), nn.ReLU(), nn.Linear(700, 4)
    )


def batch(step):
    generator = torch.Generator().manual_seed(10 * step + RANK)
    return torch.randn(6, 3, 8, 8, generator=generator)


def trained(device, steps=4, **options):
    own = model().to(device)
    optimizer = torch.optim.SGD(own.parameters(), 0.1, momentum=0.9)
    optimizer = DistributedOptimizer(optimizer, own.named_parameters(), bucket_bytes=64 << 10, **options)
    for step in range(steps):
        optimizer.zero_grad()
        own(batch(step).to(device)).square().mean().backward()
        optimizer.step()
        settled()
    optimizer.close()
    return torch.cat([p.detach().cpu().flatten() for p in own.parameters()])


@check
def training_equals_training_on_the_cpu():
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    on_gpu, on_cpu = trained(GPU), trained(torch.device("cpu"))
    assert torch.allclose(on_gpu, on_cpu, rtol=1e-4, atol=1e-5)
    rows = ring.all_gather(on_gpu[None])
    assert all(torch.equal(rows[0], row) for row in rows)


@check
def gradients_compressed_between_gpus():
    exact = trained(GPU)
    for codec in ("bf16", "fp16"):
        for feedback in (False, True):
            rounded = trained(GPU, compression=codec, error_feedback=feedback)
            assert torch.allclose(rounded, exact, atol=2e-2)
            rows = ring.all_gather(rounded[None])
            assert all(torch.equal(rows[0], row) for row in rows)


@check
def mixed_precision_with_a_scaler():
    own = model().to(GPU)
    broadcast_parameters(own)
    optimizer = DistributedOptimizer(torch.optim.SGD(own.parameters(), 0.1), own.named_parameters())
    scaler = torch.amp.GradScaler("cuda")
    for step in range(4):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            value = own(batch(step).to(GPU)).square().mean()
            if RANK == 0 and step == 2:
                value = value * float("inf")  # every rank must skip this step
        scaler.scale(value).backward()
        scaler.step(optimizer)
        scaler.update()
        settled()
    scales = ring.all_gather_object(scaler.get_scale())
    assert len(set(scales)) == 1 and scales[0] < 65536.0
    rows = ring.all_gather(torch.cat([p.detach().cpu().flatten() for p in own.parameters()])[None])
    assert all(torch.equal(rows[0], row) for row in rows)
    optimizer.close()


@check
def forward_on_several_streams():
    if SIZE == 1:
        return
    own, side = model().to(GPU), torch.cuda.Stream()
    averager = GradientAverager(own)
    x = batch(0).to(GPU)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        early = own[0](x)
    torch.cuda.current_stream().wait_stream(side)
    own[1:](early).square().mean().backward()
    settled()
    alone = model().to(GPU)  # on one stream, without averaging
    alone(x).square().mean().backward()
    settled()
    for ours, theirs in zip(own.parameters(), alone.parameters(), strict=True):
        expected = ring.all_gather(theirs.grad.cpu()[None]).mean(0)
        assert torch.allclose(ours.grad.cpu(), expected, rtol=1e-4, atol=1e-6)
    averager.close()


@check
def a_captured_step_is_replayed():
    own = model().to(GPU)
    optimizer = DistributedOptimizer(torch.optim.SGD(own.parameters(), 0.01), own.named_parameters())
    x = batch(0).to(GPU)

    def step():
        optimizer.zero_grad(set_to_none=True)
        own(x).square().mean().backward()
        optimizer.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(5):
            step()
            settled()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for i in range(3):
        x.copy_(batch(i))
        graph.replay()
        settled()
    rows = ring.all_gather(torch.cat([p.detach().cpu().flatten() for p in own.parameters()])[None])
    assert all(torch.equal(rows[0], row) for row in rows)
    began = time.monotonic()
    optimizer.close()  # while the graph lives: NCCL would wait for its end
    assert time.monotonic() - began < 5
    del graph


@check
def compiled_models():
    own = model().to(GPU)
    optimizer = DistributedOptimizer(torch.optim.SGD(own.parameters(), 0.1), own.named_parameters())
    compiled = torch.compile(own)
    for step in range(3):
        optimizer.zero_grad()
        compiled(batch(step).to(GPU)).square().mean().backward()
        optimizer.step()
        settled()
    rows = ring.all_gather(torch.cat([p.detach().cpu().flatten() for p in own.parameters()])[None])
    assert all(torch.equal(rows[0], row) for row in rows)
    optimizer.close()


@check
def a_model_on_another_device_is_rejected():
    if SIZE == 1:
        return
    own = nn.Linear(3, 3).to(GPU)
    averager = GradientAverager(own)
    own.to("cpu")
    try:
        averager._sets.take_parameters()
        averager._sets.current(0)
    except ArgumentError as error:
        assert "gradients are averaged on GPU" in str(error)
    else:
        raise AssertionError("a model that was moved away is averaged nowhere")
    averager.close()


dist.init_process_group("ring")
run(CHECKS)
