"""Examine RING_* environment variables: misspelled names, and invalid values."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from ring_plugins.core.base import config
from ring_plugins.doctor.findings import Finding, error, fine, warning

_PAGE = "docs/environment.md lists all variables."
#: Variables of other libraries, shown because they change the behavior of a job.
_OTHERS = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME")
_PREFIXES = ("NCCL_", "OMPI_MCA_btl", "OMPI_MCA_pml", "OMPI_MCA_mtl", "UCX_", "FI_")

_KNOWN = {**config.ALL, **{variable.older: variable for variable in config.ALL.values() if variable.older}}
#: Never shown: the secret, and variables that our launchers set for the processes that they start.
_HIDDEN = {config.SECRET.name} | {variable.name for variable in config.ALL.values() if variable.is_internal}


def shown(environment: Mapping[str, str]) -> dict[str, str]:
    """The RING_* variables of an environment, without the secret and internal ones."""
    return {name: value for name, value in environment.items() if name.startswith("RING_") and name not in _HIDDEN}


def settings() -> Iterator[Finding]:
    """Check the environment variables of this process."""
    yield from examine(os.environ)


def examine(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Check the variables of an environment."""
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
