"""How this package is installed: what to type to add an optional package, and how to start Python for its own code.

All texts take the command for a package from `pip_command`.

`python -c`, `python -m` and `python -` search the current directory first. It may be one that others can write, such as
/tmp or a directory of shared data, and a json.py that somebody has left there would run as the user. So `own_python`
starts Python without the current directory in the module search path. Python 3.11 has an option for that, -P. Before,
the code can only remove the entry ahead of its first import. That alone would be too late for Python 3.13, which
imports linecache for `-c` before the code begins. PYTHONPATH counts as ever: its entries are the user's choice, and the
package may have been found there.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
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


#: The first statements of the package's own code in a new Python: they remove the current directory.
FIRST = "import sys; sys.path[:] = filter(None, sys.path)"
#: What starts the `ring` command.
RING = "import ring_plugins.__main__"
_OPTIONS = ("-P",) if sys.version_info >= (3, 11) else ()
_VARIABLE = "PYTHONSAFEPATH"
#: Where this package was found.
_PARENT = str(Path(__file__).parents[3])


def search_path() -> list[str]:
    """`sys.path` without the current directory, where this package is found first from the same place as here."""
    path = [entry for entry in sys.path if entry]
    return path if _PARENT in path else [_PARENT, *path]


def own_python(code: str) -> list[str]:
    """The command that runs code in this Python, with this same package.

    Args:
        code: in one line; `sys` is imported.
    """
    same = f"sys.path[:0] = {{{_PARENT!r}}}.difference(sys.path)"
    return [sys.executable, *_OPTIONS, "-c", f"{FIRST}; {same}; {code}"]


def own_python_elsewhere(python: str, code: str) -> list[str]:
    """The same for a Python of another host, whose version may be another: words that env(1) takes.

    Args:
        python: its path there.
        code: as for `own_python`.
    """
    return [f"{_VARIABLE}=1", python, "-c", f"{FIRST}; import os; os.environ.pop({_VARIABLE!r}, None); {code}"]
