"""Imports torch without its compiler, which takes half of the time in which a process starts.

Any optimizer of torch's imports it, and so does `ring_plugins.torch`, see compiled.py there. A campaign of a thousand
processes that compile nothing has stand-ins for it, and for what torch knows of tensors without memory.
"""

import sys
from types import ModuleType
from typing import Any


def import_torch() -> None:
    """Import torch; nothing must have done so."""
    stand_ins: dict[str, Any] = {name: ModuleType(name) for name in ("torch._meta_registrations", "torch._dynamo")}
    stand_ins["torch._dynamo.trace_rules"] = rules = ModuleType("torch._dynamo.trace_rules")
    sys.modules.update(stand_ins)
    import torch

    compiler: Any = stand_ins["torch._dynamo"]
    compiler.__path__ = []
    compiler.disable = lambda function, *_, **__: function
    compiler.graph_break = lambda *_, **__: None
    compiler.trace_rules = rules
    rules.add = lambda _: None  # type: ignore[attr-defined]
    torch._dynamo = compiler
