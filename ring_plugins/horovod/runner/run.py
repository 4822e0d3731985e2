"""Horovod's `run`: `ring_plugins.run` with Horovod's arguments."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.base.log import logger
from ring_plugins.launcher.function import run as ring_run
from ring_plugins.launcher.hosts import read_hostfile
from ring_plugins.launcher.outcomes import RankResults

T = TypeVar("T")


def run(
    func: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[int] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: int | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: Iterable[str] | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> RankResults[T]:
    """Call `func(*args, **kwargs)` on several ranks, on this host or several, and return the result of each.

    Args:
        func, args, kwargs: the call, the same on every rank.
        num_proc, np: number of ranks.
        min_num_proc, min_np: lets the others go on when a rank is killed, as long as so many are left; another process
            takes its place.
        hosts, hostfile: where they run: `"host1:2,host2:2"`, or a file with lines such as `host1 slots=2`. On this
            host by default.
        network_interfaces, network_interface: that carry the traffic between hosts.
        start_timeout: seconds until all ranks must have met.
        use_gloo, use_mpi, mpi_args, disable_cache, verbose: have no effect; ranks are started without MPI.
        max_num_proc, max_np, slots, reset_limit, cooldown_range, output_filename: have no effect, which is logged.
        host_discovery_script, ssh_port, ssh_identity_file, executable: are rejected.

    Returns:
        The results in rank order, as `ring_plugins.run` returns them.

    Raises:
        RankFailed: the function raised on a rank, or the rank's process died.
        ArgumentError: an argument is not supported, or two contradict each other.
        LaunchError: this process is itself a rank, or the ranks could not be started.
    """
    if hosts is not None and hostfile is not None:
        raise ArgumentError(f"hosts={hosts!r} and hostfile={hostfile!r} both say where ranks run; pass one of them.")
    if use_gloo and use_mpi:
        raise ArgumentError("use_gloo=True and use_mpi=True contradict each other; pass neither: ranks need no MPI.")
    rejected: dict[str, tuple[Any, str]] = {
        "host_discovery_script": (
            host_discovery_script,
            "name the hosts of now in hosts=; `ring run` takes such a script",
        ),
        "ssh_port": (ssh_port, "write `Port` for these hosts into ~/.ssh/config"),
        "ssh_identity_file": (ssh_identity_file, "write `IdentityFile` for these hosts into ~/.ssh/config"),
        "executable": (None if executable == sys.executable else executable, "call run() from that Python"),
    }
    for name, (value, instead) in rejected.items():
        if value is not None:
            raise ArgumentError(f"{name}={value!r} is not supported here: {instead}.")
    without_effect = {
        "max_num_proc": max_np if max_num_proc is None else max_num_proc,
        "slots": slots,
        "reset_limit": reset_limit,
        "cooldown_range": cooldown_range,
        "output_filename": output_filename,
    }
    if found := [f"{name}={value!r}" for name, value in without_effect.items() if value is not None]:
        logger.warning("horovod.run: %s: no effect; `ring run` has --max-ranks and --output-dir.", ", ".join(found))
    if hostfile is not None:
        hosts = ",".join(f"{host.name}:{host.slots or 1}" for host in read_hostfile(hostfile))
    interfaces = [network_interface] if network_interface else network_interfaces
    least = min_np if min_num_proc is None else min_num_proc
    return ring_run(
        func,
        args,
        kwargs,
        num_proc if np is None else np,
        hosts=hosts,
        interface=",".join(interfaces) if interfaces else None,
        env={config.START_TIMEOUT.name: str(start_timeout)} if start_timeout else None,
        on_failure=None if least is None else "replace",
        min_ranks=least,
    )
