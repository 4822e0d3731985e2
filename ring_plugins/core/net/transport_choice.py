"""What carries data between hosts under mpirun: sockets, or MPI where it knows hardware that is faster.

Over Ethernet, sockets of our own take half to four fifths of the time of MPI's transfers (docs/performance.md), and
tell at once which rank is gone; MPI is then only what the ranks meet by. With InfiniBand and the like it is the other
way round: MPI passes the kernel by.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import LaunchError
from ring_plugins.core.linux.interfaces import address_towards
from ring_plugins.core.net.network_choice import (
    Choice,
    HostInterfaces,
    choose,
    measure,
    own_interfaces,
    reachable_addresses,
    read_interfaces,
    unmeasured,
)

#: How MPI libraries are told which network to use, and what to type: mpirun exports the first to the ranks.
_TOLD = (
    ("OMPI_MCA_btl_tcp_if_include", "--mca btl_tcp_if_include"),
    ("UCX_NET_DEVICES", "UCX_NET_DEVICES="),
    ("FI_TCP_IFACE", "FI_TCP_IFACE="),
)
_DEVICES = Path("/sys/class")


class TransportChoice(NamedTuple):
    """The decision, the same on all ranks.

    Attributes:
        hosts: of the ranks.
        listen: where each rank listens for sockets; empty where MPI carries the data.
        rank_0: addresses of rank 0's host, the likeliest first.
        text: for the user, or "".
    """

    hosts: tuple[str, ...]
    listen: tuple[str, ...]
    rank_0: tuple[str, ...]
    text: str


def decide(rank: int, gather: Callable[[Any], list[Any]]) -> TransportChoice:
    """All ranks call.

    Args:
        rank: of this process.
        gather: everyone's payload in rank order.

    Raises:
        ArgumentError: RING_PLANE is neither "tcp" nor "mpi".
        LaunchError: RING_INTERFACE cannot be followed, or the ranks have different RING_PLANE.
    """
    own = own_interfaces(rank)
    rank_0 = next(iter(gather(list(reachable_addresses(own)))[0]), "")
    own = own._replace(preferred=address_towards(rank_0) if rank_0 else "")
    told = next(((variable, os.environ[variable]) for variable, _ in _TOLD if _names_networks(variable)), ("", ""))
    found = gather([own, _wish(rank), fabric(), told])
    offers, told = [read_interfaces(item[0]) for item in found], tuple(found[0][3])
    hosts = tuple(offer.host for offer in offers)
    wish = _agreed([item[1] for item in found], hosts)
    if len({offer.kernel for offer in offers}) == 1 and wish != "tcp":
        return TransportChoice(hosts, (), ("127.0.0.1",), "")
    try:
        networks = unmeasured(offers)
        choice = choose(offers, measure(networks, offers, rank, gather) if networks else None)
    except LaunchError:
        if wish == "tcp" or any(offer.wanted for offer in offers):
            raise
        return TransportChoice(
            hosts, (), reachable_addresses(offers[0]), ""
        )  # MPI may know a way, over hardware that has no addresses
    if wish == "mpi" or (not wish and any(item[2] for item in found)):
        return TransportChoice(hosts, (), choice.addresses[:1], advice(offers, choice, *told))
    if told[1] and not offers[0].wanted:
        with contextlib.suppress(LaunchError):  # it means something else than these hosts' interfaces
            listen = choose([offer._replace(wanted=told[1]) for offer in offers]).addresses
            return TransportChoice(hosts, listen, listen[:1], advice(offers, choice, *told))
    return TransportChoice(hosts, choice.addresses, choice.addresses[:1], choice.text)


def fabric() -> str:
    """A device of this host by which MPI moves data past the kernel, "" if there is none that is connected."""
    for state in sorted(_DEVICES.glob("infiniband/*/ports/*/state")):  # Omni-Path, RoCE and EFA are listed there too
        try:
            if "ACTIVE" in state.read_text():
                return state.parts[-4]
        except OSError:
            continue
    return next((device.name for device in sorted(_DEVICES.glob("cxi/*"))), "")  # Slingshot


def advice(offers: Sequence[HostInterfaces], choice: Choice, variable: str, told: str) -> str:
    """What to say of the network that was asked for by a word to MPI, or that MPI takes by itself, or "".

    Args:
        offers: of all ranks.
        choice: the best network.
        variable, told: by which MPI was told to use networks, and those; "" where it was not.
    """
    if not choice.text:
        return ""
    taken = next(i for i in offers[0].interfaces if i.address == choice.addresses[0])
    if told:
        if any(_names(word, taken.name, taken.address) for word in told.split(",")):
            return ""
        option = dict(_TOLD)[variable]
        return f"MPI was told to use {told} ({variable}), but {choice.text}. {option} {taken.name} changes that"
    if os.environ.get("OMPI_MCA_pml") == "ob1" or offers[0].wanted:  # noqa: SIM112 - so Open MPI spells it
        return (
            f"MPI chooses its network by itself, while {choice.text}. mpirun --mca btl_tcp_if_include {taken.name} "
            "decides it"
        )
    return ""


def _names_networks(variable: str) -> bool:
    told = os.environ.get(variable, "")
    return bool(told) and not (variable == "UCX_NET_DEVICES" and ":" in told)  # a device of InfiniBand


def _wish(rank: int) -> str:
    return config.TRANSPORT.get()


def _agreed(wishes: Sequence[str], hosts: Sequence[str]) -> str:
    for rank, wish in enumerate(wishes):
        if wish != wishes[0]:
            raise LaunchError(
                f"RING_TRANSPORT is {wishes[0]!r} on rank 0 ({hosts[0]}), but {wish!r} on rank {rank} ({hosts[rank]}). "
                "Set "
                "it alike everywhere: mpirun -x RING_TRANSPORT (Open MPI) and mpiexec -genvlist RING_TRANSPORT (MPICH) "
                "do."
            )
    return wishes[0]


def _names(word: str, name: str, address: str) -> bool:
    """Whether an entry of such a list, an interface's name or a network, means this interface."""
    try:
        return ipaddress.ip_address(address) in ipaddress.ip_network(word.strip(), strict=False)
    except ValueError:
        return word.strip() == name
