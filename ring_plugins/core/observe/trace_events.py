"""Spans as the events that Perfetto (ui.perfetto.dev) and chrome://tracing draw: a process a rank, a row a thread."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

#: kind, name, begin and end in nanoseconds on rank 0's clock, arguments: a `Span` on its way.
Row = tuple[str, str, int, int, dict[str, Any]]
Event = dict[str, Any]

_SCRIPT, _COMMUNICATION = 0, 1
_ROWS = {"step": _SCRIPT, "backward": _SCRIPT, "wait": _SCRIPT, "call": _SCRIPT, "operation": _COMMUNICATION}

_identities = itertools.count(1)


def header(rank: int, host: str) -> list[Event]:
    """What names a rank's rows."""
    names = [("process_name", 0, f"rank {rank} on {host}")]
    names += [("thread_name", _SCRIPT, "script"), ("thread_name", _COMMUNICATION, "communication")]
    events: list[Event] = [
        {"ph": "M", "pid": rank, "tid": row, "name": what, "args": {"name": name}} for what, row, name in names
    ]
    return [*events, {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}}]


def label(rank: int, uncertainty: int, lost: int) -> Event:
    """What a viewer shows beside a rank's name: how well its clock is known, in nanoseconds, and spans lost."""
    text = "rank 0's clock" if uncertainty == 0 else f"clock within {uncertainty / 1e3:.0f} µs of rank 0's"
    text += f", {lost} spans lost" if lost else ""
    return {"ph": "M", "pid": rank, "name": "process_labels", "args": {"labels": text, "uncertainty": uncertainty}}


def events(rank: int, row: Row, origin: int) -> Iterator[Event]:
    """The events of a span.

    Args:
        rank: whose it is.
        row: the span.
        origin: nanoseconds that count as 0.
    """
    kind, name, begin, end, arguments = row
    if kind == "bucket":
        yield from _bucket(rank, row, origin)
        return
    yield {
        "ph": "X",
        "pid": rank,
        "tid": _ROWS.get(kind, _SCRIPT),
        "cat": kind,
        "name": f"wait for {name}" if kind == "wait" else name,
        "ts": (begin - origin) / 1e3,
        "dur": max(0, end - begin) / 1e3,
        "args": arguments,
    }


def _bucket(rank: int, row: Row, origin: int) -> Iterator[Event]:
    """A bucket overlaps with others, so it has a row of its own: ready, launched, started, reduced."""
    _, name, ready, reduced, arguments = row
    launched, started = int(arguments["launched"]), int(arguments["started"])
    both = {"pid": rank, "tid": _COMMUNICATION, "cat": "bucket", "id": next(_identities)}
    parts = [
        (name, ready, reduced, {"nbytes": arguments["nbytes"]}),
        ("until launched", ready, launched, {}),
        ("until its turn", launched, started, {}),
        ("reducing", started, reduced, {}),
    ]
    for part, begin, end, more in parts:
        yield {**both, "ph": "b", "name": part, "ts": (begin - origin) / 1e3, "args": more}
        yield {**both, "ph": "e", "name": part, "ts": (max(begin, end) - origin) / 1e3}
