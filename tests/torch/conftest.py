"""A stand-in for a GPU, for tests of one rank."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from ring_plugins.core.gpu.communicator import DeviceCommunicator
from ring_plugins.torch import device
from tests.gpu_stand_in import alone, pass_for_gpu


class Gpu(NamedTuple):
    """
    Attributes:
        communicator: of one rank.
        nccl, streams: the stand-ins below it.
    """

    communicator: DeviceCommunicator
    nccl: Any
    streams: Any


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    """Tensors of the CPU pass for tensors on a GPU (see tests/gpu_stand_in.py)."""
    communicator, library = alone("gradients")
    pass_for_gpu(library.streams, monkeypatch.setattr)
    yield Gpu(communicator, library, library.streams)
    device.streams.cache_clear()
    communicator.close()
