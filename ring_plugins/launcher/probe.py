"""Reports on a host for `preflight`, which sends this file to the host's Python over standard input.

It therefore imports the standard library only, and ring_plugins where that can be imported. `python - JSON` prints one
line, `ring probe: ` and a JSON object. The argument's keys:

    packages: names of packages whose versions to report
    paths: files and directories that ought to exist
    program: a file whose contents ought to be the same on all hosts, or null
    listener: address and port that ought to accept a connection, or null
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import socket
import sys


def versions(names: list[str]) -> dict[str, str]:
    """Package name to version, for the packages that are installed."""
    found = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def own_package() -> tuple[str | None, str, int]:
    """Version of ring_plugins, why it cannot be imported, and the number of cores, which ring_plugins counts.

    The imported version counts: with PYTHONPATH it may differ from the installed one.
    """
    try:
        import ring_plugins
        from ring_plugins.core.linux.process import cores
    except Exception as error:
        return None, f"{type(error).__name__}: {error}", 0
    return ring_plugins.__version__, "", cores()


def digest(path: str | None) -> str | None:
    """SHA-256 of a file, None if there is no such file."""
    if path is None or not os.path.isfile(path):
        return None
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


def reaches(listener: list[str] | None) -> bool:
    """Whether the address and port accept a connection; True if there is none to try."""
    if listener is None:
        return True
    try:
        with socket.create_connection((listener[0], int(listener[1])), timeout=4):
            return True
    except OSError:
        return False


def main() -> None:
    """Print the report that the first argument asks for."""
    question = json.loads(sys.argv[1])
    version, trouble, cores = own_package()
    report = {
        "name": socket.gethostname(),
        "python": platform.python_version(),
        "cores": cores,
        "ring_plugins": version,
        "trouble": trouble,
        "packages": versions(question["packages"]),
        "missing": [path for path in question["paths"] if not os.path.exists(path)],
        "program": digest(question["program"]),
        "reaches": reaches(question["listener"]),
    }
    print("ring probe:", json.dumps(report))


main()
