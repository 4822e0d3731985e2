"""Reports on a host for `preflight`, which sends this file to the host's Python over standard input.

It therefore imports the standard library only, and ring_plugins where that can be imported. `main(JSON)`, a line that
`preflight` adds, prints one line, `ring probe: ` and a JSON object. The argument's keys:

    packages: names of packages whose versions to report
    paths: files and directories that ought to exist
    program: a file whose contents ought to be the same on all hosts, or null
    listener: address and port that ought to accept a connection, and the secret to prove there; or null
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import socket
from typing import Any


def digest(path: str | None) -> str | None:
    """SHA-256 of a file, None if there is no such file."""
    if path is None or not os.path.isfile(path):
        return None
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


def reaches(listener: list[str] | None) -> bool:
    """Whether the launcher answers at the address and port; True if there is none to try."""
    if listener is None:
        return True
    address, port, secret = listener
    try:
        try:
            from ring_plugins.core.net.auth import Claim, Purpose
            from ring_plugins.core.net.frames import reach
        except Exception:  # no ring_plugins here, or another release, which the report says
            with socket.create_connection((address, int(port)), timeout=4):
                return True
        reach(lambda: [(address, int(port))], secret.encode(), Purpose.PROBE, Claim(0), 4.0).close()
    except Exception:  # of another release's code, too: whatever it is, this host cannot reach that one
        return False
    return True


def report(question: dict[str, Any]) -> dict[str, Any]:
    """The report that a question asks for; JSON can hold it."""
    packages, cores, trouble = dict[str, str](), 0, ""
    for name in question["packages"]:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            packages[name] = importlib.metadata.version(name)
    try:
        import ring_plugins
        from ring_plugins.core.linux.process import cores as own_cores

        # The imported version counts: with PYTHONPATH it may differ from the installed one.
        version, cores = ring_plugins.__version__, own_cores()
    except Exception as error:
        version, trouble = None, f"{type(error).__name__}: {error}"
    return {
        "name": socket.gethostname(),
        "python": platform.python_version(),
        "cores": cores,
        "ring_plugins": version,
        "trouble": trouble,
        "packages": packages,
        "missing": [path for path in question["paths"] if not os.path.exists(path)],
        "program": digest(question["program"]),
        "reaches": reaches(question["listener"]),
    }


def main(asked: str) -> None:
    """Print the report that a question in JSON asks for."""
    print("ring probe:", json.dumps(report(json.loads(asked))))
