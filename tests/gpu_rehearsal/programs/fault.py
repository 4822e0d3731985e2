"""An error injected into a library of CUDA reaches the script as torch's own: `fault.py memory|kernel`."""

import sys

import torch

x = torch.zeros(1 << 20, device="cuda")
try:
    if sys.argv[1] == "memory":
        torch.zeros(1 << 26, device="cuda")
    for _ in range(30):
        x += 1
    x.sum().item()
    print("no error")
except RuntimeError as error:
    print(type(error).__name__, error)
