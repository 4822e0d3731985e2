"""Efficiency against ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ring_plugins.drawing import image
from ring_plugins.planning.simulation import Prediction


def draw(series: Mapping[str, Sequence[Prediction]], title: str, file: Path) -> None:
    """Write curves of efficiency by ranks to an image.

    Args:
        series: predictions by what they are for.
        title: over the picture.
        file: .png, .svg or .pdf.

    Raises:
        MissingDependency: there is no matplotlib.
    """
    with image(file, (7, 4)) as (_, (panel,)):
        for name, predictions in series.items():
            ranks = [one.ranks for one in predictions]
            panel.semilogx(ranks, [100 * one.efficiency for one in predictions], marker="o", ms=3, base=2, label=name)
        panel.axhline(90, color="#9aa5b1", lw=0.8, ls="--")
        panel.set(xlabel="ranks", ylabel="efficiency, %", title=title, ylim=(0, 102))
        panel.xaxis.set_major_formatter("{x:g}")
        panel.legend(fontsize=8, frameon=False)
