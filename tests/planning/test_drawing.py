import sys

import pytest

from ring_plugins.benchmarking import Curve, Times
from ring_plugins.core.base.errors import MissingDependency
from ring_plugins.planning.drawing import draw_curve

TIMES = {"ring": Times(2e-6, 1e-6, 3e-6, 1e-6), "plain copy": Times(1e-6, 1e-6, 1e-6, 1e-6)}


def test_a_curve_is_drawn(tmp_path):
    draw_curve(Curve(2, 1, {64: TIMES, 256: TIMES}), tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_error_has_the_pip_command(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingDependency, match="pip install matplotlib"):
        draw_curve(Curve(2, 1, {64: TIMES}), tmp_path / "curve.png")
