"""Interfaces of this host, and whether its name leads to it."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ring_plugins.doctor.findings import Finding, error, fine, warning


@dataclass(frozen=True)
class Interface:
    """A network interface that is up.

    Attributes:
        name: as in `ip link`.
        addresses: IPv4 and global IPv6 addresses.
        networks: the networks of those addresses ("10.0.0.0/16").
        megabits: stated speed in Mbit/s; 0 where the driver does not say.
        wired: whether it is neither loopback nor a bridge or tunnel of containers and virtual machines.
    """

    name: str
    addresses: tuple[str, ...]
    networks: tuple[str, ...]
    megabits: int
    wired: bool

    def __str__(self) -> str:
        speed = f"{self.megabits / 1000:g} Gbit/s" if self.megabits else "speed not stated"
        return f"{self.name} ({', '.join(self.addresses) or 'no address'}; {speed})"


_VIRTUAL = ("docker", "br-", "virbr", "veth", "cni", "flannel", "cali", "tun", "tap", "kube", "lxc", "podman")


def interfaces() -> list[Interface]:
    """Those that are up, best first: real ones before virtual ones, fast before slow."""
    import psutil

    states = psutil.net_if_stats()
    found = []
    for name, addresses in psutil.net_if_addrs().items():
        if name not in states or not states[name].isup:
            continue
        pairs = [(a.address.partition("%")[0], a.netmask) for a in addresses if a.family in _FAMILIES]
        pairs = [(address, mask) for address, mask in pairs if not ipaddress.ip_address(address).is_link_local]
        networks = tuple(str(network(address, mask)) for address, mask in pairs if mask)
        loopback = any(ipaddress.ip_address(address).is_loopback for address, _ in pairs)
        wired = not loopback and not name.startswith(_VIRTUAL) and name != "lo"
        speed = states[name].speed if states[name].speed < 1 << 31 else 0
        found.append(Interface(name, tuple(address for address, _ in pairs), networks, speed, wired))
    return sorted(found, key=lambda one: (not one.wired, -one.megabits, one.name))


_FAMILIES = (socket.AF_INET, socket.AF_INET6)


def network(address: str, mask: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    """The network of an address; psutil writes IPv6 masks as addresses."""
    bits = bin(int(ipaddress.ip_address(mask))).count("1")
    return ipaddress.ip_network(f"{address}/{bits}", strict=False)


def networks() -> Iterator[Finding]:
    """The interfaces, and which of them would carry the data between hosts."""
    found = interfaces()
    usable = [one for one in found if one.wired and one.addresses]
    evidence: dict[str, Any] = {"interfaces": [vars(one) for one in found]}
    said = ", ".join(map(str, found))
    wanted = os.environ.get("RING_INTERFACE", "")
    if wanted and wanted not in [one.name for one in found]:
        yield error(
            "network",
            f"RING_INTERFACE={wanted} is no interface of this host that is up",
            f"Choose among {', '.join(one.name for one in usable) or 'none'}, or unset it.",
        )
    if not usable:
        yield warning("network", f"only {said}: no other host can be reached", "ip link; ip address", **evidence)
        return
    taken = wanted or taken_by_default()
    yield fine("network", f"{said}; between hosts {taken or 'none of them'} would be taken", **evidence, taken=taken)
    chosen = next((one for one in found if one.name == taken), None)
    if chosen is not None and not wanted and chosen.megabits and usable[0].megabits > chosen.megabits:
        yield warning(
            "network",
            f"{chosen.name} would be taken, with {chosen.megabits} Mbit/s; {usable[0].name} has "
            f"{usable[0].megabits} Mbit/s",
            f"If {usable[0].name} reaches the other hosts: export RING_INTERFACE={usable[0].name}",
            **evidence,
        )


def taken_by_default() -> str:
    """The interface that the route to the world leaves from, "" where there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # a documentation address; connecting a UDP socket sends nothing
            address = probe.getsockname()[0]
        except OSError:
            return ""
    return next((one.name for one in interfaces() if address in one.addresses), "")


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
