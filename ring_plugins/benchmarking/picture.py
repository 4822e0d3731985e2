"""A picture of a curve."""

from __future__ import annotations

from pathlib import Path

from ring_plugins.benchmarking.curve import Curve
from ring_plugins.drawing import image

COLOURS = {
    "ring": "#0b6e4f",
    "ring bucket": "#6bbf59",
    "MPI": "#c8553d",
    "gloo": "#f28f3b",
    "plain copy": "#9aa5b1",
    "ring (GPU)": "#1b4965",
    "NCCL (torch)": "#76b900",
}


def draw(curve: Curve, file: Path, note: str = "") -> None:
    """Write time and bus bandwidth by size to an image.

    Args:
        curve: what was measured.
        file: .png, .svg or .pdf.
        note: small print, such as the machine.

    Raises:
        MissingDependency: there is no matplotlib.
    """
    sizes = list(curve.times)
    with image(file, (10, 4), panels=2) as (figure, (left, right)):
        for name in curve.contestants:
            style = {"marker": "o", "ms": 3, "color": COLOURS.get(name), "ls": "--" if name == "plain copy" else "-"}
            left.loglog(sizes, [curve.times[size][name].median * 1e6 for size in sizes], label=name, **style)
            if name != "plain copy":
                right.semilogx(sizes, [curve.busbw(size, name) for size in sizes], **style)
        where = f"{curve.ranks} ranks on {curve.nodes} host{'s' if curve.nodes > 1 else ''}"
        left.set(xlabel="bytes", ylabel="µs", title=f"all-reduce of float32, {where}")
        right.set(xlabel="bytes", ylabel="busbw, GB/s", title="bus bandwidth")
        left.legend(fontsize=8, frameon=False)
        figure.supxlabel(note, fontsize=7)
