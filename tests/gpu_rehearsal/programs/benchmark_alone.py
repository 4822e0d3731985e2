"""benchmarks/gpu_step.py with one card: what each of its variants asks of NCCL in a step."""

import sys

import torch
import torch.distributed as dist

import ring_plugins as ring
from ring_plugins.torch.rendezvous import store_from_world
from tests.gpu_rehearsal.build import REPOSITORY
from tests.gpu_rehearsal.devices import count
from tests.worker import report

sys.path.insert(0, str(REPOSITORY / "benchmarks"))
import gpu_step  # type: ignore[import-not-found]

ring.init()
DEVICE = torch.device("cuda", 0)
torch.cuda.set_device(DEVICE)
store, rank, size = store_from_world()
dist.init_process_group("nccl", store=store, rank=rank, world_size=size, device_id=DEVICE)
made, _ = gpu_step.variants("perceptron", 2, DEVICE)
for variant, step in made.items():
    before = count("ncclAllReduce")
    step()
    torch.cuda.synchronize()
    report(variant, count("ncclAllReduce") - before)
dist.destroy_process_group()
