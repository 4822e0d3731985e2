"""Dynamo runs the frames of this package as they are, and a release without its list is said to trace them."""

import importlib
from types import SimpleNamespace

from ring_plugins.torch import compiled


def test_the_package_is_on_the_list_of_what_is_run_as_it_is(monkeypatch):
    added = []
    monkeypatch.setattr(
        importlib, "import_module", {"torch._dynamo.trace_rules": SimpleNamespace(add=added.append)}.get
    )
    compiled.leave_out_of_compilation()
    assert added == ["ring_plugins"]


def test_this_release_of_torch_has_the_list():
    assert callable(importlib.import_module("torch._dynamo.trace_rules").add)


def test_a_release_without_the_list_is_warned_of(monkeypatch):
    warnings = []
    monkeypatch.setattr(importlib, "import_module", lambda name: SimpleNamespace())
    monkeypatch.setattr(compiled.logger, "warning", lambda text, *values: warnings.append(text % values))
    compiled.leave_out_of_compilation()
    assert len(warnings) == 1 and "Call nothing of ring_plugins inside a compiled function" in warnings[0]
