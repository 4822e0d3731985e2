"""What to type to add an optional package: the one place that all texts take the command from."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

from ring_plugins.core.base.errors import MissingDependency

#: The directory that the package lies in, which is a clone if a pyproject.toml lies there too.
_ROOT = Path(__file__).parents[3]


def pip_command(*extras: str) -> str:
    """The pip command that adds extras of this package.

    It works wherever the installed copy came from: pip finds ring_plugins installed, and adds what its extras name. A
    clone that is only on PYTHONPATH is not installed, so pip gets its path instead.

    Args:
        extras: names of extras in pyproject.toml.
    """
    wanted = f"[{','.join(extras)}]"
    try:
        importlib.metadata.version("ring_plugins")
    except importlib.metadata.PackageNotFoundError:
        if (_ROOT / "pyproject.toml").exists():
            return f'pip install "{_ROOT}{wanted}"'
    return f'pip install "ring_plugins{wanted}"'


def missing(needs: str, what: str, error: ImportError | None, *extras: str) -> MissingDependency:
    """The error for an import of ours that needs a package which is not installed.

    Args:
        needs: the module of this package that was imported.
        what: what it needs, as its users call it.
        error: of the import that failed; None if the package was not even found.
        extras: those that add it.
    """
    why = f"which cannot be imported ({error})" if error is not None else "which is not installed"
    return MissingDependency(f"{needs} needs {what}, {why}. Add it with: {pip_command(*extras)}")


def is_installed(module: str) -> bool:
    """Whether a top-level module can be found, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
