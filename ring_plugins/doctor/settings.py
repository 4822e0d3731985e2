"""RING_* environment variables: known ones, and whether their values can be used."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterator, Mapping

from ring_plugins.doctor.findings import Finding, error, fine, warning

_PAGE = "docs/environment.md lists them all."
#: Set by launchers for the processes that they start, and nobody else's business.
_INTERNAL = {"RING_DRIVER", "RING_SPAWNED", "RING_SECRET"}
#: Of other libraries, shown because they change what happens.
_OTHERS = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME")
_PREFIXES = ("NCCL_", "OMPI_MCA_btl", "OMPI_MCA_pml", "OMPI_MCA_mtl", "UCX_", "FI_")


def _seconds(text: str) -> str:
    try:
        return "" if float(text) > 0 else "not a positive number of seconds"
    except ValueError:
        return "not a number of seconds"


def _switch(text: str) -> str:
    return "" if text in ("0", "1") else "neither 0 nor 1"


def _whole(text: str) -> str:
    return "" if text.isdigit() else "not a whole number"


def _one_of(*choices: str) -> Callable[[str], str]:
    return lambda text: "" if text in choices else f"not one of {', '.join(choices)}"


def _file(text: str) -> str:
    return "" if os.path.exists(text) else "no such file"


def _nodes(text: str) -> str:
    return "" if all(part.isdigit() and int(part) for part in text.split(",")) else "not positive numbers with commas"


def _any(text: str) -> str:
    return ""


#: Variable to what is wrong with a value, "" if nothing is.
KNOWN: dict[str, Callable[[str], str]] = {
    "RING_TIMEOUT": _seconds,
    "RING_START_TIMEOUT": _seconds,
    "RING_NETWORK_TIMEOUT": _seconds,
    "RING_LAUNCHER": _one_of("mpi", "rendezvous", "slurm", "grown", "alone"),
    "RING_SHARED_MEMORY": _switch,
    "RING_VIRTUAL_NODES": _nodes,
    "RING_AUTOTUNE": _switch,
    "RING_STALL_WARNING": _seconds,
    "RING_STALL_ABORT": _seconds,
    "RING_INTERFACE": _any,
    "RING_PLANE": _one_of("tcp", "mpi"),
    "RING_NCCL_LIBRARY": _file,
    "RING_SHARE_GPU": _switch,
    "RING_TENSORFLOW_NCCL": _switch,
    "RING_TIMELINE": _any,
    "RING_DRIFT_CHECK": _whole,
    "RING_SECRET": _any,
}


def readable(environment: Mapping[str, str]) -> dict[str, str]:
    """The RING_* variables of an environment that may be shown."""
    return {name: value for name, value in environment.items() if name.startswith("RING_") and name not in _INTERNAL}


def settings() -> Iterator[Finding]:
    """Misspelt names and values that cannot be used, before a job stumbles over them."""
    yield from examine(os.environ)


def examine(environment: Mapping[str, str]) -> Iterator[Finding]:
    """The same for any environment."""
    ours = readable(environment)
    shown = {n: v for n, v in environment.items() if n in _OTHERS or n.startswith(_PREFIXES)}
    for name, value in ours.items():
        if name not in KNOWN:
            close = difflib.get_close_matches(name, KNOWN, 1)
            guess = f"Did you mean {close[0]}? " if close else ""
            yield warning("settings", f"{name}={value} is not a variable that ring_plugins reads", guess + _PAGE)
        elif value and (problem := KNOWN[name](value)):
            yield error("settings", f"{name}={value!r} is {problem}", f"Correct it or unset it. {_PAGE}")
    said = ", ".join(f"{name}={value}" for name, value in sorted({**ours, **shown}.items()))
    yield fine("settings", said or "no variable is set; none needs to be", variables={**ours, **shown})
