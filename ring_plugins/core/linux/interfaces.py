"""This host's addresses, as its kernel tells them."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from pathlib import Path
from typing import NamedTuple

_SIOCGIFADDR, _SIOCGIFNETMASK, _SIOCGIFFLAGS = 0x8915, 0x891B, 0x8913
_IFF_UP, _IFF_RUNNING = 0x1, 0x40
_NETWORK = Path("/sys/class/net")
#: Names of what containers and virtual machines talk over.
_INTERNAL = (
    "docker",
    "br-",
    "veth",
    "virbr",
    "cni",
    "flannel",
    "cali",
    "podman",
    "lxc",
    "lxdbr",
    "kube-",
    "dummy",
    "tun",
)


class Interface(NamedTuple):
    """An address of this host.

    Attributes:
        name: of the interface.
        address: IPv4, as text.
        prefix: bits of the network's part.
        speed: Mbit/s as the kernel says, 0 where it does not know.
        internal: whether it is loopback, or a bridge that no other host is on.
    """

    name: str
    address: str
    prefix: int
    speed: int
    internal: bool

    @property
    def network(self) -> str:
        return str(ipaddress.ip_network(f"{self.address}/{self.prefix}", strict=False))


def interfaces() -> list[Interface]:
    """All IPv4 addresses of interfaces that are up."""
    found = []
    for _, name in socket.if_nameindex():
        flags, address, mask = (_ask(name, request) for request in (_SIOCGIFFLAGS, _SIOCGIFADDR, _SIOCGIFNETMASK))
        if not flags or not address or not mask or not struct.unpack("=H", flags[:2])[0] & _IFF_UP:
            continue
        text = socket.inet_ntoa(address[4:8])
        prefix = ipaddress.ip_network(f"0.0.0.0/{socket.inet_ntoa(mask[4:8])}").prefixlen
        internal = text.startswith("127.") or name.startswith(_INTERNAL) or not _carries(name)
        found.append(Interface(name, text, prefix, _speed(name), internal))
    return found


def own_addresses() -> list[str]:
    """IPv4 addresses of this host that are no loopback."""
    return [i.address for i in interfaces() if not i.address.startswith("127.")]


def _ask(name: str, request: int) -> bytes:
    """What the kernel says about an interface, without the name; empty where it says nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            return fcntl.ioctl(probe, request, struct.pack("256s", name.encode()[:15]))[16:]
        except OSError:
            return b""


def _carries(name: str) -> bool:
    """Whether a cable, or what stands for one, is plugged in."""
    try:
        return (_NETWORK / name / "carrier").read_text().strip() != "0"
    except OSError:
        return True


def _speed(name: str) -> int:
    """Mbit/s of a real network card. What the kernel says of software (veth, bridges) is made up: 10,000 for all."""
    if not (_NETWORK / name / "device").exists() and not (_NETWORK / name / "bonding").exists():
        return 0
    try:
        return max(0, int((_NETWORK / name / "speed").read_text()))
    except (OSError, ValueError):
        return 0


def address_towards(host: str) -> str:
    """The local address that packets to `host` leave from, "" if there is none; connecting a UDP socket sends none."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return ""
