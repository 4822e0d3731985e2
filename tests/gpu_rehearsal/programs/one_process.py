"""Models train to the same weights on a device as on the CPU: `one_process.py MODEL:OPTIMIZER:PRECISION ...`."""

import contextlib
import sys
from collections.abc import Iterator

import torch

from tests.gpu_rehearsal.programs.models import batch, flat, loss_of, make

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9),
    "adam-foreach": lambda p: torch.optim.Adam(p, 1e-2, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
}


@contextlib.contextmanager
def precision_of(name: str, device: str) -> Iterator[None]:
    with torch.autocast(device, torch.bfloat16, enabled=name == "autocast"):
        yield


def train(name: str, optimizer_name: str, precision: str, device: str, steps: int = 20) -> torch.Tensor:
    model = make(name).to(device)
    if precision in ("bfloat16", "float16"):
        model = model.to(getattr(torch, precision))
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    scaler = torch.amp.GradScaler(device, init_scale=64.0, enabled=precision == "scaled")
    for step in range(steps):
        inputs, targets = (part.to(device) for part in batch(name, step))
        if inputs.is_floating_point() and precision in ("bfloat16", "float16"):
            inputs = inputs.to(getattr(torch, precision))
        optimizer.zero_grad()
        with precision_of(precision, device):
            loss = loss_of(model, inputs, targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return flat(model)


torch.backends.mkldnn.set_flags(False)  # the CPU would take other convolutions and products than the device
for run in sys.argv[1:]:
    name, optimizer, precision = run.split(":")
    on_device = train(name, optimizer, precision, "cuda")
    on_cpu = train(name, optimizer, precision, "cpu")
    assert on_device.isfinite().all() and on_cpu.isfinite().all()
    print(f"{run}: largest difference {(on_device - on_cpu).abs().max().item():g}")
