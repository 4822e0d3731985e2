"""Plots of measured curves and predicted efficiencies; only this file needs matplotlib."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ring_plugins.benchmarking import Curve
from ring_plugins.core.base.errors import MissingDependency
from ring_plugins.planning.simulation import Prediction

COLORS = {
    "ring": "#0b6e4f",
    "ring bucket": "#6bbf59",
    "MPI": "#c8553d",
    "gloo": "#f28f3b",
    "plain copy": "#9aa5b1",
    "ring (GPU)": "#1b4965",
    "NCCL (torch)": "#76b900",
}


def draw_curve(curve: Curve, file: Path) -> None:
    """Plot time and bus bandwidth by message size.

    Args:
        curve: the measurement.
        file: .png, .svg or .pdf.

    Raises:
        MissingDependency: matplotlib is not installed.
    """
    sizes = list(curve.times)
    with _figure(file, (10, 4), panels=2) as (left, right):
        for name in curve.backends:
            style = {"marker": "o", "ms": 3, "color": COLORS.get(name), "ls": "--" if name == "plain copy" else "-"}
            left.loglog(sizes, [curve.times[size][name].median * 1e6 for size in sizes], label=name, **style)
            if name != "plain copy":
                right.semilogx(sizes, [curve.busbw(size, name) for size in sizes], **style)
        left.set(xlabel="bytes", ylabel="µs", title=f"all-reduce of float32, {curve.job}")
        right.set(xlabel="bytes", ylabel="busbw, GB/s", title="bus bandwidth")
        left.legend(fontsize=8, frameon=False)


def draw_scaling(series: Mapping[str, Sequence[Prediction]], title: str, file: Path) -> None:
    """Plot predicted efficiency by number of ranks.

    Args:
        series: name -> predictions.
        title: title of the plot.
        file: .png, .svg or .pdf.

    Raises:
        MissingDependency: matplotlib is not installed.
    """
    with _figure(file, (7, 4)) as (panel,):
        for name, predictions in series.items():
            ranks = [one.ranks for one in predictions]
            panel.semilogx(ranks, [100 * one.efficiency for one in predictions], marker="o", ms=3, base=2, label=name)
        panel.axhline(90, color="#9aa5b1", lw=0.8, ls="--")
        panel.set(xlabel="ranks", ylabel="efficiency, %", title=title, ylim=(0, 102))
        panel.xaxis.set_major_formatter("{x:g}")
        panel.legend(fontsize=8, frameon=False)


@contextlib.contextmanager
def _figure(file: Path, size: tuple[float, float], panels: int = 1) -> Iterator[list[Any]]:
    """Yield panels side by side, `size` inches in all; save them to `file` at 150 dpi when the block ends."""
    try:
        import matplotlib
    except ImportError as error:
        raise MissingDependency(
            f"drawing needs matplotlib, which cannot be imported ({error}): pip install matplotlib"
        ) from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, panels, figsize=size, layout="constrained", squeeze=False)
    try:
        yield list(axes[0])
        for panel in axes[0]:
            panel.spines[["top", "right"]].set_visible(False)
            panel.grid(alpha=0.25)
        figure.savefig(file, dpi=150)
    finally:
        plt.close(figure)
