"""Reference models: parameters and operations of every layer, from their papers, and published step times.

A multiplication and an addition count as two operations. A layer includes its normalization.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.planning.profile import Profile, from_costs

Layers = list[tuple[str, int, float]]


def _convolution(
    name: str, into: int, out: int, kernel: tuple[int, int] | int, side: int, bias: bool = False
) -> Layers:
    """A convolution of `into` channels with `side` x `side` outputs, and batch norm or a bias."""
    high, wide = (kernel, kernel) if isinstance(kernel, int) else kernel
    weights = high * wide * into * out
    second = (f"{name}.bias", out, 0.0) if bias else (f"{name}.norm", 2 * out, 0.0)
    return [(f"{name}.weight", weights, 2.0 * weights * side * side), second]


def _dense(name: str, into: int, out: int, positions: int = 1) -> Layers:
    return [(f"{name}.weight", into * out, 2.0 * into * out * positions), (f"{name}.bias", out, 0.0)]


def vgg16() -> Layers:
    """Simonyan, Zisserman 2014, configuration D."""
    layers, into, side = Layers(), 3, 224
    for block, (out, times) in enumerate([(64, 2), (128, 2), (256, 3), (512, 3), (512, 3)], start=1):
        for i in range(1, times + 1):
            layers += _convolution(f"conv{block}_{i}", into, out, 3, side, bias=True)
            into = out
        side //= 2
    return layers + _dense("fc6", 512 * 7 * 7, 4096) + _dense("fc7", 4096, 4096) + _dense("fc8", 4096, 1000)


def resnet(blocks: tuple[int, int, int, int]) -> Layers:
    """He, Zhang, Ren, Sun 2015, with bottlenecks; the stride is in the 3x3 convolution."""
    layers, into, side = _convolution("conv1", 3, 64, 7, 112), 64, 56
    for stage, times in enumerate(blocks):
        width = 64 << stage
        for block in range(times):
            name, before = f"layer{stage + 1}.{block}", side
            if stage > 0 and block == 0:
                side //= 2
            layers += _convolution(f"{name}.conv1", into, width, 1, before)
            layers += _convolution(f"{name}.conv2", width, width, 3, side)
            layers += _convolution(f"{name}.conv3", width, 4 * width, 1, side)
            if block == 0:
                layers += _convolution(f"{name}.downsample", into, 4 * width, 1, side)
            into = 4 * width
    return layers + _dense("fc", 2048, 1000)


def inception_v3() -> Layers:
    """Szegedy et al. 2015, 299 x 299, without the auxiliary classifier."""
    layers, into = Layers(), 3
    for name, out, kernel, side in [
        ("1a", 32, 3, 149), ("2a", 32, 3, 147), ("2b", 64, 3, 147), ("3b", 80, 1, 73), ("4a", 192, 3, 71)
    ]:  # fmt: skip
        layers += _convolution(f"conv{name}", into, out, kernel, side)
        into = out

    def branches(block: str, side: int, *paths: Sequence[tuple[int, tuple[int, int] | int, int]]) -> int:
        """Parallel paths of (channels, kernel, side) whose outputs are concatenated; returns the channels of all."""
        total = 0
        for p, path in enumerate(paths):
            channels = into
            for c, (out, kernel, at) in enumerate(path):
                layers.extend(_convolution(f"{block}.{p}.{c}", channels, out, kernel, at or side))
                channels = out
            total += channels
        return total

    for i, pool in enumerate((32, 64, 64)):
        into = branches(
            f"mixed5{'bcd'[i]}", 35, [(64, 1, 0)], [(48, 1, 0), (64, 5, 0)], [(64, 1, 0), (96, 3, 0), (96, 3, 0)],
            [(pool, 1, 0)],
        )  # fmt: skip
    into += branches("mixed6a", 17, [(384, 3, 0)], [(64, 1, 35), (96, 3, 35), (96, 3, 0)])
    row, column = (1, 7), (7, 1)
    for i, c in enumerate((128, 160, 160, 192)):
        into = branches(
            f"mixed6{'bcde'[i]}", 17, [(192, 1, 0)], [(c, 1, 0), (c, row, 0), (192, column, 0)],
            [(c, 1, 0), (c, column, 0), (c, row, 0), (c, column, 0), (192, row, 0)], [(192, 1, 0)],
        )  # fmt: skip
    into += branches(
        "mixed7a", 8, [(192, 1, 17), (320, 3, 0)], [(192, 1, 17), (192, row, 17), (192, column, 17), (192, 3, 0)]
    )
    for block in ("mixed7b", "mixed7c"):
        branches(f"{block}.a", 8, [(320, 1, 0)])
        for name, first in (("b", [(384, 1)]), ("c", [(448, 1), (384, 3)])):
            at = into
            for c, (out, kernel) in enumerate(first):
                layers += _convolution(f"{block}.{name}.{c}", at, out, kernel, 8)
                at = out
            layers += _convolution(f"{block}.{name}.row", at, 384, (1, 3), 8)
            layers += _convolution(f"{block}.{name}.column", at, 384, (3, 1), 8)
        layers += _convolution(f"{block}.d", into, 192, 1, 8)
        into = 320 + 2 * 384 + 2 * 384 + 192
    return layers + _dense("fc", 2048, 1000)


def gpt2_small(length: int = 1024) -> Layers:
    """Radford et al. 2019, 124 million parameters; a sample is `length` tokens.

    The output layer shares the token embedding's weights, so their gradient, a third of all bytes, is complete only
    at the end of backward.
    """
    width, words = 768, 50257
    layers: Layers = [("wte", words * width, 0.0), ("wpe", 1024 * width, 0.0)]

    for i in range(12):
        layers.append((f"h{i}.ln_1", 2 * width, 0.0))
        layers += _dense(f"h{i}.attn.c_attn", width, 3 * width, length)
        layers.append((f"h{i}.attn.scores", 0, 4.0 * width * length * length))
        layers += _dense(f"h{i}.attn.c_proj", width, width, length)
        layers.append((f"h{i}.ln_2", 2 * width, 0.0))
        layers += _dense(f"h{i}.mlp.c_fc", width, 4 * width, length)
        layers += _dense(f"h{i}.mlp.c_proj", 4 * width, width, length)
    layers.extend([("ln_f", 2 * width, 0.0), ("head", 0, 2.0 * width * words * length)])
    return layers


class Reference(NamedTuple):
    """A reference model.

    Attributes:
        layers: function that returns its layers.
        batch: samples per step.
        rate: samples per second of one device with that batch.
        source: source of the rate.
    """

    layers: Callable[[], Layers]
    batch: int
    rate: float
    source: str


_HOROVOD = "one Pascal GPU, batch 64, as published with Horovod"
REFERENCES = {
    "inception-v3": Reference(inception_v3, 64, 134.4, _HOROVOD),
    "resnet-50": Reference(lambda: resnet((3, 4, 6, 3)), 64, 219.0, "one P100, batch 64, TensorFlow's benchmarks 2017"),
    "resnet-101": Reference(lambda: resnet((3, 4, 23, 3)), 64, 119.4, _HOROVOD),
    "vgg-16": Reference(vgg16, 64, 130.9, _HOROVOD),
    "gpt2-small": Reference(gpt2_small, 16, 137.0, "assumed: 120 TFLOP/s sustained, 40 % of an A100's peak"),
}


def typical(million: int) -> Profile:
    """A model of so many million parameters in eight equal layers, with a step of 250 ms."""
    layers = [(f"layer {index}", million * 125_000, 1.0) for index in range(8)]
    return from_costs(f"a model of {million} million parameters and 250 ms a step", 1, layers, 0.25, "assumed")


def reference(name: str, rate: float | None = None) -> Profile:
    """The profile of a reference model.

    Args:
        name: "inception-v3", "resnet-50", "resnet-101", "vgg-16" or "gpt2-small".
        rate: samples per second of one device, instead of the published rate.

    Raises:
        ArgumentError: the model is unknown.
    """
    if name not in REFERENCES:
        raise ArgumentError(f"model={name!r} is not one of {', '.join(REFERENCES)}.")
    model = REFERENCES[name]
    source = model.source if rate is None else "the rate given"
    return from_costs(name, model.batch, model.layers(), model.batch / (rate or model.rate), source)
