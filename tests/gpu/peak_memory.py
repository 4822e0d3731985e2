"""Peak memory while the host is far ahead of the GPU: large gradients must not outlive zero_grad.

Prints MiB for plain training, ours, DDP's default and DDP with gradients as views of its buckets.
"""

from ring_plugins.torch import GradientAverager
from tests.gpu.card import DEVICE, dist, fact, init_torch_group, needs_a_card, torch

needs_a_card()
nn = torch.nn
MIB = 1 << 20


def peak(how: str) -> int:
    own = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(8))).to(DEVICE)  # 128 MiB of gradients
    averager = GradientAverager(own) if how == "ring" else None
    call = own
    if how.startswith("DDP"):
        call = nn.parallel.DistributedDataParallel(own, [DEVICE.index], gradient_as_bucket_view=how == "DDP, views")
    optimizer = torch.optim.SGD(own.parameters(), 1e-4)
    x = torch.randn(64, 2048, device=DEVICE)
    for step in range(5):
        if step == 2:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        optimizer.zero_grad()
        torch.cuda._sleep(100_000_000)
        call(x).square().mean().backward()
        optimizer.step()
    torch.cuda.synchronize()
    found = torch.cuda.max_memory_allocated() / MIB
    if averager is not None:
        averager.close()
    return round(found)


init_torch_group()
for how in ("plain", "ring", "DDP", "DDP, views"):
    fact(check="peak memory", how=how, mib=peak(how))
    torch.cuda.empty_cache()
dist.destroy_process_group()
