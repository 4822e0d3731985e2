"""Examine what is installed and set: versions of packages, outdated ones, and RING_* environment variables."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterator, Mapping, Sequence

from packaging.requirements import Requirement

from ring_plugins.core.base import config
from ring_plugins.core.base.install import pip_command
from ring_plugins.doctor.findings import Finding, error, fine, warning

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
