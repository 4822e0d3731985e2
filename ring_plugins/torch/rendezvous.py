"""Rendezvous of our ranks through a torch store, and of torch's ranks through our world.

Under torchrun the agent keeps MASTER_PORT for torch's store, and a script may have given torch.distributed a store
before it calls us: our ranks then find each other through that store (`open_store`). Under mpirun, or in a script that
started its own ranks, torch lacks RANK and MASTER_ADDR, so `init_process_group` gets a store that the ranks of our
world share (`replace_env_rendezvous`).
"""

from __future__ import annotations

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
from ring_plugins.core.collectives.fingerprint import purpose
from ring_plugins.core.groups import Group, communicator_of
from ring_plugins.core.rendezvous import tcp

_TIMEOUT = timedelta(seconds=300)


def owns_port() -> bool:
    """Whether torch already has a store, at MASTER_PORT or given by the script; our ranks then use it too."""
    return bool(_adopted) or torch.distributed.is_initialized()


def has_own_store() -> bool:
    """Whether the script gave torch.distributed a store without a port, such as a file."""
    return bool(_adopted) and not _has_port(_adopted[0])


def open_store(generation: int = 0, timeout: timedelta = _TIMEOUT) -> Store:
    """Open a store that the ranks share, with keys that nothing else uses.

    Args:
        generation: how many stores this job opened before, the same on all ranks.
        timeout: how long ranks may take to arrive.

    Raises:
        LaunchError: the store cannot be reached.
    """
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if _adopted:
        store = _adopted[0] if has_own_store() else _adopted.pop()
        return PrefixStore(f"ring_plugins/{restart}/{generation}", store)
    rank, size, host = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), os.environ["MASTER_ADDR"]
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


#: At most one store, which the next `open_store` uses instead of the launcher's. A store without a port also serves
#: later calls, since environment variables cannot describe it.
_adopted: list[Store] = []


def adopt(store: Store, rank: int, size: int) -> None:
    """Make the next `init` find the other ranks through a store that the script gave torch.distributed.

    For scripts that start their processes themselves, as with torch.multiprocessing.spawn. The environment is set to
    the script's arguments of `init_process_group`.
    """
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), str(size)
    if _has_port(store):
        base: Any = innermost(store)
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = base.host, str(base.port)
    _adopted[:] = [store]


def _has_port(store: Store) -> bool:
    return getattr(innermost(store), "port", None) is not None


def innermost(store: Store) -> Store:
    """The store under all prefixes."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def replace_env_rendezvous() -> None:
    """Let `init_process_group` work without torchrun: under mpirun, or in a script that started its own ranks.

    torch 2.13, torch/distributed/rendezvous.py:229-275 raises where RANK is missing, and
    `register_rendezvous_handler` (lines 27-49) rejects a scheme that is taken, hence the private table. If RANK and the
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
        values = [tcp.launchers_value(name) for name in tcp.VARIABLES]
        if world.is_initialized():
            # The launcher's address is safe only the first time: later the store may hold keys of a destroyed group, or
            # rank 0 may still be closing it while another rank connects.
            own = world.current().topology
            ours, said = [str(own.rank), str(own.size)], [os.environ.get("RANK"), os.environ.get("WORLD_SIZE")]
            is_torchs = all(values) and not (served > 0 and ours == said)
        else:  # torch's error names the variables that are missing, where there is no launcher
            is_torchs = any(values) if launch.detect().launcher.is_none else all(values)
        served += 1
        return torch_handler(url, timeout=timeout, **options) if is_torchs else iter([store_from_world(timeout)])

    env_handler.asks_ring_plugins = True  # type: ignore[attr-defined]
    handlers["env"] = env_handler


def store_from_world(timeout: timedelta = _TIMEOUT, group: Group | None = None) -> tuple[Store, int, int]:
    """A new store among the ranks of our world or a group, this one's place among them, and how many; collective."""
    own = world.init()
    ranks = communicator_of(group)
    if ranks.size == 1:
        return HashStore(), 0, 1
    if ranks.rank == 0:
        addresses = (own.addresses() if own.topology.num_nodes > 1 else []) or ["127.0.0.1"]
        store = _listen(addresses[0] if len(addresses) == 1 else "", ranks.size, timeout)
        ranks.broadcast_object((addresses, store.port), root=0, purpose="init_process_group")
    else:
        addresses, port = ranks.broadcast_object(None, root=0, purpose="init_process_group")
        store = _connect(addresses, port, ranks.size, timeout)
    with purpose("init_process_group"):
        ranks.barrier()  # the store lives in the first, which may be refused what it wants it for
    return store, ranks.rank, ranks.size


def _handlers() -> Any:
    # The package attribute of this name is the function; only sys.modules has the module.
    return sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers


def _listen(address: str, size: int, timeout: timedelta) -> TCPStore:
    """A store that listens at one address only, "" for all. A TCPStore left to itself listens at all addresses."""
    with socket.create_server((address, 0), backlog=max(size, 128)) as listener:
        port = listener.getsockname()[1]
        own = address or "127.0.0.1"
        return TCPStore(own, port, size, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach())


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
        "Does a firewall block ports between the hosts? All TCP ports above 1023 must be open."
    )
