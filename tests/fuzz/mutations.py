"""Mutated copies of valid inputs: as bytes, and as JSON, whose structure most mutations of bytes would break."""

import json
import random
from collections.abc import Sequence
from typing import Any

_INTEGERS = [
    0,
    1,
    0x7F,
    0x80,
    0xFF,
    0x7FFF,
    0xFFFF,
    1 << 20,
    0x7FFFFFFF,
    0x80000000,
    0xFFFFFFFF,
    (1 << 63) - 1,
    1 << 63,
]
_TOKENS = [
    b"[",
    b"{",
    b'"',
    b"]",
    b"\0",
    b"\xff",
    b"\x80\x05",
    b"NaN",
    b"1e999",
    b"9" * 5000,
    b'"\\ud800"',
    b"null",
    b"-1",
]
_VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 1 << 31, 1 << 63, 1 << 200, -(1 << 64), 0.5, -1e308, float("inf"), float("nan"),
    "", "x", "x" * 5000, "\0", "é", "../../etc/passwd", "-1", [], [[]], {}, {"": None}, [0] * 300,
]  # fmt: skip
#: Bytes of the longest input.
LONGEST = 1 << 17


def mutated(rng: random.Random, seeds: Sequence[bytes]) -> bytes:
    """A seed with one to five changes; sometimes the seed itself."""
    data = bytearray(rng.choice(seeds))
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3, 5))):
        at = rng.randrange(len(data) + 1)
        end = min(len(data), at + rng.choice((1, 2, 4, 8, 32, 1000)))
        kind = rng.randrange(10)
        if kind == 0 and data:
            data[at % len(data)] ^= 1 << rng.randrange(8)
        elif kind == 1 and data:
            data[at % len(data)] = rng.randrange(256)
        elif kind == 2:
            data[at:at] = rng.randbytes(rng.choice((1, 2, 8, 100)))
        elif kind == 3:
            del data[at:end]
        elif kind == 4:
            data[at:at] = data[at:end] * rng.choice((1, 2, 50))
        elif kind == 5:
            del data[at:]
        elif kind == 6:
            number, width = rng.choice(_INTEGERS), rng.choice((1, 2, 4, 8))
            data[at : at + width] = (number & ((1 << 8 * width) - 1)).to_bytes(width, rng.choice(("big", "little")))
        elif kind == 7:
            other = rng.choice(seeds)
            data[at:] = other[rng.randrange(len(other) + 1) :]
        elif kind == 8:
            data[at:at] = rng.choice(_TOKENS)
        elif rng.randrange(20) == 0:  # rarely: long inputs take long
            data[at:at] = rng.choice(_TOKENS)[:1] * rng.choice((1000, 60_000))
    return bytes(data[:LONGEST])


def mutated_json(rng: random.Random, seeds: Sequence[bytes]) -> bytes:
    """The JSON of a seed with some values replaced, removed or added; sometimes `mutated` bytes."""
    if rng.randrange(4) == 0:
        return mutated(rng, seeds)
    seed = rng.choice(seeds)
    try:
        tree = json.loads(seed)
    except (ValueError, RecursionError):  # kept for not being JSON
        return mutated(rng, [seed])
    for _ in range(rng.choice((0, 1, 1, 2, 4))):
        tree = _change(rng, tree)
    return json.dumps(tree).encode()[:LONGEST]


def _change(rng: random.Random, tree: Any) -> Any:
    if isinstance(tree, list) and tree and rng.randrange(4):
        at = rng.randrange(len(tree))
        kind = rng.randrange(6)
        if kind == 0:
            return tree[:at] + tree[at + 1 :]
        if kind == 1:
            return [*tree, tree[at]]
        return [*tree[:at], _change(rng, tree[at]), *tree[at + 1 :]]
    if isinstance(tree, dict) and tree and rng.randrange(4):
        key = rng.choice(sorted(tree))
        kind = rng.randrange(6)
        if kind == 0:
            return {name: value for name, value in tree.items() if name != key}
        if kind == 1:
            return {**tree, key + "x": tree[key]}
        return {**tree, key: _change(rng, tree[key])}
    return rng.choice(_VALUES)
