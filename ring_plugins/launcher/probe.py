"""What a host says about itself: sent to its Python over standard input, so it needs nothing but that.

`python - JSON` prints a line that begins with `ring probe:` and goes on as JSON. The argument's keys: `packages`, whose
versions to tell; `paths`, which ought to exist; `program`, a file whose contents ought to be the same everywhere;
`listener`, an address and port that ought to be reachable, or null.
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
    """Of those packages that are installed."""
    found = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def own_package() -> tuple[str | None, str, int]:
    """Version of the package as it is imported, which is not always as it was installed, or what keeps it from that.

    And the number of cores, which it counts.
    """
    try:
        import ring_plugins
        from ring_plugins.core.linux.process import cores
    except Exception as error:
        return None, f"{type(error).__name__}: {error}", 0
    return ring_plugins.__version__, "", cores()


def digest(path: str | None) -> str | None:
    """Of what a file holds, None where there is none."""
    if path is None or not os.path.isfile(path):
        return None
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


def reaches(listener: list[str] | None) -> bool:
    """Whether somebody can be connected to, at an address and port."""
    if listener is None:
        return True
    try:
        with socket.create_connection((listener[0], int(listener[1])), timeout=4):
            return True
    except OSError:
        return False


def main() -> None:
    """Answer the question in the first argument."""
    wanted = json.loads(sys.argv[1])
    version, trouble, cores = own_package()
    report = {
        "name": socket.gethostname(),
        "python": platform.python_version(),
        "cores": cores,
        "ring_plugins": version,
        "trouble": trouble,
        "packages": versions(wanted["packages"]),
        "missing": [path for path in wanted["paths"] if not os.path.exists(path)],
        "program": digest(wanted["program"]),
        "reaches": reaches(wanted["listener"]),
    }
    print("ring probe:", json.dumps(report))


main()
