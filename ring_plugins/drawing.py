"""Image files with panels that look alike; matplotlib is needed here only."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ring_plugins.core.base.errors import MissingDependency


@contextlib.contextmanager
def image(file: Path, size: tuple[float, float], panels: int = 1) -> Iterator[tuple[Any, list[Any]]]:
    """A matplotlib figure and its panels, side by side; written and closed where the block ends.

    Args:
        file: .png, .svg or .pdf.
        size: width and height in inches, at 150 dots each.
        panels: how many.

    Raises:
        MissingDependency: there is no matplotlib.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise MissingDependency(
            f"drawing needs matplotlib, which is missing ({error}): pip install matplotlib"
        ) from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, panels, figsize=size, layout="constrained", squeeze=False)
    try:
        yield figure, list(axes[0])
        for panel in axes[0]:
            panel.spines[["top", "right"]].set_visible(False)
            panel.grid(alpha=0.25)
        figure.savefig(file, dpi=150)
    finally:
        plt.close(figure)
