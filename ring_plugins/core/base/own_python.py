"""Starts Python for this package's own code, without the current directory in the module search path.

`python -c`, `python -m` and `python -` search the current directory first. It may be one that others can write, such as
/tmp or a directory of shared data, and a json.py that somebody has left there would run as the user. Python 3.11 has an
option against that, -P. Before, the code can only remove the entry ahead of its first import. That alone would be too
late for Python 3.13, which imports linecache for `-c` before the code begins.

PYTHONPATH counts as ever: its entries are the user's choice, and the package may have been found there.
"""

from __future__ import annotations

import sys
from pathlib import Path

#: The first statements of such code.
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
