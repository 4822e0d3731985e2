"""Which of a host's networks the job uses.

Every rank lists its host's addresses; all of them then come to the same choice, from the same list. A network counts if
every host has an address in it. Loopback, and bridges of containers and virtual machines (docker0 has the same address
on every host, and leads nowhere), are left out. Of several the fastest is taken, by the speed that the kernel states
for real network cards. Where it knows none, the networks are measured.

How fast networks are whose speed the kernel does not know: a host sends another a little and looks at the clock.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import LaunchError
from ring_plugins.core.linux.interfaces import Interface, interfaces
from ring_plugins.core.linux.process import boot_id

#: What is sent at most, and for how long at most. The first part is not timed: connections begin slowly.
_BYTES, _FIRST, _SECONDS = 8 << 20, 1 << 19, 0.1
_PATIENCE = 5.0


def measure(
    networks: Sequence[str], offers: Sequence[HostInterfaces], rank: int, gather: Callable[[Any], list[Any]]
) -> dict[str, int]:
    """Mbit/s of each network, 0 where nothing arrives: between rank 0 and another host, but all ranks call.

    Args:
        networks: which every host is on.
        offers: of all ranks.
        rank: of this process.
        gather: everyone's payload in rank order.
    """
    other = next(offer.rank for offer in offers if offer.kernel != offers[0].kernel)
    speeds: dict[str, int] = {}
    for network in networks:
        address = on_network(offers[rank], network).address
        listener = socket.create_server((address, 0)) if rank == 0 else None
        port = gather(listener.getsockname()[1] if listener is not None else 0)[0]
        found = 0
        if listener is not None:
            found = _take(listener)
        elif rank == other:
            _give((on_network(offers[0], network).address, int(port)), address)
        speeds[network] = int(gather(found)[0])
    return speeds


def _take(listener: socket.socket) -> int:
    with listener, contextlib.suppress(OSError):
        listener.settimeout(_PATIENCE)
        connected, _ = listener.accept()
        with connected:
            connected.settimeout(_PATIENCE)
            memory, got, timed_from, began = bytearray(1 << 20), 0, 0, 0.0
            while part := connected.recv_into(memory):
                got += part
                if not began and got >= _FIRST:
                    timed_from, began = got, time.monotonic()
            seconds = time.monotonic() - began
            return int((got - timed_from) * 8 / max(seconds, 1e-6) / 1e6) if began else 1
    return 0


def _give(target: tuple[str, int], source: str) -> None:
    with contextlib.suppress(OSError), socket.create_connection(target, _PATIENCE, (source, 0)) as connected:
        connected.settimeout(_PATIENCE)
        data, sent, end = bytes(1 << 16), 0, time.monotonic() + _SECONDS
        while sent < _BYTES and time.monotonic() < end:
            connected.sendall(data)
            sent += len(data)


class HostInterfaces(NamedTuple):
    """What a rank brings to the choice.

    Attributes:
        rank, host: who says this.
        interfaces: of its host.
        preferred: address that reaches the rendezvous, "" where that is unknown.
        wanted: RING_INTERFACE, "" where it is not set.
        kernel: tells network stacks apart: ranks with the same one share all interfaces.
    """

    rank: int
    host: str
    interfaces: tuple[Interface, ...]
    preferred: str
    wanted: str
    kernel: str


def read_interfaces(item: Sequence[Any]) -> HostInterfaces:
    """An offer that has travelled as JSON, which knows lists only."""
    rank, host, found, preferred, wanted, kernel = item
    return HostInterfaces(rank, host, tuple(Interface(*one) for one in found), preferred, wanted, kernel)


def own_interfaces(rank: int, preferred: str = "") -> HostInterfaces:
    """What this process offers.

    Raises:
        LaunchError: RING_INTERFACE names what this host does not have.
    """
    wanted, found = config.INTERFACE.get(), interfaces()
    host = socket.gethostname()
    if wanted and not _matching(found, wanted):
        listed = ", ".join(f"{i.name} ({i.address}/{i.prefix})" for i in found)
        raise LaunchError(
            f"RING_INTERFACE={wanted!r} is no interface of {host} (rank {rank}), which has {listed}. Give an "
            "interface's name, "
            "several separated by commas, or a network such as 10.1.0.0/16."
        )
    return HostInterfaces(rank, host, tuple(found), preferred, wanted, _stack())


def _stack() -> str:
    try:
        return f"{boot_id()}/{os.readlink('/proc/self/ns/net')}"
    except OSError:
        return socket.gethostname()


def _matching(found: Sequence[Interface], wanted: str) -> list[Interface]:
    """Those that RING_INTERFACE names, by name or network, in its order."""
    chosen = []
    for word in filter(None, (word.strip() for word in wanted.split(","))):
        try:
            network = ipaddress.ip_network(word, strict=False)
            chosen += [i for i in found if ipaddress.ip_address(i.address) in network]
        except ValueError:
            chosen += [i for i in found if i.name == word]
    return chosen


class Choice(NamedTuple):
    """The outcome, the same on all ranks.

    Attributes:
        addresses: to listen on and connect to, in rank order.
        text: for the user, which network was taken, out of which; "" where there was nothing to choose.
    """

    addresses: tuple[str, ...]
    text: str


def unmeasured(offers: Sequence[HostInterfaces]) -> list[str]:
    """Networks between which only a measurement can decide: several that all hosts are on, of unknown speed."""
    common = _common(offers)
    if len({offer.kernel for offer in offers}) == 1 or len(common) < 2 or all(_speeds(offers, common).values()):
        return []
    return common


def choose(offers: Sequence[HostInterfaces], measured: Mapping[str, int] | None = None) -> Choice:
    """The network on which all ranks reach each other.

    Args:
        offers: of all ranks, in rank order.
        measured: network -> Mbit/s, for those that `unmeasured` names.

    Raises:
        LaunchError: hosts that share no network, or ranks that want different ones; both are named.
    """
    if len({offer.kernel for offer in offers}) == 1:
        return Choice(("127.0.0.1",) * len(offers), "")
    for offer in offers:
        if not _usable(offer):
            raise LaunchError(
                f"{offer.host} (rank {offer.rank}) has no network that leads to other hosts; it has "
                f"{', '.join(i.name for i in offer.interfaces) or 'none at all'}. "
                "RING_INTERFACE takes one of them anyway."
            )
    common = _common(offers)
    if common:
        speeds = dict(measured) if measured else _speeds(offers, common)
        # A tenth more or less is the noise of a measurement; of equals the one of the rendezvous is taken.
        best = [network for network in common if speeds[network] >= 0.9 * max(speeds.values())]
        rendezvous = {
            on_network(o, n).network for o in offers for n in common if on_network(o, n).address == o.preferred
        }
        network = next((n for n in best if n in rendezvous), best[0])
        addresses = tuple(on_network(offer, network).address for offer in offers)
        return Choice(addresses, _say(offers[0], network, common, speeds, bool(measured)))
    if any(offer.wanted for offer in offers) or not all(_leads_to_rank_0(offer) for offer in offers):
        _disagree(offers)
    # Routed networks, as in a cloud or in Kubernetes, where every host may have a subnet of its own.
    addresses = tuple(offer.preferred for offer in offers)
    return Choice(addresses, f"every host is on a subnet of its own; rank 0's address is {addresses[0]}")


def _common(offers: Sequence[HostInterfaces]) -> list[str]:
    everyones = [{i.network for i in _usable(offer)} for offer in offers]
    return list(dict.fromkeys(i.network for i in _usable(offers[0]) if all(i.network in one for one in everyones)))


def _speeds(offers: Sequence[HostInterfaces], networks: Sequence[str]) -> dict[str, int]:
    """Of each network, the slowest host's; 0 where one does not know."""
    return {network: min(on_network(offer, network).speed for offer in offers) for network in networks}


