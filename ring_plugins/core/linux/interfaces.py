"""Network interfaces of this host, its addresses, and free ports."""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path
from typing import NamedTuple

_SYSFS = Path("/sys/class/net")
_IFF_UP = 0x1
#: Prefixes of the names of interfaces that containers and virtual machines talk over.
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
        prefix: length of the network's prefix in bits.
        speed: Mbit/s as the kernel states it, 0 if unknown.
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
    import psutil  # takes 15 ms, which a job on one host need not spend

    found = []
    for label, addresses in psutil.net_if_addrs().items():
        name = label.partition(":")[0]  # "eth0:1" labels a second address of eth0
        if not _is_up(name):
            continue
        for entry in addresses:
            if entry.family == socket.AF_INET:
                prefix = ipaddress.ip_network(f"0.0.0.0/{entry.netmask or '255.255.255.255'}").prefixlen
                internal = entry.address.startswith("127.") or name.startswith(_INTERNAL) or not _has_carrier(name)
                found.append(Interface(name, entry.address, prefix, _speed(name), internal))
    return found


def own_addresses() -> list[str]:
    """IPv4 addresses of this host except loopback."""
    return [i.address for i in interfaces() if not i.address.startswith("127.")]


# psutil.net_if_stats also gives state and speed, but reports an interface without a carrier as down.


def _is_up(name: str) -> bool:
    try:
        return bool(int((_SYSFS / name / "flags").read_text(), 16) & _IFF_UP)
    except (OSError, ValueError):
        return True


def _has_carrier(name: str) -> bool:
    """Whether a cable, or its virtual counterpart, is plugged in."""
    try:
        return (_SYSFS / name / "carrier").read_text().strip() != "0"
    except OSError:
        return True


def _speed(name: str) -> int:
    """Mbit/s of a physical network card. For virtual ones (veth, bridges) the kernel makes up 10,000."""
    if not (_SYSFS / name / "device").exists() and not (_SYSFS / name / "bonding").exists():
        return 0
    try:
        return max(0, int((_SYSFS / name / "speed").read_text()))
    except (OSError, ValueError):
        return 0


def address_towards(host: str) -> str:
    """The local address from which packets to `host` leave, "" if there is no route. Sends nothing.

    Args:
        host: name or address.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # only sets the route of a UDP socket
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def free_port() -> int:
    """A TCP port that is free at this moment."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def reserve_port() -> socket.socket:
    """A socket that reserves a TCP port of this host for a later `socket.create_server`, in any process.

    The kernel does not hand out a bound port to sockets that ask for any free one. A second socket can still bind it,
    as long as both set SO_REUSEADDR (`create_server` does) and the first does not listen. Closing it ends the
    reservation.

    This keeps out accidents, not attackers: the second socket may be any user's. By trying, a stranger on this host
    finds a reserved port in a second, and listens there. Whoever was to listen then gets EADDRINUSE, and whoever
    connects reaches the stranger, so it has to find out with whom it speaks. Our bootstrap does; torch's store and gRPC
    do not. A reservation with SO_REUSEPORT alone would be for this user only, but every later listener would have to
    set that, too, and torch's store does not.
    """
    reserved = socket.socket()
    try:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("", 0))
    except BaseException:
        reserved.close()
        raise
    return reserved
