"""Sockets between all ranks of a job, once they know each other's hosts."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any

from ring_plugins.core.switchboard import Peer, Switchboard
from ring_plugins.core.tcp import TcpPlane
from ring_plugins.core.waiting import seconds_from_environment


def open_plane(
    rank: int, hosts: Sequence[str], addresses: Sequence[str], gather: Callable[[Any], list[Any]]
) -> TcpPlane:
    """Listen, and learn where the others do; all ranks call.

    Args:
        rank: of this process.
        hosts: the ranks' hosts, for texts.
        addresses: to listen on, in rank order.
        gather: everyone's payload in rank order.
    """
    patience = min(15.0, seconds_from_environment("RING_START_TIMEOUT", 300.0))
    switchboard = Switchboard(addresses[rank], patience)
    try:
        whole = gather([switchboard.port, secrets.token_hex(32) if rank == 0 else ""])
        ports, secret = [int(item[0]) for item in whole], str(whole[0][1])
        peers = [Peer(*where) for where in zip(hosts, addresses, ports, strict=True)]
        switchboard.open(rank, peers, secret)
    except BaseException:
        switchboard.close()
        raise
    return TcpPlane(rank, peers, switchboard)
