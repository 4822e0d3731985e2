"""MPI: the library that mpi4py finds, the mpirun that would start ranks, and whether the two belong together."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ring_plugins.core.base.errors import LaunchError
from ring_plugins.core.base.install import pip_command
from ring_plugins.core.base.own_python import own_python
from ring_plugins.doctor.findings import Finding, error, fine, warning
from ring_plugins.doctor.installation import installed
from ring_plugins.launcher import mpirun

_ADD = pip_command("mpi")
_SECONDS = 30

# Runs in a separate process, where a libmpi that prints or cannot be loaded does no harm.
_PROBE = """
import json, mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
maps = open("/proc/self/maps").read().split("\\n")
files = sorted({line[line.index("/"):] for line in maps if "/libmpi" in line})
print("\\n" + json.dumps([MPI.Get_library_version(), files]))
"""


class Library(NamedTuple):
    """An MPI library: "Open MPI", "MPICH", "Intel MPI", "MVAPICH" or the start of its version text, and its version."""

    name: str
    version: str

    def __str__(self) -> str:
        return f"{self.name} {self.version}".strip()


def recognize_library(text: str) -> Library:
    """Recognize the library whose MPI_Get_library_version returns `text`."""
    for name, pattern in (
        ("Intel MPI", r"Intel\(R\) MPI Library.*?(\d{4}[.\d]*)"),
        ("Open MPI", r"Open MPI\s*v?([\d.]+)"),
        ("MVAPICH", r"MVAPICH2? Version\s*:?\s*([\d.]+)"),
        ("MPICH", r"MPICH Version\s*:?\s*([\d.]+)"),
    ):
        match = re.search(pattern, text, re.DOTALL)
        if match:
            return Library(name, match[1].rstrip("."))
    return Library(text.strip().splitlines()[0][:60] if text.strip() else "unknown", "")


def mpi() -> Iterator[Finding]:
    """Check mpi4py, the library it finds, and mpirun."""
    library = None
    if installed("mpi4py") is None:
        yield fine(
            "MPI", "mpi4py is not installed; jobs on one host and under torchrun do not need it", f"{_ADD} adds MPI."
        )
    else:
        probe = subprocess.run(own_python(_PROBE), capture_output=True, text=True, timeout=_SECONDS, check=False)
        if probe.returncode:
            reason = next((line for line in reversed(probe.stderr.splitlines()) if line.strip()), "no reason given")
            yield error(
                "MPI", f"mpi4py finds no MPI library: {reason[:200]}", f"Load your site's MPI module, or {_ADD}."
            )
        else:
            text, files = json.loads(probe.stdout.splitlines()[-1])
            library = recognize_library(text)
            yield fine("MPI", f"mpi4py uses {library}: {', '.join(files)}", library=str(library), files=files)
    try:
        found = mpirun.find()
    except LaunchError as problem:
        yield warning("mpirun", str(problem), f"Use the mpirun that came with {library or 'your MPI'}, or {_ADD}.")
        return
    if found is not None:
        yield from _check_mpirun(found, library)
    elif library is not None:
        yield warning(
            "mpirun",
            "there is an MPI library but no mpirun, neither beside this Python nor on PATH",
            f"{_ADD}, or load your site's MPI module.",
        )


def _check_mpirun(found: mpirun.Mpirun, library: Library | None) -> Iterator[Finding]:
    name = f"{_family(found)} {found.version}"
    yield fine("mpirun", f"{found.path} is {name}", path=found.path, version=name)
    if library is not None and (problem := mismatch(found, library)):
        yield error(
            "mpirun",
            f"{found.path} is {name}, but mpi4py uses {library}: {problem}",
            f"Use the mpirun that came with {library}, or build mpi4py for {name}: "
            "pip install --force-reinstall --no-binary mpi4py mpi4py",
            mpirun=name,
            library=str(library),
        )
    first = shutil.which("mpirun")
    if first is not None and os.path.realpath(first) != os.path.realpath(found.path):
        yield warning(
            "mpirun",
            f"`mpirun` in this shell is {first}, not {found.path}, which belongs to this Python",
            f"Type {found.path}, or put {Path(found.path).parent} first in PATH.",
        )
    allowed = all(os.environ.get(f"OMPI_ALLOW_RUN_AS_ROOT{end}") for end in ("", "_CONFIRM"))
    if _family(found) == "Open MPI" and os.geteuid() == 0 and not allowed:
        yield fine(
            "mpirun",
            "you are root, and Open MPI's mpirun refuses to run as root by default",
            "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
        )


def mismatch(found: mpirun.Mpirun, library: Library) -> str:
    """The reason why an mpirun cannot start ranks that use this library; "" if it can."""
    related = {"MPICH", "Intel MPI", "MVAPICH"}  # they share one start-up protocol (PMI)
    family = _family(found)
    if family != library.name and not {family, library.name} <= related:
        return "each rank would find itself the only one of its job"
    major, library_major = found.version.partition(".")[0], library.version.partition(".")[0]
    if family == "Open MPI" and major != library_major:
        return "their major versions differ, and ranks may not find each other"
    return ""


def _family(found: mpirun.Mpirun) -> str:
    return found.flavor.removesuffix(" 4").removesuffix(" 5")
