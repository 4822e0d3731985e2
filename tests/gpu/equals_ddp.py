"""Weights after eight steps equal DDP's, bit for bit at two ranks; gradients keep their place if they are kept."""

from ring_plugins.torch import GradientAverager
from tests.gpu.card import CUDA, DEVICE, RANK, dist, fact, flat, init_torch_group, synchronize, torch

nn = torch.nn


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 1200), nn.GELU(), nn.LayerNorm(1200), nn.Linear(1200, 1200), nn.GELU(), nn.Linear(1200, 8)
    ).to(DEVICE)


def train(how: str, autocast: bool, set_to_none: bool, steps: int = 8) -> tuple[torch.Tensor, int]:
    """The weights at the end, and how many places the largest gradient had."""
    own = model()
    averager, call = None, own
    if how == "ring":
        averager = GradientAverager(own, bucket_bytes=1 << 20, first_bucket_bytes=1 << 16)
    else:
        call = nn.parallel.DistributedDataParallel(own, [DEVICE.index] if CUDA else None, bucket_cap_mb=1)
    optimizer = torch.optim.AdamW(own.parameters(), 1e-3)
    places = set()
    for step in range(steps):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(100 * step + RANK)).to(DEVICE)
        optimizer.zero_grad(set_to_none=set_to_none)
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=autocast):
            loss = call(x).float().square().mean()
        loss.backward()
        places.add(own[3].weight.grad.data_ptr())
        optimizer.step()
        synchronize()
    if averager is not None:
        averager.close()
    return flat(own), len(places)


init_torch_group()
for autocast in (False, True):
    for set_to_none in (True, False):
        ours, places = train("ring", autocast, set_to_none)
        theirs, _ = train("DDP", autocast, set_to_none)
        fact(
            check="equals DDP",
            autocast=autocast,
            set_to_none=set_to_none,
            bitwise=bool(torch.equal(ours, theirs)),
            worst=float((ours - theirs).abs().max()),
            gradient_places=places,
        )
dist.destroy_process_group()
