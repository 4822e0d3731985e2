"""Plot the results of the other benchmarks for the documentation.

python benchmarks/plot.py            # reads benchmarks/results, writes docs/pictures
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from between_hosts import limit
from measure import RESULTS

from ring_plugins.drawing import COLORS, draw_scaling
from ring_plugins.planning import counts, parse, predict, reference

PICTURES = Path(__file__).parent.parent / "docs" / "pictures"
LABELS = {
    "ring": "ring_plugins, ordinary memory",
    "ring bucket": "ring_plugins, shared bucket",
    "MPI": "MPI Allreduce (Open MPI)",
    "gloo": "torch gloo",
    "plain copy": "plain copy of the same bytes",
    "ring over MPI": "ring_plugins over MPI",
    "bare sockets": "bare sockets, the same bytes",
}
COLORS = COLORS | {"ring over MPI": "#7a5195", "bare sockets": "#222222"}
STEP_COLORS = {
    "ring_plugins": COLORS["ring"],
    "DDP (gloo)": COLORS["gloo"],
    "no communication": COLORS["plain copy"],
}


def load(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def steps() -> None:
    """Bar chart: a training step of three models."""
    record = load("training_step")
    models = list(record["seconds"])
    figure, panels = plt.subplots(1, len(models), figsize=(9, 3.4), layout="constrained")
    for panel, model in zip(panels, models, strict=True):
        times = record["seconds"][model]
        for i, (name, t) in enumerate(times.items()):
            low, high = (t["median"] - t["low"]) * 1e3, (t["high"] - t["median"]) * 1e3
            panel.bar(i, t["median"] * 1e3, color=STEP_COLORS[name], yerr=[[low], [high]], ecolor="#333333", capsize=3)
            panel.annotate(
                f"{t['median'] * 1e3:.1f}", (i, t["median"] * 1e3 + high), ha="center", va="bottom", fontsize=9
            )
        panel.set_xticks(range(len(times)), [name.replace(" ", "\n") for name in times], fontsize=8)
        panel.set_title(f"{model} ({SIZES[model]})", fontsize=10)
        panel.set_ylabel("ms per step")
        panel.spines[["top", "right"]].set_visible(False)
        panel.margins(y=0.12)
    figure.suptitle("Training step on two ranks, one thread each: medians and quartiles", fontsize=11)
    figure.supxlabel(record["machine"], fontsize=7)
    figure.savefig(PICTURES / "step_time.png", dpi=150)


SIZES = {"mlp": "67 MB of gradients", "transformer": "19 MB", "cnn": "1.5 MB"}


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
    figure.supxlabel(record["machine"], fontsize=7)
    figure.savefig(PICTURES / "all_reduce.png", dpi=150)


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
    draw_scaling(series, "Predicted: four Pascal GPUs per host, batch 64 per GPU", PICTURES / "plan.png")


def between_hosts() -> None:
    """Line charts, one per network: share of the wire's limit that an all-reduce between hosts reaches."""
    record = load("between_hosts")
    networks = [one for one in record["networks"] if one["rate"] is not None and one["hosts"] in (2, 4)]
    figure, panels = plt.subplots(
        1, len(networks), figsize=(4 * len(networks), 3.6), layout="constrained", squeeze=False
    )
    for panel, one in zip(panels[0], networks, strict=True):
        sizes = [int(size) for size in one["seconds"]]
        for name in next(iter(one["seconds"].values())):
            least = [limit(size, one["hosts"], one["rate"]) for size in sizes]
            took = [one["seconds"][str(size)][name]["median"] for size in sizes]
            share = [100 * best / median for best, median in zip(least, took, strict=True)]
            style = ":" if name == "bare sockets" else "-"
            panel.semilogx(sizes, share, style, marker="o", ms=3, color=COLORS[name], label=LABELS[name])
        panel.set(xlabel="bytes", ylabel="% of the wire's limit", ylim=(0, 100))
        panel.set_title(f"{one['hosts']} hosts, {one['ranks']} ranks, {one['rate']}/s", fontsize=10)
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.25)
    panels[0][0].legend(fontsize=7, frameon=False)
    figure.supxlabel(record["machine"], fontsize=7)
    figure.savefig(PICTURES / "between_hosts.png", dpi=150)


if __name__ == "__main__":
    PICTURES.mkdir(parents=True, exist_ok=True)
    steps()
    messages()
    scaling()
    between_hosts()
    print(f"wrote {PICTURES}")
