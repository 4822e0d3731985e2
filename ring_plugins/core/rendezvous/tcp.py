"""Started by torchrun, or by anything that sets its variables: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT.

Rank 0 listens and the others call it (roll_call.py). Where it listens they know in one of two ways. Usually it is
MASTER_PORT. But torchrun's agent keeps that port for a store of torch's, and so does a script that has initialised
torch.distributed by itself; then rank 0 takes any port and hands its number round through that store.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import secrets
import socket
import sys
import time
from typing import Protocol, cast

from ring_plugins.core.base.errors import LaunchError, MissingDependency
from ring_plugins.core.base.log import logger
from ring_plugins.core.linux.interfaces import address_towards
from ring_plugins.core.net.network_choice import choose, measure, own_interfaces, read_interfaces, unmeasured
from ring_plugins.core.net.tcp import TcpTransport, open_transport
from ring_plugins.core.rendezvous import bootstrap as roll_call
from ring_plugins.core.rendezvous.record import Connection, LaunchRecord, integer

#: Seconds for whoever had MASTER_PORT before, such as a store of torch's that is being closed, to let go of it.
_TAKEN = 5.0
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Store(Protocol):
    """A store of torch's, as far as it is needed here: a text that rank 0 leaves for the others."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...


def detect() -> LaunchRecord | None:
    """The variables that torchrun sets."""
    if not all(os.environ.get(name) for name in VARIABLES):
        return None
    by = "torchrun" if os.environ.get("TORCHELASTIC_RUN_ID") else "the variables RANK and MASTER_ADDR"
    return LaunchRecord(
        "rendezvous", by, integer("RANK"), integer("WORLD_SIZE"), integer("LOCAL_RANK"), integer("LOCAL_WORLD_SIZE")
    )


def connect(record: LaunchRecord, generation: int) -> Connection:
    """Meet the other ranks, and open sockets between them.

    Args:
        record: from `detect`.
        generation: how often this process has connected before.

    Raises:
        LaunchError: the ranks do not find each other, do not fit together, or share no network; says which and why.
    """
    os.environ.update(record.variables)
    missing = [name for name in VARIABLES if not os.environ.get(name)]
    if missing:
        raise LaunchError(
            f"{', '.join(missing)} not set in the environment; start with torchrun, with mpirun, "
            f"or set all of {', '.join(VARIABLES)}."
        )
    rank, size = integer("RANK"), integer("WORLD_SIZE")
    assert rank is not None
    assert size is not None
    if not 0 <= rank < size:
        raise LaunchError(f"RANK={rank} does not fit WORLD_SIZE={size}.")
    call = _meet(rank, size, os.environ["MASTER_ADDR"], generation)
    try:
        transport, address = _open_transport(call, rank)
    except BaseException:
        call.close()
        raise

    def close() -> None:
        transport.close()
        call.close()

    return Connection(rank, size, call.gather, transport, close, (address,), _end_process)


def _end_process(code: int) -> None:
    """torchrun ends the other ranks when one fails, and wherever a peer waits, the closed connection tells it."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _meet(rank: int, size: int, address: str, generation: int) -> roll_call.Bootstrap:
    board = _board(generation)
    secret = roll_call.job_secret()
    if board is None:
        port = integer("MASTER_PORT") or 0
        if rank == 0:
            return roll_call.host(_listen(port, size), size, secret)
        return roll_call.join(rank, size, address, port, secret)
    if rank == 0:
        listener = socket.create_server(("", 0), backlog=size)
        secret = secret or secrets.token_hex(16)
        board.set("roll call", f"{listener.getsockname()[1]} {secret}")
        del board  # is closed before anyone goes on: a port may be used again by the next of torch's stores
        return roll_call.host(listener, size, secret)
    port_text, secret = board.get("roll call").decode().split()
    del board
    return roll_call.join(rank, size, address, int(port_text), secret)


def _board(generation: int) -> Store | None:
    """torch's store, where it has the rendezvous' port; the core imports no framework, so it is found by name."""
    torch_store = sys.modules.get("ring_plugins.torch.rendezvous")
    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true"
    if not agents and (torch_store is None or not torch_store.owns_port()):
        return None
    try:
        torch_store = importlib.import_module("ring_plugins.torch.rendezvous")
    except ImportError as error:
        raise MissingDependency(
            f"torchrun's processes meet through torch, which is not installed ({error}): pip install torch."
        ) from error
    return cast("Store", torch_store.open_board(generation))


def _listen(port: int, size: int) -> socket.socket:
    end = time.monotonic() + _TAKEN
    while True:
        try:
            return socket.create_server(("", port), backlog=size)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and time.monotonic() < end:
                time.sleep(0.05)
                continue
            why = error
        if why.errno != errno.EADDRINUSE:
            raise LaunchError(f"rank 0 cannot listen at MASTER_PORT={port}: {why.strerror}.") from why
        raise LaunchError(
            f"MASTER_PORT={port} is taken on {socket.gethostname()}, by another job or by one that has not quite "
            "ended; "
            "set another number on all ranks."
        ) from why


def _open_transport(call: roll_call.Bootstrap, rank: int) -> tuple[TcpTransport, str]:
    """Agree on a network, listen there, and know where the others do; rank 0's address as well."""
    told = call.gather(own_interfaces(rank, address_towards(os.environ["MASTER_ADDR"])))
    offers = [read_interfaces(item) for item in told]
    networks = unmeasured(offers)
    choice = choose(offers, measure(networks, offers, rank, call.gather) if networks else None)
    if rank == 0 and choice.text:
        logger.info(f"{choice.text}.")
    transport = open_transport(rank, [offer.host for offer in offers], choice.addresses, call.gather)
    return transport, choice.addresses[0]
