"""Keeps `torch.compile` out of this package.

While a compiled function runs, Dynamo looks at every frame of Python below it, and `backward()` calls our hooks below
the script's training step. It would trace collectives as if they were arithmetic: arrays in memory that other
processes write become tensors of a graph, and waiting for the others becomes part of it. It also fails on some of them
(torch 2.13: `np.frombuffer(data)` raises an AssertionError). So all our files are on the list of files that Dynamo runs
as they are, where numpy is too. A function of ours in the middle of a compiled one splits its graph.

torch has a public decorator for functions, `torch.compiler.disable`, which costs 2 µs a call and leaves a door wherever
it is forgotten. For whole packages it has this list only, which is private, in torch 2.4 to 2.13 at least.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from ring_plugins.core.base.log import logger
from ring_plugins.import_watch import ImportWatch, has_finished

_PACKAGE = __name__.partition(".")[0]
#: The part of Dynamo that has the list.
_RULES = "torch._dynamo.trace_rules"


def leave_out_of_compilation() -> None:
    """Let Dynamo run the frames of this package as they are, once something imports Dynamo.

    That import takes a second. The first optimizer of torch's causes it, and many processes have none.
    """
    if has_finished(_RULES):
        _leave_out(_RULES)
    else:
        sys.meta_path.insert(0, ImportWatch([_RULES], _leave_out))


def _leave_out(rules: str) -> None:
    """Put this package on the list in the module of this name, which has been imported."""
    add: Any = getattr(importlib.import_module(rules), "add", None)
    if add is None:
        logger.warning(
            "this release of torch cannot leave a package out of torch.compile. Call nothing of %s inside a "
            "compiled function, and no backward().",
            _PACKAGE,
        )
    else:
        add(_PACKAGE)
