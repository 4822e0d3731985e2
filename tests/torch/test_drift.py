"""Checksums of parameters."""

import torch
from torch import nn

from ring_plugins.torch.drift import _on_device, parameter_checksums


def test_one_flipped_bit_changes_one_checksum():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    names, before = parameter_checksums(model.named_parameters())
    assert names == ["0.weight", "0.bias", "1.weight", "1.bias"]
    model[1].bias.data.view(torch.int32)[0] ^= 1
    _, after = parameter_checksums(model.named_parameters())
    assert [old == new for old, new in zip(before, after, strict=True)] == [True, True, True, False]


def test_layout_does_not_matter_and_odd_sizes_are_summed_up():
    weight = torch.randn(2, 3, 2, 2)
    both = [("a", nn.Parameter(weight)), ("b", nn.Parameter(weight.to(memory_format=torch.channels_last)))]
    _, (first, second) = parameter_checksums(both)
    assert first == second
    assert int(_on_device(torch.arange(5, dtype=torch.uint8))) == 10
