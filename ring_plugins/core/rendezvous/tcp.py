"""Started by torchrun, or by anything that sets its variables: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT.

Rank 0 listens and the other ranks connect to it (bootstrap.py). They learn its port in one of two ways. Usually it is
MASTER_PORT. But torchrun's agent keeps that port for a store of torch's, and so does a script that has initialized
torch.distributed itself. Rank 0 then listens on any free port and publishes the number through that store. The core
imports no framework: the framework's plugin registers a `StoreProvider`, and the package registers a loader for
jobs whose launcher holds the port although the script has not imported the plugin.

**Libraries of a rank's process** are told which rank it is, too, in these variables and in TensorFlow's TF_CONFIG. Many
train on several processes if the environment speaks of several, and alone, without a word, if it does not: it says
nothing under mpirun and srun, and in a script that started its own ranks. So `init` sets the variables that are missing
(`export_members`), and `shutdown` removes them.

Processes that a rank starts inherit them, as they do under torchrun. To `init` in such a process they say nothing: they
are not a launcher's as long as those by which ranks meet still have the values whose checksums RING_EXPORTED lists, or
are gone. A launcher sets all of these; scripts that start others remove TF_CONFIG, or change LOCAL_RANK.

Not in a job that goes on after losses: its ranks and size change, and the variables could not.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import socket
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from ring_plugins.core.base import config
from ring_plugins.core.base.arguments import read_each
from ring_plugins.core.base.errors import LaunchError, MissingDependency
from ring_plugins.core.base.install import pip_command
from ring_plugins.core.base.log import flush_output, logger
from ring_plugins.core.base.member import Member, Members
from ring_plugins.core.linux.interfaces import address_towards
from ring_plugins.core.net.listener import Listener
from ring_plugins.core.net.network_choice import choose, measure, own_interfaces, read_interfaces, unmeasured
from ring_plugins.core.net.tcp import TcpTransport, open_transport
from ring_plugins.core.rendezvous import bootstrap
from ring_plugins.core.rendezvous.record import Launcher, LaunchRecord, Rendezvous, integer, read

#: Seconds to wait for a previous user of MASTER_PORT, such as a store of torch's that is being closed, to release it.
_PORT_RELEASE = 5.0
#: By these the ranks meet. The first two say which rank of how many a process is; left by something else, they may be
#: wrong.
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PLACE = VARIABLES[:2]


class Store(Protocol):
    """A key-value store that the ranks share, such as torch's TCPStore."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes:
        """The value of a key; waits until some rank has set it."""


class StoreProvider(Protocol):
    """A framework whose store may hold MASTER_PORT."""

    def owns_port(self) -> bool:
        """Whether this process has a store at MASTER_PORT already, or was given one."""

    def has_own_store(self) -> bool:
        """Whether the script gave the framework a store that is not at MASTER_PORT, such as a file."""

    def open_store(self, generation: int) -> Store:
        """The store, with keys of its own for the `generation`-th connection of the job."""


_provider: StoreProvider | None = None
_load_provider: Callable[[], StoreProvider] | None = None


def register_store_provider(provider: StoreProvider) -> None:
    """Let ranks meet through this framework's store if that holds MASTER_PORT."""
    global _provider
    _provider = provider


def register_store_loader(load: Callable[[], StoreProvider]) -> None:
    """Import a store provider with `load` if the launcher holds MASTER_PORT and no provider is registered."""
    global _load_provider
    _load_provider = load


