"""Draw all pictures of the documentation from kept results, and write its tables (tables.py).

    python benchmarks/plot.py            # reads benchmarks/results, writes docs/pictures and the pages that have tables

They have no background, and lines and letters of a gray that is readable on white and on black. The line at the bottom
names machine, ranks, threads, what else used the cores, and the date; measure.py keeps it with each result.
"""

from __future__ import annotations

import os
import textwrap
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.patches

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import tables
from between_hosts import limit
from kills import undisturbed
from measure import RESULTS, load
from tables import step_and_target, target
from timeline import draw as draw_timeline

from ring_plugins.planning import counts, parse, predict, reference
from ring_plugins.planning.drawing import COLORS, draw_scaling

PICTURES = Path(__file__).parent.parent / "docs" / "pictures"
LABELS = {
    "ring": "ring_plugins, ordinary memory",
    "ring bucket": "ring_plugins, shared bucket",
    "MPI": "MPI Allreduce (Open MPI)",
    "gloo": "torch gloo",
    "plain copy": "plain copy of the same bytes",
    "ring over MPI": "ring_plugins over MPI",
    "bare sockets": "bare sockets, the same bytes",
    "sockets and sums": "bare sockets, then the same sums",
}
INK = "#768390"
COLORS = COLORS | {"ring": "#2a9d76", "ring bucket": "#6bbf59", "ring over MPI": "#a77bca", "bare sockets": "#4c92d9"}
COLORS |= {"sockets and sums": "#8fbce6"}
STYLE = {
    **dict.fromkeys(["text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"], INK),
    "grid.color": INK,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "savefig.transparent": True,
    "font.size": 10,
    "svg.hashsalt": "ring_plugins",  # the same results give the same file
}
STEP_COLORS = {
    "ring_plugins": COLORS["ring"],
    "DDP (gloo)": COLORS["gloo"],
    "no communication": COLORS["plain copy"],
    "copied": "#bbbbbb",
}


def save(figure: Any, name: str, caption: str = "") -> None:
    """Write a picture, with a line at its bottom that says how its numbers came about."""
    figure.supxlabel(caption, fontsize=8)
    figure.savefig(PICTURES / f"{name}.svg", metadata={"Date": None})
    plt.close(figure)


def steps() -> None:
    """Bar charts: a training step, one panel per model."""
    record = load("training_step")
    models = list(record["seconds"])
    figure, panels = plt.subplots(1, len(models), figsize=(9, 3.6), layout="constrained")
    bars: dict[str, Any] = {}
    for panel, model in zip(panels, models, strict=True):
        times = record["seconds"][model]
        for i, (name, t) in enumerate(times.items()):
            low, high = (t["median"] - t["low"]) * 1e3, (t["high"] - t["median"]) * 1e3
            bar = panel.bar(i, t["median"] * 1e3, color=STEP_COLORS[name], yerr=[[low], [high]], ecolor=INK, capsize=3)
            bars[name] = bar
            panel.annotate(
                f"{t['median'] * 1e3:.1f}", (i, t["median"] * 1e3 + high), ha="center", va="bottom", fontsize=9
            )
        panel.set_xticks([])
        panel.set_title(f"{model}\n{SIZES[model.partition(',')[0]]} of gradients", fontsize=10)
        panel.spines[["top", "right"]].set_visible(False)
        panel.margins(y=0.12)
    panels[0].set_ylabel("ms per step on two ranks\n(medians and quartiles)", fontsize=9)
    figure.legend(bars.values(), bars, ncols=len(bars), loc="outside upper center", frameon=False, fontsize=9)
    save(figure, "step_time", record["machine"])


SIZES = {"mlp": "67 MB", "transformer": "19 MB", "cnn": "1.5 MB"}


def messages() -> None:
    """Line chart: all-reduce of 64 B to 256 MiB."""
    record = load("all_reduce")
    sizes = [int(size) for size in record["seconds"]]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for name in next(iter(record["seconds"].values())):
        micro = [record["seconds"][str(size)][name]["median"] * 1e6 for size in sizes]
        style = "--" if name == "plain copy" else "-"
        left.loglog(sizes, micro, style, marker="o", ms=3, color=COLORS[name], label=LABELS[name])
        ours = [record["seconds"][str(size)]["ring"]["median"] * 1e6 for size in sizes]
        right.semilogx(
            sizes, [m / o for m, o in zip(micro, ours, strict=True)], style, marker="o", ms=3, color=COLORS[name]
        )
    left.set(xlabel="bytes", ylabel="µs", title="all-reduce of float32, two ranks")
    right.set(xlabel="bytes", ylabel="time / ring_plugins, ordinary memory", title="the same as a ratio", yscale="log")
    right.set_yticks([0.2, 0.5, 1, 2, 5, 10, 20, 50], ["0.2", "0.5", "1", "2", "5", "10", "20", "50"])
    left.legend(fontsize=8, frameon=False)
    for panel in (left, right):
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.25)
    save(figure, "all_reduce", record["machine"])


