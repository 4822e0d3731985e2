"""Which network address a process listens on, so that ranks on other hosts reach it."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Any

from torch.distributed import ProcessGroupGloo, Store  # type: ignore[attr-defined]  # torch re-exports these unmarked

from ring_plugins.core.errors import LaunchError
from ring_plugins.torch.rendezvous import exchange_through_store, innermost


def choose_devices(store: Store, rank: int, size: int, address: str | None = None) -> list[Any]:
    """The network devices that gloo listens on.

    GLOO_SOCKET_IFNAME (one interface or several, separated by commas) decides where it is set. Otherwise each rank
    takes the local address from which it reaches the rendezvous. Some hosts know themselves by a loopback address
    (Debian's 127.0.1.1), which peers elsewhere cannot use; such a rank takes the address from which it reaches a
    rank of another host instead.

    Raises:
        LaunchError: the ranks are on several hosts and no address that others can reach was found.
    """
    interfaces = [name.strip() for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name.strip()]
    if interfaces:
        try:
            return [ProcessGroupGloo.create_device(interface=name) for name in interfaces]
        except RuntimeError as error:
            known = ", ".join(name for _, name in socket.if_nameindex())
            raise LaunchError(
                f"rank {rank} has no usable interface GLOO_SOCKET_IFNAME={','.join(interfaces)!r} "
                f"({first_line(error)}); this host has {known}."
            ) from error
    address = address or _route_to(getattr(innermost(store), "host", ""))
    # Loopback addresses mean the same only inside one network namespace of one kernel.
    places = exchange_through_store(store, "gloo/addresses", rank, size, (_network_identity(), address))
    if len({network for network, _ in places}) > 1 and _is_loopback(address):
        others = [other for network, other in places if network != places[rank][0] and not _is_loopback(other)]
        address = next((local for local in map(_route_to, others) if not _is_loopback(local)), None)
        if address is None:
            raise LaunchError(
                f"rank {rank} on {socket.gethostname()} found no network address that ranks on other hosts can reach; "
                "name the interface that reaches them, for example GLOO_SOCKET_IFNAME=eth0."
            )
    return [ProcessGroupGloo.create_device(hostname=address or "127.0.0.1")]


def _route_to(host: str) -> str | None:
    """The local address that packets to `host` leave from; connecting a UDP socket sends none."""
    try:
        found = socket.getaddrinfo(host or None, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, protocol, _, target in found:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    return None


def _is_loopback(address: str | None) -> bool:
    return address is None or address.startswith("127.") or address == "::1"


def _network_identity() -> tuple[str, str]:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip(), os.readlink("/proc/self/ns/net")
    except OSError:
        return socket.gethostname(), ""


def first_line(error: BaseException) -> str:
    """gloo's message without the place in its source where it was raised."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return text.partition("] ")[2].partition(". This is typically")[0] or text
