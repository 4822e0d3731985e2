"""Which of the hosts' networks the job uses.

A host often has several: a management network, a fast one for data, bridges of containers, VPNs. Libraries that take
the first interface, or the one that the host's name resolves to, then train over the slow one, or hang on a bridge that
leads nowhere (docker0 has the same address on every host). gloo, NCCL and Open MPI leave it to variables that name an
interface; here RING_INTERFACE does that too, but is rarely needed:

- Every rank lists its host's IPv4 addresses, and all ranks choose from the same lists, so they agree without a leader.
- Loopback, bridges of containers and virtual machines, and cards without a carrier are left out.
- A network counts if every host has an address in it. The fastest is taken, by the speed that the kernel states for
  physical cards.
- Where the kernel states none, as in virtual machines, the networks are measured: one host sends another up to 8 MiB
  over each, which takes a fraction of a second.
- Hosts without a common network may still be connected by routers, as in a cloud or in Kubernetes, where every host or
  pod may have a subnet of its own. Each then takes the address from which it reaches rank 0.

IPv6 is left out: no cluster that we know of has only IPv6, and private IPv4 networks compare by their prefix.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ring_plugins.core.base import config
from ring_plugins.core.base.arguments import read_each, read_port, read_record
from ring_plugins.core.base.errors import LaunchError
from ring_plugins.core.base.threads import until
from ring_plugins.core.linux.interfaces import Interface, interfaces
from ring_plugins.core.linux.process import boot_id
from ring_plugins.core.net.acceptor import Acceptor
from ring_plugins.core.net.auth import Claim, Disconnected, Purpose
from ring_plugins.core.net.frames import reach

#: Bytes and seconds of a measurement at most. The first part is not timed: TCP starts slowly.
_BYTES, _UNTIMED, _SECONDS = 8 << 20, 1 << 19, 0.1
#: Seconds for a connection, and between two pieces of data, before a measured network counts as silent.
_TIMEOUT = 5.0
#: Networks within a tenth of the fastest count as equal: measurements scatter by as much.
_EQUAL = 0.9


class HostInterfaces(NamedTuple):
    """A rank's input to the choice.

    Attributes:
        rank, host: of the rank, and its host's name.
        interfaces: of its host.
        preferred: address of its host that reaches the rendezvous, "" if unknown.
        wanted: RING_INTERFACE, "" if not set.
        kernel: identifies the network stack: ranks with the same one share all interfaces.
    """

    rank: int
    host: str
    interfaces: tuple[Interface, ...]
    preferred: str
    wanted: str
    kernel: str


class Choice(NamedTuple):
    """The outcome, the same on all ranks.

    Attributes:
        addresses: to listen on and connect to, in rank order.
        text: for the user, the chosen network and the alternatives; "" if there was nothing to choose.
    """

    addresses: tuple[str, ...]
    text: str


def own_interfaces(rank: int, preferred: str = "") -> HostInterfaces:
    """This process's input to the choice.

    Raises:
        LaunchError: RING_INTERFACE names something that this host does not have.
    """
    wanted, found = config.INTERFACE.get(), interfaces()
    host = socket.gethostname()
    if wanted and not _matching(found, wanted):
        listed = ", ".join(f"{i.name} ({i.address}/{i.prefix})" for i in found)
        raise LaunchError(
            f"RING_INTERFACE={wanted!r} is not an interface of {host} (rank {rank}), which has {listed}. Give an "
            "interface's name, several separated by commas, or a network such as 10.1.0.0/16."
        )
    return HostInterfaces(rank, host, tuple(found), preferred, wanted, _network_stack())


def wanted_interfaces() -> list[str]:
    """Names of this host's interfaces that RING_INTERFACE chooses, in its order; none if it is not set."""
    wanted = config.INTERFACE.get()
    return list(dict.fromkeys(i.name for i in _matching(interfaces(), wanted))) if wanted else []


def read_interfaces(item: Sequence[Any]) -> HostInterfaces:
    """A `HostInterfaces` that has traveled as JSON, which knows lists only.

    Raises:
        TypeError, ValueError: it is none.
    """
    rank, host, found, *others = item
    read = tuple(read_record(Interface, fields) for fields in found)
    for one in read:
        ipaddress.ip_interface(f"{one.address}/{one.prefix}")
    return read_record(HostInterfaces, (rank, host, read, *others))


