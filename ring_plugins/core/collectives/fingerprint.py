"""Identifies an operation, so that ranks notice when they are in different ones.

NCCL hangs or corrupts memory when ranks call different collectives, or the same one with different sizes. Here every
operation sends or shares a 62-bit code that identifies it, at a negligible cost beside the data. Only if codes differ
do the ranks exchange texts, for an error that names each rank's operation.

What a script calls and what this package needs for itself may be equal in kind, size and dtype, and use the same
communicator: an average of a loss and one of a metric, on ranks that are out of step. So what the package needs runs
in `purpose`, whose text is part of the fingerprint.
"""

from __future__ import annotations

import contextlib
import threading
import zlib
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import takewhile
from typing import NamedTuple

from ring_plugins.core.base.errors import MismatchError, name_ranks
from ring_plugins.core.base.places import described

#: Arrays of one operation that its text lists; a checksum stands for the others.
_LISTED = 3
#: In the text of an operation that follows rejected calls.
_REJECTED = " rejected call"


class Fingerprint(NamedTuple):
    """An operation's identity: equal on all ranks, or the program is wrong.

    Attributes:
        code: a 62-bit number; ranks compare it.
        text: for people, such as "all_reduce(1000 x float32, average)".
    """

    code: int
    text: str


@lru_cache(maxsize=4096)
def fingerprint(kind: str, dtype: str = "", count: int | tuple[int, ...] = -1, detail: str = "") -> Fingerprint:
    """The fingerprint of an operation.

    Args:
        kind: its name.
        dtype: element type, where it must agree.
        count: elements, or the shape, where they must agree; -1 where ranks may differ.
        detail: anything else that must agree, such as the reduction or the root.
    """
    counts = count if isinstance(count, tuple) else (count,) if count >= 0 else ()
    inner = ", ".join(filter(None, (" x ".join([*map(str, counts), dtype]), detail)))
    return _of(f"{kind}({inner})")


@lru_cache(maxsize=256)
def fingerprint_of_several(kind: str, arrays: tuple[tuple[str, int], ...], detail: str) -> Fingerprint:
    """The fingerprint of one operation on several arrays.

    Args:
        kind: its name.
        arrays: dtype and number of elements of each.
        detail: as in `fingerprint`.
    """
    texts = [f"{count} x {dtype}" for dtype, count in arrays]
    if len(texts) > _LISTED:
        others = ", ".join(texts[_LISTED:]).encode()
        texts[_LISTED:] = [f"{len(texts) - _LISTED} more ({zlib.crc32(others):08x})"]
    return _of(f"{kind}({', '.join([*texts, detail])})")


class _Purpose(threading.local):
    """What this thread's operations are for; "" for the script's own."""

    text = ""


current_purpose = _Purpose()


@contextlib.contextmanager
def purpose(text: str) -> Iterator[None]:
    """Let this thread's operations match only those that are for the same, on all ranks.

    Args:
        text: what needs them, such as "check of weights"; "" for the script.
    """
    before, current_purpose.text = current_purpose.text, text
    try:
        yield
    finally:
        current_purpose.text = before


@lru_cache(maxsize=1024)
def for_purpose(operation: Fingerprint, text: str) -> Fingerprint:
    """The fingerprint of an operation that is needed for something."""
    return _of(f"{text}: {operation.text}")


def after_rejections(operation: Fingerprint, rejections: int) -> Fingerprint:
    """The fingerprint of the first operation after calls that this rank rejected.

    It matches only if all members have rejected as many. Else one that caught its error and called again would be
    matched or not, depending on whether the others had heard of the rejection yet.
    """
    return _of(f"{operation.text} after {rejections}{_REJECTED}{'s' if rejections > 1 else ''}")


def _of(text: str) -> Fingerprint:
    data = text.encode()
    return Fingerprint(zlib.crc32(data) << 30 | zlib.adler32(data) & 0x3FFFFFFF, text)


class MismatchAfterRejection(MismatchError):
    """Ranks disagree after some of them rejected more calls than others, which ends the communicator."""


