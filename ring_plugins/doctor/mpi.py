"""Which MPI there is, and whether the launcher and the library belong together."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ring_plugins.doctor.findings import Finding, error, fine, warning
from ring_plugins.doctor.packages import installed, number

_ADD = 'pip install "ring_plugins[mpi]"'
_SECONDS = 30

# In a process of its own: a libmpi that cannot be loaded, or that prints, harms nobody there.
_PROBE = """
import json, mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
maps = open("/proc/self/maps").read().split("\\n")
files = sorted({line[line.index("/"):] for line in maps if "/libmpi" in line})
print("\\n" + json.dumps([MPI.Get_library_version(), files]))
"""


class Flavour(NamedTuple):
    """An MPI: "Open MPI", "MPICH" or "Intel MPI", or as much of its own words as there is, and its version."""

    name: str
    version: str

    def __str__(self) -> str:
        return f"{self.name} {self.version}".strip()


def flavour(said: str) -> Flavour:
    """What a library's version text or a launcher's `--version` says it is."""
    for name, pattern in (
        ("Intel MPI", r"Intel\(R\) MPI Library.*?(\d{4}[.\d]*)"),
        ("Open MPI", r"(?:Open MPI\)?|OpenRTE\)?)\s*v?([\d.]+)"),
        ("Open MPI", r"(?:PRRTE|prte)\D*([\d.]+)"),
        ("MVAPICH", r"MVAPICH2? Version\s*:?\s*([\d.]+)"),
        ("MPICH", r"(?:MPICH Version|HYDRA build details.*?Version)\s*:?\s*([\d.]+)"),
    ):
        match = re.search(pattern, said, re.DOTALL)
        if match:
            return Flavour(name, match[1].rstrip("."))
    return Flavour(said.strip().splitlines()[0][:60] if said.strip() else "unknown", "")


def launcher() -> str | None:
    """The mpirun that belongs to this Python's environment, else the first on PATH."""
    beside = Path(sys.executable).parent / "mpirun"
    return str(beside) if beside.exists() else shutil.which("mpirun") or shutil.which("mpiexec")


def mpi() -> Iterator[Finding]:
    """mpi4py, the library it finds, and mpirun."""
    library = None
    if installed("mpi4py") is None:
        yield fine("MPI", "mpi4py is not installed; a single host and torchrun do without", f"{_ADD} adds MPI.")
    else:
        probe = subprocess.run(
            [sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=_SECONDS, check=False
        )
        if probe.returncode:
            said = next((line for line in reversed(probe.stderr.splitlines()) if line.strip()), "no word why")
            yield error("MPI", f"mpi4py finds no MPI library: {said[:200]}", f"Load your site's MPI module, or {_ADD}.")
        else:
            text, files = json.loads(probe.stdout.splitlines()[-1])
            library = flavour(text)
            yield fine("MPI", f"mpi4py uses {library}: {', '.join(files)}", library=str(library), files=files)
    yield from _launcher(library)


def _launcher(library: Flavour | None) -> Iterator[Finding]:
    path = launcher()
    if path is None:
        if library is not None:
            yield warning(
                "mpirun", "there is an MPI library but no mpirun beside this Python or on PATH", f"{_ADD}, or load "
                "your site's MPI module.",
            )  # fmt: skip
        return
    done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=_SECONDS, check=False)
    mine = flavour(done.stdout + done.stderr)
    yield fine("mpirun", f"{path} is {mine}", path=path, version=str(mine))
    if library is not None and (problem := difference(mine, library)):
        yield error(
            "mpirun",
            f"{path} is {mine}, but mpi4py uses {library}: {problem}",
            f"Use the mpirun that came with {library}, or install mpi4py for {mine}: "
            "pip install --force-reinstall --no-binary mpi4py mpi4py",
            mpirun=str(mine),
            library=str(library),
        )
    first = shutil.which("mpirun")
    if first is not None and os.path.realpath(first) != os.path.realpath(path):
        yield warning(
            "mpirun",
            f"`mpirun` in this shell is {first}, not {path}, which belongs to this Python",
            f"Type {path}, or put {Path(path).parent} first in PATH.",
        )
    allowed = all(os.environ.get(f"OMPI_ALLOW_RUN_AS_ROOT{end}") for end in ("", "_CONFIRM"))
    if mine.name == "Open MPI" and hasattr(os, "geteuid") and os.geteuid() == 0 and not allowed:
        yield fine(
            "mpirun",
            "this is root, for whom Open MPI's mpirun does nothing until told",
            "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
        )


def difference(mpirun: Flavour, library: Flavour) -> str:
    """Why a launcher cannot start ranks that use this library; "" if it can."""
    related = {"MPICH", "Intel MPI", "MVAPICH"}  # they speak one start-up protocol
    if mpirun.name != library.name and not {mpirun.name, library.name} <= related:
        return "each rank would believe that it is alone"
    if mpirun.name == library.name == "Open MPI" and number(mpirun.version)[:1] != number(library.version)[:1]:
        return "their major versions differ, and ranks may not find each other"
    return ""
