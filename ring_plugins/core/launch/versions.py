"""What must be the same in every rank's installation, or ranks would misunderstand each other later."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib import metadata

import numpy as np


def own_versions() -> dict[str, str]:
    """Of this process: ring_plugins exactly, Python and numpy as far as their pickles go."""
    try:
        package = metadata.version("ring_plugins")
    except metadata.PackageNotFoundError:  # run from a checkout
        package = "unknown"
    python = ".".join(platform.python_version_tuple()[:2])
    return {"ring_plugins": package, "Python": python, "numpy": np.__version__.partition(".")[0]}


def differences(ranks: Mapping[int, tuple[str, Mapping[str, str]]]) -> str:
    """A sentence about ranks whose versions differ from the first's, "" if none does.

    Args:
        ranks: rank -> (host, versions).
    """
    first, (first_host, expected) = next(iter(ranks.items()))
    said = []
    for name in expected:
        others: dict[str, list[str]] = {}
        for rank, (host, versions) in ranks.items():
            if versions.get(name) != expected[name]:
                others.setdefault(str(versions.get(name)), []).append(f"rank {rank} on {host}")
        for version, who in others.items():
            listed = ", ".join(who[:8]) + (f" and {len(who) - 8} more" if len(who) > 8 else "")
            said.append(f"{name} is {expected[name]} on rank {first} on {first_host}, but {version} on {listed}")
    if not said:
        return ""
    return f"the ranks' installations differ: {'; '.join(said)}. Install the same environment on every host."