def unmeasured(hosts: Sequence[HostInterfaces]) -> list[str]:
    """Networks among which only a measurement can decide: several common to all hosts, of unknown speed."""
    common = _common(hosts)
    if len({host.kernel for host in hosts}) == 1 or len(common) < 2 or all(_speeds(hosts, common).values()):
        return []
    return common


def measure(
    networks: Sequence[str], hosts: Sequence[HostInterfaces], rank: int, gather: Callable[[Any], list[Any]]
) -> dict[str, int]:
    """Mbit/s of each network between rank 0 and another host, 0 where nothing arrives; all ranks call.

    Args:
        networks: common to all hosts.
        hosts: of all ranks, in rank order.
        rank: of this process.
        gather: returns every rank's payload in rank order.
    """
    sender = next(host.rank for host in hosts if host.kernel != hosts[0].kernel)
    speeds: dict[str, int] = {}
    for network in networks:
        address = on_network(hosts[rank], network).address
        listener = socket.create_server((address, 0)) if rank == 0 else None
        own = [listener.getsockname()[1], secrets.token_hex(32)] if listener is not None else None
        (port, secret), *_ = read_each(gather(own)[:1], lambda item: (read_port(item[0]), str(item[1])))
        found = 0
        if listener is not None:
            found = receive_timed(listener, secret.encode(), sender)
        elif rank == sender:
            send_timed((on_network(hosts[0], network).address, port), secret.encode(), sender, address)
        speeds[network] = read_each(gather(found)[:1], int)[0]
    return speeds


def choose(
    hosts: Sequence[HostInterfaces], measured: Mapping[str, int] | None = None, others_may_come: bool = False
) -> Choice:
    """The network on which all ranks reach each other.

    Args:
        hosts: of all ranks, in rank order.
        measured: network -> Mbit/s, for those that `unmeasured` names.
        others_may_come: whether ranks of other hosts may join, so that one host needs a network, too, if it has any.

    Raises:
        LaunchError: hosts share no network, or ranks want different ones; both are named.
    """
    if len({host.kernel for host in hosts}) == 1 and not (others_may_come and _usable(hosts[0])):
        return Choice(("127.0.0.1",) * len(hosts), "")
    for host in hosts:
        if not _usable(host):
            raise LaunchError(
                f"{host.host} (rank {host.rank}) has no network that leads to other hosts; it has "
                f"{', '.join(i.name for i in host.interfaces) or 'none at all'}. RING_INTERFACE can force "
                "one of them."
            )
    common = _common(hosts)
    if common:
        speeds = dict(measured) if measured else _speeds(hosts, common)
        best = [network for network in common if speeds[network] >= _EQUAL * max(speeds.values())]
        # Among equals, prefer the network of the rendezvous: the ranks are known to reach each other there.
        rendezvous = {
            on_network(o, n).network for o in hosts for n in common if on_network(o, n).address == o.preferred
        }
        network = next((n for n in best if n in rendezvous), best[0])
        addresses = tuple(on_network(host, network).address for host in hosts)
        return Choice(addresses, _explain(hosts[0], network, common, speeds, bool(measured)))
    if any(host.wanted or host.preferred not in reachable_addresses(host) for host in hosts):  # of rank 0's network
        raise LaunchError(_no_common_network(hosts))
    addresses = tuple(host.preferred for host in hosts)
    return Choice(addresses, f"every host is on its own subnet; rank 0's address is {addresses[0]}")


def reachable_addresses(host: HostInterfaces) -> tuple[str, ...]:
    """All addresses under which others may reach a rank's host."""
    return tuple(i.address for i in _usable(host))


def on_network(host: HostInterfaces, network: str) -> Interface:
    """The interface of a rank's host that is on a network."""
    return next(i for i in _usable(host) if i.network == network)


def _network_stack() -> str:
    try:
        return f"{boot_id()}/{os.readlink('/proc/self/ns/net')}"
    except OSError:
        return socket.gethostname()


def _matching(found: Sequence[Interface], wanted: str) -> list[Interface]:
    """The interfaces that RING_INTERFACE names, by name or network, in its order."""
    chosen = []
    for word in filter(None, (word.strip() for word in wanted.split(","))):
        try:
            network = ipaddress.ip_network(word, strict=False)
            chosen += [i for i in found if ipaddress.ip_address(i.address) in network]
        except ValueError:
            chosen += [i for i in found if i.name == word]
    return chosen