def scaling() -> None:
    """Line chart: efficiency by number of ranks, predicted by `ring plan`."""
    series = {}
    for model, network, transport in [
        ("inception-v3", "25gbit", "tcp"),
        ("resnet-101", "25gbit", "tcp"),
        ("vgg-16", "100gbit", "rdma"),
        ("vgg-16", "25gbit", "rdma"),
        ("vgg-16", "25gbit", "tcp"),
    ]:
        between = parse(network, transport)
        series[f"{model}, {between.name}"] = [predict(reference(model), between, ranks, 4) for ranks in counts(1024)]
    draw_scaling(
        series,
        "Predicted by ring plan, never run on GPUs:\nfour Pascal GPUs per host, batch 64 per GPU",
        PICTURES / "plan.svg",
    )


def between_hosts() -> None:
    """Line charts, one per network: share of the wire's limit that an all-reduce between hosts reaches."""
    record = load("between_hosts")
    networks = [one for one in record["networks"] if one["rate"] is not None and one["hosts"] in (2, 4)]
    figure, panels = plt.subplots(2, (len(networks) + 1) // 2, figsize=(9, 6.6), layout="constrained", squeeze=False)
    for panel, one in zip(panels.flat, networks, strict=True):
        sizes = [int(size) for size in one["seconds"]]
        for name in next(iter(one["seconds"].values())):
            least = [limit(size, one["hosts"], one["rate"]) for size in sizes]
            took = [one["seconds"][str(size)][name]["median"] for size in sizes]
            share = [100 * best / median for best, median in zip(least, took, strict=True)]
            style = ":" if name == "bare sockets" else "-"
            panel.semilogx(sizes, share, style, marker="o", ms=3, color=COLORS[name], label=LABELS[name])
        panel.axhline(100, color=INK, linewidth=0.6)
        panel.set(xlabel="bytes", ylabel="% of the wire's limit", ylim=(0, None))
        panel.set_title(f"{one['hosts']} hosts, {one['ranks']} ranks, {one['rate']}/s", fontsize=10)
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.25)
    panels[0][0].legend(fontsize=7, frameon=False)
    burst = "above 100 %: a shaped link lets short bursts pass faster than its rate"
    save(figure, "between_hosts", f"{burst}\n{record['machine']}")


def many_hosts() -> None:
    """Line charts, one per size: simulated time of an all-reduce against the number of hosts."""
    record = load("many_hosts")
    figure, panels = plt.subplots(2, 2, figsize=(9, 6.6), layout="constrained")
    kinds = {
        "chosen": ("ring_plugins", "-", COLORS["ring"]),
        "direct": ("direct", "--", COLORS["gloo"]),
        "ring": ("ring", "--", COLORS["bare sockets"]),
        "halving and doubling": ("halving and doubling", ":", COLORS["ring over MPI"]),
    }
    for panel, (size, by_hosts) in zip(panels.flat, record["seconds"].items(), strict=True):
        for kind, (label, style, color) in kinds.items():
            points = [(int(hosts), times[kind] * 1e3) for hosts, times in by_hosts.items() if kind in times]
            panel.loglog(*zip(*points, strict=True), style, color=color, label=label)
        panel.set_title(f"{int(size) / 2**20:g} MiB" if int(size) >= 2**20 else f"{int(size) >> 10} KiB", fontsize=10)
        panel.set(xlabel="hosts", ylabel="simulated ms")
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.25)
    panels[0][0].legend(fontsize=7, frameon=False)
    prime = "127 hosts, a prime number, cannot form small groups, and exchange around a ring"
    save(figure, "many_hosts", f"{prime}\nsimulated, not measured; constants from {record['machine']}")


def compression() -> None:
    """Line chart: loss with gradients in 16 bits between hosts."""
    record = load("half_wire")
    losses = record["losses"]
    figure, panel = plt.subplots(figsize=(7, 4), layout="constrained")
    for (name, values), style in zip(losses.items(), ("-", "--", "-.", ":"), strict=True):
        smooth = np.convolve(values, np.ones(10) / 10, "valid")
        panel.plot(range(10, len(values) + 1), smooth, style, label=name, linewidth=1.5)
    panel.set(xlabel="step", ylabel="loss, mean of 10 steps", yscale="log")
    panel.set_title("Digits on four ranks as two hosts", fontsize=10)
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(alpha=0.25)
    panel.legend(fontsize=8, frameon=False)
    save(figure, "compression", record["machine"])


def timeline() -> None:
    """Two steps of two ranks."""
    record = load("timeline")
    save(draw_timeline(record["events"]), "timeline", record["machine"])