def mismatch(communicator: str, calls: dict[int, str], own_place: str = "") -> MismatchError:
    """The error for ranks in different operations.

    Args:
        communicator: its name.
        calls: world rank -> text of its operation; where that is known, a line follows for each frame of its place.
        own_place: where this rank's script is, if the texts do not tell.
    """
    by_text: dict[str, list[int]] = {}
    for rank, text in calls.items():
        by_text.setdefault(text, []).append(rank)
    texts, places = zip(*((text, frames) for text, *frames in (one.split("\n") for one in by_text)), strict=True)
    outer = zip(*map(reversed, places), strict=False)  # the ranks' outermost frames, then those that they called
    common = sum(1 for _ in takewhile(lambda frames: len(set(frames)) == 1, outer))
    if all(frames == places[0] for frames in places):
        common = 0
    parts = ", but ".join(
        f"{name_ranks(ranks)} call{'' if len(ranks) > 1 else 's'} {text}{' at ' if frames else ''}"
        f"{described(frames, common)}"
        for ranks, text, frames in zip(by_text.values(), texts, places, strict=True)
    )
    where = f" This rank is at {own_place}." if own_place else ""
    operations = {rank: text.partition("\n")[0] for rank, text in calls.items()}
    counts = {text.rpartition(" after ")[2] if _REJECTED in text else "" for text in texts}
    kind = MismatchAfterRejection if len(counts) > 1 else MismatchError
    return kind(
        f"ranks disagree in {communicator}: {parts}.{where} All ranks must make equal calls in the same order. "
        f"{_likely_causes(operations)}"
    )


def _likely_causes(calls: dict[int, str]) -> str:
    """What to look for, by what is known: one collective of different sizes, or different collectives."""
    condition = "a condition that is true on some ranks only, such as `if rank() == 0:` around a call"
    batches = "different numbers of batches"
    if len({text.partition("(")[0] for text in calls.values()}) == 1:
        differing = _differing(set(calls.values()))
        if "tag" in differing:
            return (
                "Messages from one rank to another arrive in the order in which they were sent, whatever their tags: "
                "receive them in that order."
            )
        if differing == ["size"]:
            return f"Usually a size depends on the rank, such as the last batch's; or look for {batches}, {condition}."
        if differing and "size" not in differing:
            return f"Pass the same {' and '.join(differing)} on all ranks; or look for {batches}, {condition}."
    alone = [text for text in calls.values() if list(calls.values()).count(text) == 1]
    # Rank 0 alone calls something else than all others.
    if len(calls) > 2 and len(alone) == 1 and calls.get(0) == alone[0]:
        return f"Usually there is {condition}; else {batches}."
    return f"Usually the ranks have {batches}, or there is {condition}."


def _differing(texts: Iterable[str]) -> list[str]:
    """In what the texts of one collective differ: "size", "dtype", "root", "tag" or "op"."""
    rows = [text.partition("(")[2].rpartition(")")[0].split(", ") for text in texts]
    if len({len(row) for row in rows}) > 1:
        return ["size"]
    found = []
    for column in map(set, zip(*rows, strict=True)):
        if len(column) == 1:
            continue
        parts = [one.rpartition(" x ") for one in column]
        if not all(separator for _, separator, _ in parts):
            names = {"root ": "root", "tag ": "tag", " more (": "size"}
            found.append(next((name for text, name in names.items() if all(text in one for one in column)), "op"))
            continue
        found += ["size"] * (len({count for count, _, _ in parts}) > 1)
        found += ["dtype"] * (len({dtype for _, _, dtype in parts}) > 1)
    return list(dict.fromkeys(found))


def size_mismatch(
    communicator: str, operation: Fingerprint, sender: int, sent: int, receiver: int, expected: int
) -> MismatchError:
    """The error for a rank that sends another number of bytes than its peer expects; ranks are world ranks."""
    return MismatchError(
        f"ranks disagree in {communicator}: {operation.text}: rank {sender} sends {sent} bytes to rank {receiver}, "
        f"which expects {expected}. Sizes must agree."
    )