def _usable(host: HostInterfaces) -> list[Interface]:
    if host.wanted:
        return _matching(host.interfaces, host.wanted)
    return [i for i in host.interfaces if not i.internal]


def _common(hosts: Sequence[HostInterfaces]) -> list[str]:
    networks = [{i.network for i in _usable(host)} for host in hosts]
    return list(dict.fromkeys(i.network for i in _usable(hosts[0]) if all(i.network in others for others in networks)))


def _speeds(hosts: Sequence[HostInterfaces], networks: Sequence[str]) -> dict[str, int]:
    """Speed of each network on its slowest host, 0 if one of them does not know."""
    return {network: min(on_network(host, network).speed for host in hosts) for network in networks}


def receive_timed(listener: socket.socket, secret: bytes, sender: int) -> int:
    """Mbit/s at which the sender's connection delivers, 1 if too little came to tell, 0 if nothing came."""
    acceptor = Acceptor(secret, Purpose.PROBE, lambda claim: claim.rank == sender)
    acceptor.add(listener)
    with contextlib.closing(acceptor):
        came = until(lambda: acceptor.poll(0.2), _TIMEOUT, 0.0)
    for other in came[1:]:  # the same rank, which has connected again
        other.socket.close()
    if not came:
        return 0
    with contextlib.suppress(OSError), came[0].socket as connected:
        connected.settimeout(_TIMEOUT)
        memory, received, timed_from, began = bytearray(1 << 20), 0, 0, 0.0
        while part := connected.recv_into(memory):
            received += part
            if not began and received >= _UNTIMED:
                timed_from, began = received, time.monotonic()
        seconds = time.monotonic() - began
        return int((received - timed_from) * 8 / max(seconds, 1e-6) / 1e6) if began else 1
    return 0


def send_timed(
    target: tuple[str, int],
    secret: bytes,
    rank: int,
    source: str = "",
    seconds: float = _SECONDS,
    most: float = _BYTES,
) -> None:
    """Send what `receive_timed` measures.

    Args:
        target: address and port.
        secret: as there.
        rank: of the sender.
        source: address to send from; "" for any.
        seconds, most: after which, and after how many bytes, it ends.
    """
    with (
        contextlib.suppress(OSError, Disconnected),
        reach(lambda: [target], secret, Purpose.PROBE, Claim(rank), _TIMEOUT, source=source).socket as connected,
    ):
        connected.settimeout(_TIMEOUT)
        data, sent, end = bytes(1 << 16), 0, time.monotonic() + seconds
        while sent < most and time.monotonic() < end:
            connected.sendall(data)
            sent += len(data)


def _no_common_network(hosts: Sequence[HostInterfaces]) -> str:
    usable = [_usable(host) for host in hosts]
    first = {i.network for i in usable[0]}
    other = next((k for k, found in enumerate(usable) if not first & {i.network for i in found}), len(hosts) - 1)

    def has(k: int) -> str:
        setting = f" with RING_INTERFACE={hosts[k].wanted}" if hosts[k].wanted else ""
        listed = ", ".join(f"{i.name} ({i.network})" for i in usable[k])
        return f"{hosts[k].host} (rank {hosts[k].rank}){setting} has {listed}"

    return (
        f"no network is common to all hosts: {has(0)}, but {has(other)}. Set RING_INTERFACE on every host to an "
        "interface, or on all alike to the network that they share, such as 10.1.0.0/16."
    )


def _explain(
    host: HostInterfaces, network: str, common: Sequence[str], speeds: Mapping[str, int], measured: bool
) -> str:
    taken = on_network(host, network)
    text = f"{taken.name} ({network}) connects the hosts"
    if host.wanted:
        return f"{text}, as RING_INTERFACE says"
    others = [
        f"{n} with {speeds[n]:,} Mbit/s" if speeds[n] else f"{n}, which is silent" for n in common if n != network
    ]
    if others:
        return (
            f"{text} with {speeds[network]:,} Mbit/s{', as measured' if measured else ''}; slower: {'; '.join(others)}"
        )
    unused = [i.name for i in host.interfaces if i.name != taken.name and not i.address.startswith("127.")]
    return f"{text}; not all of them are on {', '.join(dict.fromkeys(unused))}" if unused else ""
