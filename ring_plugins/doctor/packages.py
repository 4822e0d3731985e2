"""Examine installed packages: their versions, outdated ones, and the command that installs or updates them."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterator, Mapping, Sequence

from packaging.requirements import Requirement

from ring_plugins.core.base.install import pip_command
from ring_plugins.doctor.findings import Finding, fine, warning

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