def _usable(offer: HostInterfaces) -> list[Interface]:
    if offer.wanted:
        return _matching(offer.interfaces, offer.wanted)
    return [i for i in offer.interfaces if not i.internal]


def reachable_addresses(offer: HostInterfaces) -> tuple[str, ...]:
    """All addresses under which others may reach a rank's host."""
    return tuple(i.address for i in _usable(offer))


def on_network(offer: HostInterfaces, network: str) -> Interface:
    """The interface of a rank's host that is on a network."""
    return next(i for i in _usable(offer) if i.network == network)


def _leads_to_rank_0(offer: HostInterfaces) -> bool:
    return any(i.address == offer.preferred for i in _usable(offer))


def _disagree(offers: Sequence[HostInterfaces]) -> None:
    usable = [_usable(offer) for offer in offers]
    first = {i.network for i in usable[0]}
    other = next((k for k, found in enumerate(usable) if not first & {i.network for i in found}), len(offers) - 1)

    def has(k: int) -> str:
        said = f" with RING_INTERFACE={offers[k].wanted}" if offers[k].wanted else ""
        listed = ", ".join(f"{i.name} ({i.network})" for i in usable[k])
        return f"{offers[k].host} (rank {offers[k].rank}){said} has {listed}"

    raise LaunchError(
        f"no network is common to all hosts: {has(0)}, but {has(other)}. Set RING_INTERFACE on every host to an "
        "interface, or "
        "on all alike to the network that they share, such as 10.1.0.0/16."
    )


def _say(offer: HostInterfaces, network: str, common: Sequence[str], speeds: Mapping[str, int], measured: bool) -> str:
    taken = on_network(offer, network)
    said = f"{taken.name} ({network}) connects the hosts"
    if offer.wanted:
        return f"{said}, as RING_INTERFACE says"
    others = [
        f"{n} with {speeds[n]:,} Mbit/s" if speeds[n] else f"{n}, which is silent" for n in common if n != network
    ]
    if others:
        return (
            f"{said} with {speeds[network]:,} Mbit/s{', as measured' if measured else ''}; slower: {'; '.join(others)}"
        )
    unused = [i.name for i in offer.interfaces if i.name != taken.name and not i.address.startswith("127.")]
    return f"{said}; not all of them are on {', '.join(dict.fromkeys(unused))}" if unused else ""
