"""Point-to-point transfers between hosts: what a transport promises, and which one a job under mpirun takes.

Over Ethernet, our sockets (tcp.py) take half to four fifths of the time of MPI's transfers (mpi.py,
docs/performance.md), and a closed connection shows immediately which rank is gone; MPI then only connects the ranks at
the start. Over InfiniBand and the like MPI is faster, because it bypasses the kernel. So MPI moves the data if any host
has such a device that is connected, and sockets otherwise; RING_TRANSPORT overrides that.

A user may have told MPI which network to use (`mpirun --mca btl_tcp_if_include eth1`). The sockets then use that
network too, and the user is told if another one is faster.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ring_plugins.core.base import config
from ring_plugins.core.base.arguments import read_each
from ring_plugins.core.base.errors import LaunchError
from ring_plugins.core.base.types import Bytes
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


class Request(Protocol):
    """Transfers under way. It may be dropped before completion: buffers stay alive or untouched."""

    def done(self) -> bool:
        """Whether all transfers have finished; makes progress, never blocks.

        Raises:
            PeerFailed: a transfer failed, possibly when it was started.
        """

    def missing(self) -> Sequence[int]:
        """World ranks whose transfers had not finished at the last call of `done`, for messages."""

    def nap(self, seconds: float) -> None:
        """Sleep until `done` may have changed.

        Args:
            seconds: how long; a transport that wakes when data arrives may sleep longer.
        """


class Transport(Protocol):
    """Point-to-point transfers among all ranks of the job. It never does arithmetic."""

    name: str
    rank: int
    size: int

    def connect(self, ranks: Sequence[int], tag: int) -> Request:
        """Prepare to exchange with ranks that call this too.

        Raises:
            LaunchError: a rank cannot be reached; `done` of the request raises it too.
        """

    def disconnect(self, tag: int) -> None:
        """Release the resources of a tag, which is not used any more."""

    def abandon(self, tag: int) -> None:
        """Release the resources of a tag in the middle of transfers, whose memory is left alone from now on."""

    def exchange(
        self, outgoing: Sequence[tuple[int, Bytes]], incoming: Sequence[tuple[int, Bytes]], tag: int
    ) -> Request:
        """Start sending to and receiving from world ranks.

        Args:
            outgoing: (rank, 1-d contiguous uint8 array) to send; must not change until done.
            incoming: (rank, array) to fill, of the size that was sent.
            tag: messages of equal rank and tag arrive in order.
        """

    def is_receiving(self, rank: int, tag: int) -> bool:
        """Whether more bytes from a rank may be on their way, since some arrived a moment ago."""

    def progress(self, tag: int) -> None:
        """Make progress on transfers with this tag; never blocks.

        Raises:
            PeerFailed: a transfer failed.
        """

    def close(self) -> None:
        """Release everything the transport holds."""


#: Variables that tell MPI libraries which networks to use (mpirun exports them to the ranks), and what a user types.
_MPI_NETWORK_SETTINGS = (
    ("OMPI_MCA_btl_tcp_if_include", "--mca btl_tcp_if_include"),
    ("UCX_NET_DEVICES", "UCX_NET_DEVICES="),
    ("FI_TCP_IFACE", "FI_TCP_IFACE="),
)
_DEVICES = Path("/sys/class")


class TransportChoice(NamedTuple):
    """The decision, the same on all ranks.

    Attributes:
        hosts: of the ranks.
        listen: addresses at which the ranks listen for sockets; empty where MPI moves the data.
        rank_0: addresses of rank 0's host, the likeliest first.
        text: for the user, or "".
    """

    hosts: tuple[str, ...]
    listen: tuple[str, ...]
    rank_0: tuple[str, ...]
    text: str


def choose_transport(rank: int, gather: Callable[[Any], list[Any]]) -> TransportChoice:
    """Decide; all ranks call.

    Args:
        rank: of this process.
        gather: returns every rank's payload in rank order.

    Raises:
        ArgumentError: RING_TRANSPORT is neither "tcp" nor "mpi".
        LaunchError: RING_INTERFACE names no usable network, or the ranks' RING_TRANSPORT differ.
    """
    own = own_interfaces(rank)
    towards = next(iter(gather(list(reachable_addresses(own)))[0]), "")
    own = own._replace(preferred=address_towards(towards) if towards else "")
    found = gather([own, config.TRANSPORT.get(), rdma_device(), _mpi_network_setting()])
    hosts = read_each(found, lambda item: read_interfaces(item[0]))
    variable, networks = found[0][3]
    names = tuple(host.host for host in hosts)
    requested = _agreed([item[1] for item in found], names)
    if len({host.kernel for host in hosts}) == 1 and requested != "tcp":
        return TransportChoice(names, (), ("127.0.0.1",), "")
    try:
        unknown = unmeasured(hosts)
        choice = choose(hosts, measure(unknown, hosts, rank, gather) if unknown else None)
    except LaunchError:
        if requested == "tcp" or any(host.wanted for host in hosts):
            raise
        # MPI may connect the hosts over hardware without IP addresses.
        return TransportChoice(names, (), reachable_addresses(hosts[0]), "")
    if requested == "mpi" or (not requested and any(item[2] for item in found)):
        return TransportChoice(names, (), choice.addresses[:1], advice(hosts, choice, variable, networks))
    if networks and not hosts[0].wanted:
        with contextlib.suppress(LaunchError):  # the setting does not name interfaces of these hosts
            listen = choose([host._replace(wanted=networks) for host in hosts]).addresses
            return TransportChoice(names, listen, listen[:1], advice(hosts, choice, variable, networks))
    return TransportChoice(names, choice.addresses, choice.addresses[:1], choice.text)


def rdma_device() -> str:
    """A connected device of this host that lets MPI bypass the kernel, "" if there is none."""
    for state in sorted(_DEVICES.glob("infiniband/*/ports/*/state")):  # lists Omni-Path, RoCE and EFA too
        try:
            if "ACTIVE" in state.read_text():
                return state.parts[-4]
        except OSError:
            continue
    return next((device.name for device in sorted(_DEVICES.glob("cxi/*"))), "")  # Slingshot


def advice(hosts: Sequence[HostInterfaces], choice: Choice, variable: str, networks: str) -> str:
    """What to tell the user about the network that MPI uses, "" if it is the best one.

    Args:
        hosts: of all ranks.
        choice: the best network.
        variable, networks: the variable that tells MPI which networks to use, and its value; "" if none is set.
    """
    if not choice.text:
        return ""
    best = next(i for i in hosts[0].interfaces if i.address == choice.addresses[0])
    if networks:
        if any(_means(entry, best.name, best.address) for entry in networks.split(",")):
            return ""
        option = dict(_MPI_NETWORK_SETTINGS)[variable]
        return f"MPI was told to use {networks} ({variable}), but {choice.text}. {option} {best.name} changes that"
    if os.environ.get("OMPI_MCA_pml") == "ob1" or hosts[0].wanted:  # noqa: SIM112 - Open MPI's spelling
        return (
            f"MPI chooses its own network, but {choice.text}. mpirun --mca btl_tcp_if_include {best.name} changes that"
        )
    return ""


def _mpi_network_setting() -> tuple[str, str]:
    """The first variable that names networks for MPI, and its value; ("", "") if none does."""
    for variable, _ in _MPI_NETWORK_SETTINGS:
        value = os.environ.get(variable, "")
        if value and not (variable == "UCX_NET_DEVICES" and ":" in value):  # "mlx5_0:1" is a device of InfiniBand
            return variable, value
    return "", ""


def _agreed(requested: Sequence[str], hosts: Sequence[str]) -> str:
    for rank, transport in enumerate(requested):
        if transport != requested[0]:
            raise LaunchError(
                f"RING_TRANSPORT is {requested[0]!r} on rank 0 ({hosts[0]}), but {transport!r} on rank {rank} "
                f"({hosts[rank]}). Set it to the same value everywhere: mpirun -x RING_TRANSPORT (Open MPI) and "
                "mpiexec -genvlist RING_TRANSPORT (MPICH) do that."
            )
    return requested[0]


def _means(entry: str, name: str, address: str) -> bool:
    """Whether an entry of MPI's list, an interface's name or a network, means this interface."""
    try:
        return ipaddress.ip_address(address) in ipaddress.ip_network(entry.strip(), strict=False)
    except ValueError:
        return entry.strip() == name
