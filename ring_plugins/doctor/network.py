"""Examine the network interfaces of this host, and the address that its own name resolves to."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import LaunchError
from ring_plugins.core.linux import interfaces as linux
from ring_plugins.core.net.network_choice import own_interfaces
from ring_plugins.doctor.findings import Finding, error, fine, warning

#: Some drivers report an unknown speed as -1, which psutil may return as an unsigned number of this size.
_UNKNOWN_SPEED = 1 << 31


@dataclass(frozen=True)
class NetworkInterface:
    """A network interface that is up, with all its addresses.

    Attributes:
        name: name, as in `ip link`.
        addresses: IPv4 addresses.
        networks: the networks of those addresses ("10.0.0.0/16").
        megabits: stated speed in Mbit/s, 0 if the driver states none. The speed of a virtual card is fictitious.
        external: whether other hosts may be on its network: not loopback or a bridge of containers or virtual machines.
    """

    name: str
    addresses: tuple[str, ...]
    networks: tuple[str, ...]
    megabits: int
    external: bool

    def __str__(self) -> str:
        speed = f"{self.megabits / 1000:g} Gbit/s" if self.megabits else "speed not stated"
        return f"{self.name} ({', '.join(self.addresses)}; {speed})"


def network_interfaces() -> list[NetworkInterface]:
    """Interfaces that are up and have an address: external ones first, fast before slow."""
    by_name: dict[str, list[linux.Interface]] = {}
    for one in linux.interfaces():
        by_name.setdefault(one.name, []).append(one)
    states = psutil.net_if_stats()
    found = [
        NetworkInterface(
            name,
            tuple(one.address for one in same_name),
            tuple(one.network for one in same_name),
            states[name].speed if name in states and states[name].speed < _UNKNOWN_SPEED else 0,
            not same_name[0].internal,
        )
        for name, same_name in by_name.items()
    ]
    return sorted(found, key=lambda one: (not one.external, -one.megabits, one.name))


def networks() -> Iterator[Finding]:
    """List the interfaces, and those that data between hosts may take."""
    found = network_interfaces()
    external = [one for one in found if one.external]
    evidence: dict[str, Any] = {"interfaces": [asdict(one) for one in found]}
    listed = ", ".join(map(str, found))
    wanted = config.INTERFACE.get()
    try:
        own_interfaces(0)
    except LaunchError as problem:
        choices = ", ".join(one.name for one in external) or "none"
        yield error("network", str(problem), f"Choose among {choices}, or unset RING_INTERFACE.", **evidence)
        return
    if not external:
        yield warning("network", f"only {listed}: no other host can be reached", "ip link; ip address", **evidence)
    elif wanted:
        yield fine("network", f"{listed}; RING_INTERFACE={wanted} decides which is used between hosts", **evidence)
    else:
        choices = " or ".join(one.name for one in external)
        which = choices if len(external) == 1 else f"{choices}, the fastest that all hosts are on,"
        yield fine("network", f"{listed}; between hosts {which} would be used", **evidence)


def resolve(name: str) -> list[str]:
    """The IPv4 addresses of a host name, [] if it does not resolve."""
    try:
        return sorted({str(item[4][0]) for item in socket.getaddrinfo(name, None, socket.AF_INET)})
    except OSError:
        return []


def host_name() -> Iterator[Finding]:
    """Check that this host's own name resolves to an address that others can use."""
    name = socket.gethostname()
    found = resolve(name)
    if not found:
        yield warning(
            "host name",
            f"{name} does not resolve, not even on this host",
            f"Add a line to /etc/hosts on every host: ADDRESS {name}",
        )
    elif all(address.startswith("127.") for address in found):
        yield fine(
            "host name",
            f"{name} resolves to {', '.join(found)} here, a loopback address; a job on several hosts that uses this "
            "name for its rendezvous will not find this host",
            f"For several hosts, put the address that others can reach into /etc/hosts instead: ADDRESS {name}",
            addresses=found,
        )
    else:
        yield fine("host name", f"{name} resolves to {', '.join(found)}", addresses=found)
