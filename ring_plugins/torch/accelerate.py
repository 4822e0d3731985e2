"""Accelerate, and Transformers' Trainer on top of it, accept the backend "ring".

On CPUs Accelerate 1.15 (state.py:755) replaces whatever backend it is asked for by gloo or MPI, and says then that the
one asked for is not available. It uses a process group that exists already. So where "ring" is asked for, the group is
made first, by whatever launched this process, and Accelerate hears that it is the right one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ring_plugins.core import world
from ring_plugins.import_watch import ImportWatch, has_finished

_MODULE = "accelerate.state"


def accept_ring() -> None:
    """Let `backend="ring"` and `ddp_backend="ring"` work, whether Accelerate has been imported or will be."""
    if has_finished(_MODULE):
        _accept(_MODULE)
    elif not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch([_MODULE], _accept))


class _Watch(ImportWatch):
    """Ours among the finders."""


def _accept(name: str) -> None:
    module: Any = sys.modules[name]
    original: Callable[..., Any] = module.PartialState._prepare_backend
    if getattr(original, "accepts_ring", False):
        return

    def prepare_backend(self: Any, cpu: bool = False, sagemaker_dp: bool = False, backend: str | None = None) -> Any:
        if backend != "ring":
            return original(self, cpu, sagemaker_dp, backend)
        if not dist.is_initialized():
            dist.init_process_group("ring")
        own, kinds = world.current().topology, module.DistributedType
        is_on_cpu = cpu or not module.torch.cuda.is_available()
        if own.size == 1:
            return backend, kinds.NO
        if is_on_cpu:  # from which Accelerate takes its ranks then
            place = own.rank, own.size, own.local_rank, own.local_size
            names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
            os.environ.update({name: str(value) for name, value in zip(names, place, strict=True)})
            os.environ.setdefault("MASTER_ADDR", "127.0.0.1")  # nobody connects to it
        return backend, kinds.MULTI_CPU if is_on_cpu else kinds.MULTI_GPU

    prepare_backend.accepts_ring = True  # type: ignore[attr-defined]
    module.PartialState._prepare_backend = prepare_backend