def kills() -> None:
    """Line charts: how far trainings get while ranks are killed, in seconds of a training in which none is."""
    record = load("kills")
    intervals = list(next(iter(record["variants"].values()))["kills"])
    figure, panels = plt.subplots(1, len(intervals), figsize=(9, 3.8), layout="constrained", squeeze=False)
    names = {
        "replace": ("ring_plugins, replace", "-", COLORS["ring"]),
        "spare": ("ring_plugins, replace with a standby", ":", COLORS["ring"]),
        "restart": ("ring_plugins, restarted", "--", COLORS["ring bucket"]),
        "torchrun": ("DDP, torchrun --max-restarts", "--", COLORS["gloo"]),
        "torchft": ("DDP, torchft", "-.", COLORS["bare sockets"]),
    }
    for panel, every in zip(panels.flat, intervals, strict=True):
        for variant, found in record["variants"].items():
            curve = found["kills"][every]["curve"]
            label, style, color = names[variant]
            speed = undisturbed(found["kills"])
            trained = [0.0, *(samples / speed for samples in curve)]
            panel.plot([half / 2 for half in range(len(trained))], trained, style, color=color, label=label)
        seconds = len(curve) / 2
        panel.plot([0, seconds], [0, seconds], ":", color=INK, label="no kills")
        panel.set(xlabel="seconds", ylabel="trained, in seconds without kills", xlim=(0, seconds), ylim=(0, None))
        panel.set_title(f"a rank killed every {every} s", fontsize=10)
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.25)
    panels[0][0].legend(fontsize=8, frameon=False)
    save(figure, "kills", record["machine"])


def time_to_loss() -> None:
    """Line charts: the loss against the time between two slow hosts."""
    record = load("time_to_loss")
    figure, panels = plt.subplots(1, len(record["rates"]), figsize=(9, 3.8), layout="constrained", squeeze=False)
    styles = {
        "synchronous": ("-", INK),
        'compression="bf16"': ("-", COLORS["ring bucket"]),
        'compression="int8"': ("-", COLORS["ring"]),
        "PowerSGD, rank 16": ("--", COLORS["gloo"]),
        'LocalUpdates, compression="int8"': (":", COLORS["ring"]),
        "torchft, DiLoCo": (":", COLORS["bare sockets"]),
    }
    for panel, (rate, runs) in zip(panels.flat, record["rates"].items(), strict=True):
        goal = target(runs)
        for run in runs:
            if run["run"] in styles:
                style, color = styles[run["run"]]
                panel.plot(run["ends"], run["losses"], style, color=color, label=run["run"])
        slowest = max(second for run in runs if (second := step_and_target(run, goal)[1]) is not None)
        panel.axhline(goal, color=INK, linewidth=0.6)
        panel.set(
            xlabel="seconds", ylabel="loss on text that nobody trains on", xlim=(0, slowest * 1.15), ylim=(None, 3)
        )
        panel.set_title(f"two hosts at {rate.replace('gbit', ' Gbit/s').replace('mbit', ' Mbit/s')}", fontsize=10)
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.25)
    panels[0][0].legend(fontsize=8, frameon=False)
    save(figure, "time_to_loss", record["machine"])


def survive() -> None:
    """What `python examples/survive.py` prints from its first rank on, in lines that a phone shows as a whole."""
    kept = (RESULTS / "survive.txt").read_text().rstrip().splitlines()
    colors = ["#f2a541" if "died;" in line else "#7bd389" if "validation" in line else "#d8dee9" for line in kept]
    wrapped = [textwrap.wrap(line, 62, subsequent_indent="    ") for line in kept]
    lines = [(part, color) for parts, color in zip(wrapped, colors, strict=True) for part in parts]
    wide, high = 0.083 * max(len(line) for line, _ in lines) + 0.4, 0.22 * len(lines) + 0.5
    figure = plt.figure(figsize=(wide, high))
    margin, frame = 0.1 / high, "round,pad=0,rounding_size=0.012"  # the same space above and below any number of lines
    figure.add_artist(
        matplotlib.patches.FancyBboxPatch(
            (0.012, margin), 0.976, 1 - 2 * margin, frame, facecolor="#1e2530", edgecolor=INK
        )
    )
    for i, (line, color) in enumerate(lines):
        figure.text(
            0.2 / wide, 1 - (0.36 + 0.22 * i) / high, line, family="monospace", fontsize=9.8, color=color, va="center"
        )
    save(figure, "survive")


if __name__ == "__main__":
    os.environ["SOURCE_DATE_EPOCH"] = "0"  # no date in files: the same results give the same file
    matplotlib.rcParams.update(STYLE)
    PICTURES.mkdir(parents=True, exist_ok=True)
    for draw in (
        steps,
        messages,
        scaling,
        between_hosts,
        many_hosts,
        compression,
        timeline,
        kills,
        time_to_loss,
        survive,
    ):
        draw()
    print(f"wrote {PICTURES}")
    tables.write()
