"""Imports torch without its compiler, which takes half of the time in which a process starts.

Any optimizer of torch's imports it. A campaign of a thousand processes that compile nothing has stand-ins for it, and
for what torch knows of tensors without memory.
"""

import sys
from types import ModuleType
from typing import Any


def import_torch() -> None:
    """Import torch; nothing must have done so."""
    stand_ins: dict[str, Any] = {name: ModuleType(name) for name in ("torch._meta_registrations", "torch._dynamo")}
    sys.modules.update(stand_ins)
    import torch

    compiler: Any = stand_ins["torch._dynamo"]
    compiler.__path__ = []
    compiler.disable = lambda function, *_, **__: function
    compiler.graph_break = lambda *_, **__: None
    torch._dynamo = compiler
