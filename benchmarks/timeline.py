"""Record a timeline and keep two of its steps, which plot.py draws.

    python benchmarks/timeline.py

Two ranks train a perceptron of 20 MB. Rank 1 takes 8 ms longer per step, as if it waited for data.
"""

from __future__ import annotations

import itertools
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from measure import save

LATE = 0.008
COLORS = {
    "backward": "#4c78a8",
    "script waits": "#f2a541",
    "waiting for the slowest": "#e45756",
    "reducing": "#54a24b",
    "queued": "#bab0ac",
}


def record(directory: str) -> None:
    """Record some steps of this rank."""
    import torch

    import ring_plugins as ring
    from ring_plugins.torch import DistributedOptimizer, Timeline, broadcast_parameters

    ring.init(ranks=2)
    model = torch.nn.Sequential(*(torch.nn.Linear(900, 900) for _ in range(6)))
    optimizer = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 1e-9), model.named_parameters(), bucket_bytes=3 << 20
    )
    broadcast_parameters(model)
    data = torch.randn(96, 900)

    def step() -> None:
        if ring.rank() == 1:
            time.sleep(LATE)
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()

    for _ in range(10):
        step()
    with Timeline(directory):
        for _ in range(30):
            step()
    ring.shutdown()


def draw(events: list[dict[str, Any]]) -> Any:
    """Draw the two fastest consecutive steps."""
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    spans = [event for event in events if event["ph"] == "X"]
    begin, end = window(spans)
    for event in events:
        event["ts"] = event.get("ts", 0.0) - begin
    begin, end = 0.0, end - begin
    figure, axes = plt.subplots(figsize=(10, 4.2), layout="constrained")
    labels: dict[float, str] = {}
    for rank in (0, 1):
        script, communication = -4.0 * rank, -4.0 * rank - 1
        labels |= {script: f"rank {rank}: script", communication: "communication", communication - 1: "buckets"}
        for span in (span for span in spans if span["pid"] == rank):
            start, length, waited = span["ts"], span["dur"], span["args"].get("waited_ms", 0) * 1e3
            if span["cat"] == "backward":
                bar(axes, script, start, length, "backward")
            elif span["cat"] == "wait":
                bar(axes, script, start, length, "script waits")
            elif span["cat"] == "operation":
                bar(axes, communication, start, waited, "waiting for the slowest")
                bar(axes, communication, start + waited, length - waited, "reducing")
        for i, (ready, started, reduced) in enumerate(buckets(events, rank, begin, end)):
            row = communication - 0.75 - 0.16 * (i % 6)
            bar(axes, row, ready, started - ready, "queued", 0.12)
            bar(axes, row, started, reduced - started, "reducing", 0.12)
    axes.set_xlim(begin, end)
    axes.xaxis.set_major_formatter(lambda tick, _: f"{tick / 1e3:.0f}")
    axes.set_xlabel("ms")
    axes.set_yticks(list(labels), list(labels.values()))
    axes.legend(
        [Patch(color=color) for color in COLORS.values()],
        COLORS,
        ncols=5,
        loc="lower center",
        frameon=False,
        bbox_to_anchor=(0.5, 1.0),
    )
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    return figure


def kept(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the picture shows: events of two steps, with what `draw` reads of them."""
    begin, end = window([event for event in events if event["ph"] == "X"])
    inside = (event for event in events if begin <= event.get("ts", -1) <= end + 1 and event.get("cat"))
    names = ("ph", "cat", "pid", "ts", "dur", "id", "name", "args")
    return [{name: event[name] for name in names if name in event} for event in inside]


def bar(axes: Any, row: float, start: float, length: float, kind: str, height: float = 0.7) -> None:
    axes.barh(row, length, height, start, color=COLORS[kind], linewidth=0)


def window(spans: list[dict[str, Any]]) -> tuple[float, float]:
    """Start and end of the two fastest consecutive steps of rank 0."""
    steps = sorted((s for s in spans if s["cat"] == "step" and s["pid"] == 0), key=lambda s: float(s["ts"]))
    pairs = [(a["ts"], b["ts"] + b["dur"]) for a, b in itertools.pairwise(steps)]
    begin, end = min(pairs, key=lambda pair: pair[1] - pair[0])
    return begin - 300, end + 300


def buckets(events: list[dict[str, Any]], rank: int, begin: float, end: float) -> list[tuple[float, float, float]]:
    """Times at which each bucket of a rank was ready, launched and reduced."""
    times: dict[int, dict[str, float]] = {}
    for event in events:
        if event.get("cat") == "bucket" and event["pid"] == rank:
            times.setdefault(event["id"], {})[f"{event['ph']} {event['name'].split()[0]}"] = event["ts"]
    moments = ("b bucket", "b reducing", "e bucket")
    found = [tuple(t[moment] for moment in moments) for t in times.values() if all(moment in t for moment in moments)]
    return sorted(t for t in found if begin < t[0] and t[2] < end)


def main() -> None:
    import ring_plugins as ring

    directory = os.environ.get("TIMELINE_DIRECTORY") or tempfile.mkdtemp(prefix="timeline-")
    os.environ["TIMELINE_DIRECTORY"] = directory  # for the ranks that this script starts
    record(directory)
    if not os.environ.get("RING_SPAWNED"):
        events = json.loads((Path(directory) / "timeline.json").read_text())
        save("timeline", {"events": kept(events)}, ranks="2 ranks on 1 host, each with its share of the cores")
        (Path(directory) / "timeline.json").unlink()
        os.rmdir(directory)
    assert not ring.is_initialized()


if __name__ == "__main__":
    main()
