"""What MPI was told about networks, beside what `interfaces` would choose: MPI takes its own and does not say which."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ring_plugins.core.errors import LaunchError
from ring_plugins.core.launch.network_choice import Choice, Offer, choose, outward, read_offer, unmeasured
from ring_plugins.core.launch.probe import measure

#: How MPI libraries are told, and what to type: mpirun exports the first to the ranks.
_TOLD = (
    ("OMPI_MCA_btl_tcp_if_include", "--mca btl_tcp_if_include"),
    ("UCX_NET_DEVICES", "UCX_NET_DEVICES="),
    ("FI_TCP_IFACE", "FI_TCP_IFACE="),
)


def compare(own: Offer, gather: Callable[[Any], list[Any]]) -> tuple[tuple[str, ...], str]:
    """Where rank 0 is reached, and what it should say about the network that MPI uses, or ""; all ranks call.

    Raises:
        LaunchError: RING_INTERFACE cannot be followed.
    """
    offers = [read_offer(item) for item in gather(own)]
    if len({offer.kernel for offer in offers}) == 1:
        return ("127.0.0.1",), ""
    try:
        networks = unmeasured(offers)
        choice = choose(offers, measure(networks, offers, own.rank, gather) if networks else None)
    except LaunchError:
        if any(offer.wanted for offer in offers):
            raise
        return outward(offers[0]), ""  # MPI may know a way, over hardware that has no addresses
    return choice.addresses[:1], advice(offers, choice, os.environ)


def advice(offers: Sequence[Offer], choice: Choice, environment: Mapping[str, str]) -> str:
    """The sentence, from what is known.

    Args:
        offers: of all ranks.
        choice: made from them.
        environment: of this rank.
    """
    if not choice.text:
        return ""
    taken = next(i for i in offers[0].interfaces if i.address == choice.addresses[0])
    for variable, option in _TOLD:
        told = environment.get(variable)
        if not told or (variable == "UCX_NET_DEVICES" and ":" in told):  # a device of InfiniBand
            continue
        if any(_names(word, taken.name, taken.address) for word in told.split(",")):
            return ""
        return f"MPI was told to use {told} ({variable}), but {choice.text}. {option} {taken.name} changes that"
    if environment.get("OMPI_MCA_pml") == "ob1" or offers[0].wanted:
        return (
            f"MPI chooses its network by itself, while {choice.text}. mpirun --mca btl_tcp_if_include {taken.name} "
            "decides it"
        )
    return ""


def _names(word: str, name: str, address: str) -> bool:
    """Whether an entry of such a list, an interface's name or a network, means this interface."""
    try:
        return ipaddress.ip_address(address) in ipaddress.ip_network(word.strip(), strict=False)
    except ValueError:
        return word.strip() == name


__all__ = ["advice", "compare"]
