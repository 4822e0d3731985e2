"""What scripts import of `horovod.common.util`."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from packaging.version import Version

from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.horovod.basics import ccl_built, ddl_built, gloo_built, mpi_built, nccl_built

__all__ = [
    "ccl_built",
    "ddl_built",
    "env",
    "gloo_built",
    "gpu_available",
    "is_iterable",
    "is_version_greater_equal_than",
    "mpi_built",
    "nccl_built",
    "num_rank_is_power_2",
    "split_list",
]

T = TypeVar("T")


def gpu_available(ext_base_name: str = "", verbose: bool = False) -> bool:
    """Whether a framework that the script has imported sees a GPU."""
    torch, tensorflow = sys.modules.get("torch"), sys.modules.get("tensorflow")
    if torch is not None and torch.cuda.is_available():
        return True
    return tensorflow is not None and bool(tensorflow.config.list_physical_devices("GPU"))


@contextlib.contextmanager
def env(**variables: str | None) -> Iterator[None]:
    """Set environment variables inside the block, except those that are None."""
    given = {name: value for name, value in variables.items() if value is not None}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether a number is a power of two."""
    return num_rank > 0 and num_rank.bit_count() == 1


def split_list(l: Sequence[T], n: int) -> list[Sequence[T]]:  # noqa: E741 - Horovod's name
    """Cut a list into n parts, of which the first are one longer if it does not divide."""
    ends = [i * (len(l) // n) + min(i, len(l) % n) for i in range(n + 1)]
    return [l[begin:end] for begin, end in itertools.pairwise(ends)]


def is_iterable(x: Any) -> bool:
    """Whether one can iterate over it."""
    try:
        iter(x)
    except TypeError:
        return False
    return True


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Whether a version such as "2.13.0+cpu" is at least another, which has three numbers.

    Raises:
        ArgumentError: `target` has not.
    """
    if len(target.split(".")) != 3:
        raise ArgumentError(f"target={target!r} is not of the form major.minor.patch, such as 2.6.0.")
    return Version(ver) >= Version(target)
