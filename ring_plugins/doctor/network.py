"""Interfaces of this host, and whether its name leads to it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import LaunchError
from ring_plugins.core.linux import interfaces as launch
from ring_plugins.core.net.network_choice import own_interfaces
from ring_plugins.doctor.findings import Finding, error, fine, warning


@dataclass(frozen=True)
class Interface:
    """A network interface that is up.

    Attributes:
        name: as in `ip link`.
        addresses: its IPv4 addresses.
        networks: the networks of those addresses ("10.0.0.0/16").
        megabits: stated speed in Mbit/s; 0 where the driver does not say. Drivers of virtual cards make one up.
        leads_out: whether other hosts may be on it: not loopback, nor a bridge of containers or virtual machines.
    """

    name: str
    addresses: tuple[str, ...]
    networks: tuple[str, ...]
    megabits: int
    leads_out: bool

    def __str__(self) -> str:
        speed = f"{self.megabits / 1000:g} Gbit/s" if self.megabits else "speed not stated"
        return f"{self.name} ({', '.join(self.addresses)}; {speed})"


def interfaces() -> list[Interface]:
    """Those that are up and have an address, best first: those that lead out before others, fast before slow."""
    import psutil

    by_name: dict[str, list[launch.Interface]] = {}
    for one in launch.interfaces():
        by_name.setdefault(one.name, []).append(one)
    states = psutil.net_if_stats()
    found = [
        Interface(
            name,
            tuple(one.address for one in those),
            tuple(one.network for one in those),
            states[name].speed if name in states and states[name].speed < _UNKNOWN else 0,
            not those[0].internal,
        )
        for name, those in by_name.items()
    ]
    return sorted(found, key=lambda one: (not one.leads_out, -one.megabits, one.name))


#: Some drivers say "unknown" as -1, which reads as this.
_UNKNOWN = 1 << 31


def networks() -> Iterator[Finding]:
    """The interfaces, and which of them the data between hosts may take."""
    found = interfaces()
    usable = [one for one in found if one.leads_out]
    evidence: dict[str, Any] = {"interfaces": [asdict(one) for one in found]}
    said = ", ".join(map(str, found))
    wanted = config.INTERFACE.get()
    try:
        own_interfaces(0)
    except LaunchError as problem:
        names = ", ".join(one.name for one in usable) or "none"
        yield error("network", str(problem), f"Choose among {names}, or unset RING_INTERFACE.", **evidence)
        return
    if not usable:
        yield warning("network", f"only {said}: no other host can be reached", "ip link; ip address", **evidence)
    elif wanted:
        yield fine("network", f"{said}; RING_INTERFACE={wanted} decides between hosts", **evidence)
    else:
        names = " or ".join(one.name for one in usable)
        which = names if len(usable) == 1 else f"{names}, the fastest that all hosts are on,"
        yield fine("network", f"{said}; between hosts {which} would be taken", **evidence)


def resolve(name: str) -> list[str]:
    """The IPv4 addresses of a host name, [] where it is not known."""
    try:
        return sorted({str(item[4][0]) for item in socket.getaddrinfo(name, None, socket.AF_INET)})
    except OSError:
        return []


def names() -> Iterator[Finding]:
    """Whether this host's own name leads to an address that others can use."""
    name = socket.gethostname()
    found = resolve(name)
    if not found:
        yield warning(
            "host name",
            f"{name} cannot be resolved, not even here",
            f"Add a line to /etc/hosts on every host: ADDRESS {name}",
        )
    elif all(address.startswith("127.") for address in found):
        yield fine(
            "host name",
            f"{name} is {', '.join(found)} here, which is this host for everyone; a job on several hosts that meets at "
            "this name finds nobody",
            f"For several hosts, put the address of the network into /etc/hosts instead: ADDRESS {name}",
            addresses=found,
        )
    else:
        yield fine("host name", f"{name} is {', '.join(found)}", addresses=found)
