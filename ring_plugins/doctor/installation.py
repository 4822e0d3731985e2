"""What is installed and set: versions of packages, RING_* variables, and MPI's library and mpirun, which must match."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import LaunchError
from ring_plugins.core.base.install import own_python, pip_command
from ring_plugins.doctor.findings import Finding, error, fine, warning
from ring_plugins.launcher import mpirun

#: Package -> the extra of ring_plugins that installs it.
EXTRAS = {
    "numpy": "",
    "torch": "torch",
    "lightning": "lightning",
    "keras": "keras",
    "tensorflow": "tensorflow",
    "jax": "jax",
    "mpi4py": "mpi",
    "nvidia-nccl-cu12": "nccl",
}
#: Packages that replace one of the above.
_INSTEAD = {
    "lightning": ("pytorch-lightning",),
    "nvidia-nccl-cu12": ("nvidia-nccl-cu13",),
    "tensorflow": ("tensorflow-cpu",),
}
_PAGE = "docs/environment.md lists all variables."
#: Variables of other libraries, shown because they change the behavior of a job.
_OTHERS = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME")
_PREFIXES = ("NCCL_", "OMPI_MCA_btl", "OMPI_MCA_pml", "OMPI_MCA_mtl", "UCX_", "FI_")
_KNOWN = {**config.ALL, **{variable.older: variable for variable in config.ALL.values() if variable.older}}
#: Never shown: the secret, and variables that our launchers set for the processes that they start.
_HIDDEN = {config.SECRET.name} | {variable.name for variable in config.ALL.values() if variable.is_internal}


def installed(name: str) -> str | None:
    """The version of a package, or None if it is not installed. Imports nothing."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    """Versions of Python, ring_plugins and the packages it works with; None where not installed."""
    found: dict[str, str | None] = {"python": platform.python_version(), "ring_plugins": installed("ring_plugins")}
    for name in EXTRAS:
        candidates = [name, *_INSTEAD.get(name, ())]
        found[name] = next((version for one in candidates if (version := installed(one))), None)
    return found


def packages() -> Iterator[Finding]:
    """List versions, outdated packages, and optional ones that are missing."""
    found = versions()
    present = {name: version for name, version in found.items() if version}
    yield fine("packages", ", ".join(f"{name} {version}" for name, version in present.items()), versions=found)
    if found["ring_plugins"] is None:
        yield warning(
            "packages",
            "ring_plugins is on the path, but not installed",
            "Run `pip install .` in its directory, on every host.",
        )
    else:
        yield from unmet(present, importlib.metadata.requires("ring_plugins") or [])
    missing = [name for name, version in found.items() if version is None and EXTRAS.get(name)]
    if missing:
        yield fine(
            "packages",
            f"not installed, and needed only if you use them: {', '.join(missing)}",
            f"{pip_command(*(EXTRAS[name] for name in missing))} adds all of them; pick what you need.",
            missing=missing,
        )


def unmet(present: Mapping[str, str], requirements: Sequence[str]) -> Iterator[Finding]:
    """Find packages that are installed in a version which ring_plugins does not support.

    Args:
        present: package -> version.
        requirements: of ring_plugins and all its extras, as in its metadata: `"torch>=2.4; extra == 'torch'"`.
    """
    for requirement in map(Requirement, requirements):
        version = present.get(requirement.name)
        if version is not None and not requirement.specifier.contains(version, prereleases=True):
            yield warning(
                "packages",
                f"{requirement.name} is {version}, but ring_plugins needs {requirement.name}{requirement.specifier}",
                f'pip install "{requirement.name}{requirement.specifier}"',
            )


def shown(environment: Mapping[str, str]) -> dict[str, str]:
    """The RING_* variables of an environment, without the secret and internal ones."""
    return {name: value for name, value in environment.items() if name.startswith("RING_") and name not in _HIDDEN}


def settings(environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Check the variables of an environment, by default of this process's."""
    ours = shown(environment)
    unknown = config.unknown(ours)
    for name, value in ours.items():
        if name in unknown:
            guess = f"Did you mean {unknown[name]}? " if unknown[name] else ""
            yield warning("settings", f"{name}={value} is not a variable that ring_plugins reads", guess + _PAGE)
            continue
        variable = _KNOWN[name]
        if problem := variable.problem({name: value}):
            yield error("settings", f"{name}={value!r} is {problem}", f"Correct it or unset it. {_PAGE}")
        elif name == variable.older:
            yield fine("settings", f"{name} is now called {variable.name}", "The old name still works.")
    others = {name: v for name, v in environment.items() if name in _OTHERS or name.startswith(_PREFIXES)}
    everything = dict(sorted({**ours, **others}.items()))
    listed = ", ".join(f"{name}={value}" for name, value in everything.items())
    yield fine("settings", listed or "no variables are set, and none are needed", variables=everything)


# MPI ----------------------------------------------------------------------------------------------

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
