"""Which packages are installed, whether they are new enough, and which command adds those that are not."""

from __future__ import annotations

import importlib.metadata
import platform
import re
from collections.abc import Iterator

from ring_plugins.doctor.findings import Finding, fine, warning

#: Package to the extra of ring_plugins that brings it.
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
_INSTEAD = {
    "lightning": ("pytorch-lightning",),
    "nvidia-nccl-cu12": ("nvidia-nccl-cu13",),
    "tensorflow": ("tensorflow-cpu",),
}


def installed(name: str) -> str | None:
    """The version of a package, None where it is not installed. Imports nothing."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    """Of Python, ring_plugins and everything that it works with."""
    found: dict[str, str | None] = {"python": platform.python_version(), "ring_plugins": installed("ring_plugins")}
    for name in EXTRAS:
        known = [name, *_INSTEAD.get(name, ())]
        found[name] = next((version for one in known if (version := installed(one))), None)
    return found


def packages() -> Iterator[Finding]:
    """Versions, what is too old, and what could be added."""
    found = versions()
    there = {name: version for name, version in found.items() if version}
    yield fine("packages", ", ".join(f"{name} {version}" for name, version in there.items()), versions=found)
    if found["ring_plugins"] is None:
        yield warning(
            "packages",
            "ring_plugins is not installed here, but found on the path",
            "pip install . in its directory, on every host.",
        )
    lowest = minima(importlib.metadata.requires("ring_plugins") or [] if found["ring_plugins"] else [])
    for name, version in there.items():
        if name in lowest and number(version) < number(lowest[name]):
            yield warning(
                "packages", f"{name} {version} is older than {lowest[name]}", f'pip install "{name}>={lowest[name]}"'
            )
    missing = [name for name, version in found.items() if version is None and EXTRAS.get(name)]
    if missing:
        extras = ",".join(EXTRAS[name] for name in missing)
        yield fine(
            "packages",
            f"not installed, needed only by those who use it: {', '.join(missing)}",
            f'pip install "ring_plugins[{extras}]" adds all of it; take from the list what you need.',
            missing=missing,
        )


def minima(requirements: list[str]) -> dict[str, str]:
    """The lowest version of each package in requirements such as `"torch>=2.4; extra == 'torch'"`."""
    found: dict[str, str] = {}
    for requirement in requirements:
        match = re.match(r"([\w.-]+)[^;]*?>=\s*([\d.]+)", requirement)
        if match:
            found[match[1].lower()] = match[2]
    return found


def number(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, to compare by."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()
