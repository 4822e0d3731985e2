"""Calls a function right after the script has imported a package, without importing it."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class ImportWatch(importlib.abc.MetaPathFinder):
    """An entry of `sys.meta_path`.

    Args:
        modules: those that are watched, unless they have been imported already.
        function: called with the name of each once it has been executed.
    """

    def __init__(self, modules: Iterable[str], function: Callable[[str], None]) -> None:
        self._watched = {module for module in modules if module not in sys.modules}
        self._function = function

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._watched:
            return None
        self._watched.discard(fullname)  # the search comes here again
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._watched.add(fullname)  # the caller may only be asking whether the package is installed
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader  # every module has a loader of its own
            execute = loader.exec_module

            def execute_and_call(module: ModuleType) -> None:
                execute(module)
                self._watched.discard(fullname)
                self._function(fullname)

            loader.exec_module = execute_and_call
        return spec


def has_finished(name: str) -> bool:
    """Whether a package is imported completely, not just being imported."""
    module = sys.modules.get(name)
    return module is not None and not getattr(module.__spec__, "_initializing", False)
