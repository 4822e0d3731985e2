"""Gives torch the simulated operators; torch itself loads this at the end of its import, as a backend's extension."""

import ctypes
from pathlib import Path


def load() -> None:
    import torch

    library = ctypes.PyDLL(str(Path(__file__).with_name("libsimulated_operators.so")))
    if library.simulate_operators() < 500:
        raise RuntimeError("torch has far fewer operators for CUDA than the rehearsal was written for.")
    torch.cuda._lazy_call(library.poison_freed_memory)
