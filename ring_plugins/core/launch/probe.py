"""How fast networks are whose speed the kernel does not know: a host sends another a little and looks at the clock."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from ring_plugins.core.launch.network_choice import Offer, on_network

#: What is sent at most, and for how long at most. The first part is not timed: connections begin slowly.
_BYTES, _FIRST, _SECONDS = 8 << 20, 1 << 19, 0.1
_PATIENCE = 5.0


def measure(
    networks: Sequence[str], offers: Sequence[Offer], rank: int, gather: Callable[[Any], list[Any]]
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
