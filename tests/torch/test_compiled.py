"""Dynamo runs the frames of this package as they are, and a release without its list is said to trace them."""

import importlib
import subprocess
import sys
from types import SimpleNamespace

from ring_plugins.torch import compiled

IMPORTS = """
import sys
import ring_plugins.torch

assert "torch._dynamo" not in sys.modules
from torch._dynamo import trace_rules
assert trace_rules.check_file(ring_plugins.torch.__file__).skipped
"""


def test_dynamo_is_not_imported_and_leaves_the_package_out_when_it_is():
    subprocess.run([sys.executable, "-c", IMPORTS], check=True)


def test_dynamo_that_is_imported_already_leaves_the_package_out(monkeypatch):
    rules = importlib.import_module("torch._dynamo.trace_rules")
    added = []
    monkeypatch.setattr(rules, "add", added.append)
    compiled.leave_out_of_compilation()
    assert added == ["ring_plugins"]


def test_a_release_without_the_list_is_warned_of(monkeypatch):
    warnings = []
    importlib.import_module("torch._dynamo.trace_rules")
    monkeypatch.setattr(importlib, "import_module", lambda name: SimpleNamespace())
    monkeypatch.setattr(compiled.logger, "warning", lambda text, *values: warnings.append(text % values))
    compiled.leave_out_of_compilation()
    assert len(warnings) == 1 and "Call nothing of ring_plugins inside a compiled function" in warnings[0]