def find(launcher: Launcher) -> LaunchRecord | None:
    """The record that torchrun's variables give; None if one of them is missing."""
    if _missing_variables():
        return None
    return read(launcher, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def half_started(_ranks: int | None) -> str:
    """What is wrong with a process whose variables speak of others, but not of where they are; "" if they do not."""
    present = [f"{name}={os.environ[name]}" for name in _PLACE if os.environ.get(name)]
    is_one_of_several = (integer("WORLD_SIZE") or 1) > 1 or (integer("RANK") or 0) > 0
    if not is_one_of_several and (not present or integer("WORLD_SIZE") is not None):
        return ""
    missing = [name for name in VARIABLES if not os.environ.get(name)]
    return (
        f"{' and '.join(present)} {'are' if len(present) > 1 else 'is'} set, but {' and '.join(missing)} "
        f"{'are' if len(missing) > 1 else 'is'} not, so this process cannot find the other ranks. Set "
        f"{', '.join(VARIABLES)} on every rank (MASTER_ADDR is the host of rank 0, MASTER_PORT a free port "
        "there, both equal on all ranks), or start with torchrun, `ring run` or mpirun. If it was not meant to be "
        f"one of several, unset {' and '.join(text.partition('=')[0] for text in present)}"
    )


def _missing_variables() -> list[str]:
    """Those of torchrun's variables that are needed here and not set."""
    has_own_store = _provider is not None and _provider.has_own_store()
    return [name for name in (_PLACE if has_own_store else VARIABLES) if not launchers_value(name)]


def connect(record: LaunchRecord, _ranks: int | None, generation: int) -> Rendezvous:
    """Meet the other ranks, and open sockets between them.

    Args:
        record: of this process.
        generation: how often this process has connected before.

    Raises:
        LaunchError: ranks do not find each other, are incompatible, or share no network; the text names them.
    """
    os.environ.update(record.variables)
    if missing := _missing_variables():
        raise LaunchError(
            f"{', '.join(missing)} not set in the environment; start with torchrun, with mpirun, "
            f"or set all of {', '.join(VARIABLES)}."
        )
    rank, size = integer("RANK"), integer("WORLD_SIZE")
    assert rank is not None
    assert size is not None
    if not 0 <= rank < size:
        raise LaunchError(f"RANK={rank} does not fit WORLD_SIZE={size}.")
    connections = _meet(rank, size, _inside_host(record), generation)
    try:
        transport, address = _open_transport(connections, rank)
    except BaseException:
        connections.close()
        raise

    def close() -> None:
        transport.close()
        connections.close()

    return Rendezvous(rank, size, connections.gather, transport, close, (address,), _end_process)


def wait_outside(record: LaunchRecord, join_info: Mapping[str, Any], world_rank: int) -> Rendezvous:
    """Meet nobody yet, but listen: this process is to take the place of a lost rank, and members will connect to it.

    Args:
        record: of this process.
        join_info: of this host (core/rendezvous/slots.py).
        world_rank: of this process.
    """
    assert record.rank is not None
    assert record.size is not None
    address = str(join_info["address"])
    listener = Listener(address, min(15.0, config.START_TIMEOUT.get()))
    own = [Member(world_rank, host=socket.gethostname(), address=address, port=listener.port)]
    listener.open(world_rank, own, str(join_info["secret"]), accepts_all=True)
    transport = TcpTransport(world_rank, own, listener)
    return Rendezvous(
        record.rank, record.size, lambda payload: [payload], transport, transport.close, (address,), _end_process
    )


def exchange(record: LaunchRecord, payload: Any) -> list[Any]:
    """Every rank's payload, in rank order, without staying connected.

    Args:
        record: as for `connect`.
        payload: anything that JSON can hold.

    Raises:
        LaunchError: as for `connect`.
    """
    os.environ.update(record.variables)
    assert record.rank is not None
    assert record.size is not None
    connections = _meet(record.rank, record.size, _inside_host(record), 0)
    try:
        return connections.gather(payload)
    finally:
        connections.close()


def _end_process(code: int) -> None:
    """End this process: torchrun then ends the other ranks, and a peer that waits sees its connection close."""
    flush_output()
    os._exit(code)


def _inside_host(record: LaunchRecord) -> str:
    """The address at which ranks meet that are all on one host, "" if they may be on several."""
    is_known = record.launcher.counts_ranks_of_host
    return "127.0.0.1" if is_known and record.local_size == integer("WORLD_SIZE") else ""


def _meet(rank: int, size: int, listen_at: str, generation: int) -> bootstrap.Bootstrap:
    address = listen_at or os.environ.get("MASTER_ADDR", "")
    store = _open_store(generation)
    secret = config.SECRET.get()
    if store is None:
        port = integer("MASTER_PORT") or 0
        if size > 1 and not 0 < port < 1 << 16:
            raise LaunchError(
                f"MASTER_PORT={port} is no port at which rank {rank} of {size} could meet the others: set one from 1 "
                "to 65535 that is free on the host of rank 0, the same on all ranks. Only torchrun chooses one itself."
            )
        if rank == 0:
            return bootstrap.serve(_listen(port, size, listen_at), size, secret)
        return bootstrap.join(rank, size, address, port, secret)
    # The store is closed before any rank goes on: the next of torch's stores may use its port again.
    if rank == 0:
        listener = socket.create_server((listen_at, 0), backlog=size)
        token = secrets.token_hex(16)
        store.set("bootstrap", f"{listener.getsockname()[1]} {token} {socket.gethostname()}")
        del store
        return bootstrap.serve(listener, size, secret + token)
    port, token, host = _read_bootstrap(store.get("bootstrap"))
    del store
    if not address:  # the script's own store, which says where the ranks are no more than the environment does
        address = "127.0.0.1" if host == socket.gethostname() else host
    return bootstrap.join(rank, size, address, port, secret + token)


def _read_bootstrap(value: bytes) -> tuple[int, str, str]:
    """Port, token and host that rank 0 has published.

    Raises:
        LaunchError: the store holds something else.
    """
    words = value.split() if value.isascii() and value.decode().isprintable() else []
    if len(words) != 3 or not words[0].isdigit() or not 0 < int(words[0][:6]) < 1 << 16:
        raise LaunchError(
            "the store of torch.distributed holds something other than rank 0's address: another release of "
            "ring_plugins wrote it, or somebody who can connect to the store."
        )
    return int(words[0]), words[1].decode(), words[2].decode()


def _open_store(generation: int) -> Store | None:
    """The store that holds MASTER_PORT, None if the port is free for rank 0."""
    agent_holds_port = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true"
    if not agent_holds_port and (_provider is None or not _provider.owns_port()):
        return None
    provider = _provider
    if provider is None:
        if _load_provider is None:
            raise LaunchError("torchrun's agent holds MASTER_PORT, and nothing has registered a store to meet through.")
        try:
            provider = _load_provider()
        except ImportError as error:
            raise MissingDependency(
                f"torchrun's processes meet through torch, which is not installed ({error}): {pip_command('torch')}"
            ) from error
    return provider.open_store(generation)


def _listen(port: int, size: int, address: str = "") -> socket.socket:
    end = time.monotonic() + _PORT_RELEASE
    while True:
        try:
            return socket.create_server((address, port), backlog=size)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise LaunchError(f"rank 0 cannot listen at MASTER_PORT={port}: {error.strerror}.") from error
            if time.monotonic() > end:
                raise LaunchError(
                    f"MASTER_PORT={port} is taken on {socket.gethostname()}, by another job, by one that is still "
                    "ending, or by something that this script opened before; set another port on all ranks."
                ) from error
        time.sleep(0.05)


def note_missing_secret() -> None:
    """Say so, on rank 0 of a job on several hosts, if it has no secret."""
    if not config.SECRET.get():
        logger.info(
            "RING_SECRET is not set: anyone who could reach rank 0 while the job started could have joined it. Set it "
            "to the same random text on all hosts (docs/security.md)."
        )


def _open_transport(connections: bootstrap.Bootstrap, rank: int) -> tuple[TcpTransport, str]:
    """Agree on a network and open sockets on it; returns rank 0's address as well."""
    master = os.environ.get("MASTER_ADDR", "")
    gathered = connections.gather(own_interfaces(rank, address_towards(master) if master else ""))
    hosts = read_each(gathered, read_interfaces)
    networks = unmeasured(hosts)
    measured = measure(networks, hosts, rank, connections.gather) if networks else None
    choice = choose(hosts, measured, config.LOSSES_TOLERATED.get() == config.OTHERS_MAY_COME)
    if rank == 0 and choice.text:
        logger.info(f"{choice.text}.")
    if rank == 0 and len({host.kernel for host in hosts}) > 1:
        note_missing_secret()
    transport = open_transport(rank, [host.host for host in hosts], choice.addresses, connections.gather)
    return transport, choice.addresses[0]


#: What a rank exports.
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TF_CONFIG")
#: TF_CONFIG names all ranks, and the kernel starts no program with a variable of more than 128 KiB.
_MOST_IN_TF_CONFIG = 1024


def launchers_value(name: str) -> str:
    """A variable as a launcher, or the user, has set it: "" if it is not set, or was exported by a rank."""
    names, checksums = _exported()
    given = [n for n, checksum in zip(NAMES, checksums, strict=False) if n in VARIABLES and _checksum(n) != checksum]
    is_ours = name in names and not any(map(os.environ.get, given))
    return "" if is_ours else os.environ.get(name, "")


def export_members(members: Members, ports: Sequence[int], addresses: Sequence[str]) -> None:
    """As `export`, for the members of a job that has just begun.

    Args:
        members: of the job.
        ports: by rank, one of its host that is free.
        addresses: at which all reach rank 0.
    """
    own, several = members.topology, members.topology.num_nodes > 1
    hosts = [(members.known[rank].addresses if several else ()) or ("127.0.0.1",) for rank in members.ranks]
    hosts[0] = (*(addresses if several else ()), *hosts[0])
    place = own.rank, own.size, own.local_rank, own.local_size
    export(place, [(of[0], port) for of, port in zip(hosts, ports, strict=True)])


def export(place: Sequence[int], ports: Sequence[tuple[str, int]]) -> None:
    """Set those of the variables that are missing or call this process another rank.

    Args:
        place: rank, number of ranks, and the same two on this host.
        ports: by rank, an address of its host and a port there that is free.
    """
    values = dict(zip(NAMES, map(str, (*place, *ports[0])), strict=False))
    if len(ports) <= _MOST_IN_TF_CONFIG:
        workers = [f"{address}:{port}" for address, port in ports]
        values["TF_CONFIG"] = json.dumps(
            {"cluster": {"worker": workers}, "task": {"type": "worker", "index": place[0]}}
        )
    names, checksums = _exported()  # by a rank that has started this one's launcher
    inherited = {n for n, checksum in zip(NAMES, checksums, strict=False) if n in names and _checksum(n) == checksum}
    chosen = {
        name: value
        for name, value in values.items()
        if not os.environ.get(name) or name in inherited or (name in _PLACE and os.environ[name] != value)
    }
    os.environ.update(chosen)
    if chosen:
        os.environ[config.EXPORTED.name] = " ".join([",".join(chosen), *map(_checksum, NAMES)])


def withdraw_exported() -> None:
    """Remove what a rank has exported, this process or one from which it has inherited it."""
    names, checksums = _exported()
    for name, checksum in zip(NAMES, checksums, strict=False):
        if name in names and _checksum(name) == checksum:
            os.environ.pop(name, None)
    os.environ.pop(config.EXPORTED.name, None)


def _exported() -> tuple[list[str], list[str]]:
    """The variables that a rank has exported, and the checksums that all of `NAMES` had then."""
    names, *checksums = config.EXPORTED.get().split() or ("",)
    return names.split(","), checksums


def _checksum(name: str) -> str:
    return f"{zlib.crc32(os.environ.get(name, '').encode('utf-8', 'surrogateescape')):x}"
