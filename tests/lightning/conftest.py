"""Packages that Lightning imports beside torch, and that no test needs, are hidden in what tests launch."""

import pytest


@pytest.fixture(autouse=True)
def _hide_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIDDEN_PACKAGES", "matplotlib scipy transformers")  # see tests/python_path/sitecustomize.py
