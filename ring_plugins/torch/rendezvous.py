"""Rendezvous of our ranks through a torch store, and of torch's ranks through our world.

Under torchrun the agent keeps MASTER_PORT for torch's store, and a script may have given torch.distributed a store
before it calls us: our ranks then find each other through that store (`open_store`). Under mpirun, or in a script that
started its own ranks, torch lacks RANK and MASTER_ADDR, so `init_process_group` gets a store that the ranks of our
world share (`replace_env_rendezvous`).
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, cast

import torch.distributed
from torch.distributed import HashStore, PrefixStore, Store, TCPStore, rendezvous  # type: ignore[attr-defined]  # torch re-exports these unmarked

from ring_plugins.core import rendezvous as launch
from ring_plugins.core import world
from ring_plugins.core.base.errors import LaunchError

#: Set by torchrun and launchers like it.
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TIMEOUT = timedelta(seconds=300)


def owns_port() -> bool:
    """Whether torch already has a store, at MASTER_PORT or given by the script; our ranks then use it too."""
    return bool(_adopted) or torch.distributed.is_initialized()


def open_store(generation: int = 0, timeout: timedelta = _TIMEOUT) -> Store:
    """Open a store that the ranks share, with keys that nothing else uses.

    Args:
        generation: how many stores this job opened before, the same on all ranks.
        timeout: how long ranks may take to arrive.

    Raises:
        LaunchError: the store cannot be reached.
    """
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    rank, size, host = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), os.environ["MASTER_ADDR"]
    if _adopted:
        return PrefixStore(f"ring_plugins/{restart}/{generation}", _adopted.pop())
    try:
        # torch's own rendezvous knows whether torchrun's agent hosts the store (TORCHELASTIC_USE_AGENT_STORE) or
        # rank 0 does, and in the latter case lets several users share the port.
        store = next(rendezvous("env://", rank, size, timeout=timeout))[0]
    except (RuntimeError, ValueError) as error:
        raise LaunchError(
            f"rank {rank} of {size} could not reach the others at MASTER_ADDR={host} "
            f"MASTER_PORT={os.environ['MASTER_PORT']}: {error}. Are all ranks running, and is the port free and open?"
        ) from error
    store.set_timeout(timeout)
    return PrefixStore(f"ring_plugins/{restart}/{generation}", store)


#: At most one store, which the next `open_store` uses instead of the launcher's.
_adopted: list[Store] = []


def adopt(store: Store, rank: int, size: int) -> None:
    """Make the next `init` find the other ranks through a store that the script gave torch.distributed.

    For scripts that start their processes themselves, as with torch.multiprocessing.spawn. The environment is set to
    the script's arguments of `init_process_group`.
    """
    base: Any = innermost(store)
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), str(size)
    os.environ["MASTER_ADDR"] = getattr(base, "host", "127.0.0.1")
    os.environ["MASTER_PORT"] = str(getattr(base, "port", 0))
    _adopted[:] = [store]


def innermost(store: Store) -> Store:
    """The store under all prefixes."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def replace_env_rendezvous() -> None:
    """Let `init_process_group` work without torchrun: under mpirun, or in a script that started its own ranks.

    torch 2.13, torch/distributed/rendezvous.py:229-275 raises where RANK is missing, and
    `register_rendezvous_handler` (lines 27-49) refuses a scheme that is taken, hence the private table. If RANK and the
    other variables are set, torch's own handler is used the first time.
    """
    handlers = cast("dict[str, Callable[..., Iterator[tuple[Store, int, int]]]]", _handlers())
    torch_handler = handlers["env"]
    if getattr(torch_handler, "asks_ring_plugins", False):
        return

    served = 0

    def env_handler(url: str, timeout: timedelta = _TIMEOUT, **options: Any) -> Iterator[tuple[Store, int, int]]:
        nonlocal served
        if "rank=" in url:
            return torch_handler(url, timeout=timeout, **options)
        complete = all(os.environ.get(name) for name in VARIABLES)
        # The launcher's address is safe only the first time: later the store may hold keys of a destroyed group, or
        # rank 0 may still be closing it while another rank connects.
        is_stale = served > 0 and _world_is_the_environment()
        served += 1
        if (complete and not is_stale) or _is_half_set():
            return torch_handler(url, timeout=timeout, **options)
        return iter([store_from_world(timeout)])

    env_handler.asks_ring_plugins = True  # type: ignore[attr-defined]
    handlers["env"] = env_handler


def _world_is_the_environment() -> bool:
    """Whether our world has the rank and size that the environment variables say."""
    if not world.is_initialized():
        return False
    topology = world.current().topology
    return [str(topology.rank), str(topology.size)] == [os.environ.get("RANK"), os.environ.get("WORLD_SIZE")]


def _is_half_set() -> bool:
    """Whether a process without a launcher has only some of torch's variables; torch's error names the others."""
    if world.is_initialized() or launch.detect().kind != "single":
        return False
    return any(os.environ.get(name) for name in VARIABLES)


def store_from_world(timeout: timedelta = _TIMEOUT) -> tuple[Store, int, int]:
    """A new store among the ranks of our world, this rank, and the world size; collective."""
    own = world.init()
    topology = own.topology
    if topology.size == 1:
        return HashStore(), 0, 1
    if topology.rank == 0:
        one_host = topology.num_nodes == 1
        addresses = ["127.0.0.1"] if one_host else _own_addresses()
        store = _listen(addresses[0] if one_host else "0.0.0.0", topology.size, timeout)
        own.communicator.broadcast_object((addresses, store.port), root=0)
    else:
        addresses, port = own.communicator.broadcast_object(None, root=0)
        store = _connect(addresses, port, topology.size, timeout)
    return store, topology.rank, topology.size


def _handlers() -> Any:
    # The package attribute of this name is the function; only sys.modules has the module.
    return sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers


def _listen(host: str, size: int, timeout: timedelta) -> TCPStore:
    return TCPStore(host, 0, size, True, timeout, wait_for_workers=False)


def _connect(addresses: list[str], port: int, size: int, timeout: timedelta) -> TCPStore:
    for address in addresses:
        try:
            with socket.create_connection((address, port), timeout=10):
                pass
        except OSError:
            continue
        return TCPStore(address, port, size, False, timeout, wait_for_workers=False)
    raise LaunchError(
        f"{socket.gethostname()} cannot reach rank 0 on port {port} at any of {', '.join(addresses)}. "
        "Do the hosts' names resolve, and does a firewall block ports between them?"
    )


def _own_addresses() -> list[str]:
    name = socket.gethostname()
    found = [name]
    with contextlib.suppress(OSError):
        found += [str(info[4][0]) for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    return list(dict.fromkeys(address for address in found if not address.startswith("127.")))
