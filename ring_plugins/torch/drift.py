"""Checksums of torch parameters, computed on the device they are on."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ring_plugins.observe.drift import checksum


def parameter_checksums(named: Iterable[tuple[str, torch.Tensor]]) -> tuple[list[str], list[int]]:
    """Names and checksums of parameters; those on a GPU are computed there and fetched together.

    Args:
        named: (name, parameter) pairs.
    """
    names: list[str] = []
    sums: list[int | torch.Tensor] = []
    for name, parameter in named:
        names.append(name)
        memory = parameter.detach().contiguous().reshape(-1).view(torch.uint8)
        sums.append(checksum(memory.numpy()) if memory.device.type == "cpu" else _on_device(memory))
    return names, [int(value) for value in sums]


def _on_device(memory: torch.Tensor) -> torch.Tensor:
    """The sum of 16-bit words, or of bytes if their number is odd; torch sums integers in 64 bits."""
    even = memory.numel() % 2 == 0
    return (memory.view(torch.int16) if even else memory).sum()
