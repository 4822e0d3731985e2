"""Reference models: parameters and operations of every layer, from their papers, and published step times.

A multiplication and an addition count as two operations. A layer includes its normalization.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.planning.profile import Profile, from_costs

Layers = list[tuple[str, int, float]]


class _Stack:
    """A stack of layers; `channels` is the number of input channels of the next layer."""

    def __init__(self, channels: int = 3) -> None:
        self.layers: Layers = []
        self.channels = channels

    def convolution(
        self, name: str, out: int, kernel: tuple[int, int] | int, side: int, into: int | None = None, bias: bool = False
    ) -> int:
        """Add a convolution with `side` x `side` outputs and batch norm or a bias; returns its output channels."""
        high, wide = (kernel, kernel) if isinstance(kernel, int) else kernel
        channels = self.channels if into is None else into
        weights = high * wide * channels * out
        self.layers.append((f"{name}.weight", weights, 2.0 * weights * side * side))
        self.layers.append((f"{name}.{'bias' if bias else 'norm'}", out if bias else 2 * out, 0.0))
        return out

    def dense(self, name: str, channels: int, out: int) -> None:
        self.layers.append((f"{name}.weight", channels * out, 2.0 * channels * out))
        self.layers.append((f"{name}.bias", out, 0.0))


def vgg16() -> Layers:
    """Simonyan, Zisserman 2014, configuration D."""
    stack, side = _Stack(), 224
    for block, (out, times) in enumerate([(64, 2), (128, 2), (256, 3), (512, 3), (512, 3)], start=1):
        for i in range(1, times + 1):
            stack.channels = stack.convolution(f"conv{block}_{i}", out, 3, side, bias=True)
        side //= 2
    stack.dense("fc6", 512 * 7 * 7, 4096)
    stack.dense("fc7", 4096, 4096)
    stack.dense("fc8", 4096, 1000)
    return stack.layers


def resnet(blocks: tuple[int, int, int, int]) -> Layers:
    """He, Zhang, Ren, Sun 2015, with bottlenecks; the stride is in the 3x3 convolution."""
    stack = _Stack()
    stack.channels = stack.convolution("conv1", 64, 7, 112)
    side = 56
    for stage, times in enumerate(blocks):
        width = 64 << stage
        for block in range(times):
            name, shrinks = f"layer{stage + 1}.{block}", stage > 0 and block == 0
            before, side = side, side // 2 if shrinks else side
            into = stack.channels
            stack.convolution(f"{name}.conv1", width, 1, before)
            stack.convolution(f"{name}.conv2", width, 3, side, into=width)
            stack.convolution(f"{name}.conv3", 4 * width, 1, side, into=width)
            if block == 0:
                stack.convolution(f"{name}.downsample", 4 * width, 1, side, into=into)
            stack.channels = 4 * width
    stack.dense("fc", 2048, 1000)
    return stack.layers


def inception_v3() -> Layers:
    """Szegedy et al. 2015, 299 x 299, without the auxiliary classifier."""
    stack = _Stack()
    for name, out, kernel, side in [
        ("1a", 32, 3, 149), ("2a", 32, 3, 147), ("2b", 64, 3, 147), ("3b", 80, 1, 73), ("4a", 192, 3, 71)
    ]:  # fmt: skip
        stack.channels = stack.convolution(f"conv{name}", out, kernel, side)

    def branches(block: str, side: int, *paths: Sequence[tuple[int, tuple[int, int] | int, int]]) -> None:
        """Parallel paths of (channels, kernel, side) whose outputs are concatenated."""
        total = 0
        for p, path in enumerate(paths):
            into = stack.channels
            for c, (out, kernel, at) in enumerate(path):
                into = stack.convolution(f"{block}.{p}.{c}", out, kernel, at or side, into=into)
            total += into
        stack.channels = total

    for i, pool in enumerate((32, 64, 64)):
        branches(
            f"mixed5{'bcd'[i]}", 35, [(64, 1, 0)], [(48, 1, 0), (64, 5, 0)], [(64, 1, 0), (96, 3, 0), (96, 3, 0)],
            [(pool, 1, 0)],
        )  # fmt: skip
    pooled = stack.channels
    branches("mixed6a", 17, [(384, 3, 0)], [(64, 1, 35), (96, 3, 35), (96, 3, 0)])
    stack.channels += pooled
    row, column = (1, 7), (7, 1)
    for i, c in enumerate((128, 160, 160, 192)):
        branches(
            f"mixed6{'bcde'[i]}", 17, [(192, 1, 0)], [(c, 1, 0), (c, row, 0), (192, column, 0)],
            [(c, 1, 0), (c, column, 0), (c, row, 0), (c, column, 0), (192, row, 0)], [(192, 1, 0)],
        )  # fmt: skip
    pooled = stack.channels
    branches("mixed7a", 8, [(192, 1, 17), (320, 3, 0)], [(192, 1, 17), (192, row, 17), (192, column, 17), (192, 3, 0)])
    stack.channels += pooled
    for block in ("mixed7b", "mixed7c"):
        into, outer = stack.channels, [(320, 1, 0)]
        branches(f"{block}.a", 8, outer)
        for name, first, second in (("b", [(384, 1)], 384), ("c", [(448, 1), (384, 3)], 384)):
            at = into
            for c, (out, kernel) in enumerate(first):
                at = stack.convolution(f"{block}.{name}.{c}", out, kernel, 8, into=at)
            stack.convolution(f"{block}.{name}.row", second, (1, 3), 8, into=at)
            stack.convolution(f"{block}.{name}.column", second, (3, 1), 8, into=at)
        stack.convolution(f"{block}.d", 192, 1, 8, into=into)
        stack.channels = 320 + 2 * 384 + 2 * 384 + 192
    stack.dense("fc", 2048, 1000)
    return stack.layers


def gpt2_small(length: int = 1024) -> Layers:
    """Radford et al. 2019, 124 million parameters; a sample is `length` tokens.

    The output layer shares the token embedding's weights, so their gradient, a third of all bytes, is complete only
    at the end of backward.
    """
    width, words = 768, 50257
    layers: Layers = [("wte", words * width, 0.0), ("wpe", 1024 * width, 0.0)]

    def dense(name: str, into: int, out: int) -> None:
        layers.extend([(f"{name}.weight", into * out, 2.0 * into * out * length), (f"{name}.bias", out, 0.0)])

    for i in range(12):
        layers.append((f"h{i}.ln_1", 2 * width, 0.0))
        dense(f"h{i}.attn.c_attn", width, 3 * width)
        layers.append((f"h{i}.attn.scores", 0, 4.0 * width * length * length))
        dense(f"h{i}.attn.c_proj", width, width)
        layers.append((f"h{i}.ln_2", 2 * width, 0.0))
        dense(f"h{i}.mlp.c_fc", width, 4 * width)
        dense(f"h{i}.mlp.c_proj", 4 * width, width)
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
