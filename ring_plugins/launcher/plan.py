"""From what a user asked for to what is started: how many ranks, where, and by what."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import ArgumentError, LaunchError
from ring_plugins.core.linux.process import cores
from ring_plugins.launcher import mpirun
from ring_plugins.launcher.environment import exported_variables, threads_per_rank
from ring_plugins.launcher.hosts import Host, allocated_hosts, is_this_host, parse_hosts, read_hostfile, share, slots
from ring_plugins.launcher.mpirun import Mpirun, Request

BINDINGS = ("none", "core", "numa", "socket")


@dataclass(frozen=True)
class Options:
    """What `ring run` was asked for; see its help."""

    command: tuple[str, ...]
    ranks: int | None = None
    hosts: str | None = None
    hostfile: str | None = None
    interface: str | None = None
    bind: str = "none"
    exports: tuple[str, ...] = ()
    agent: str | None = None
    tag_output: bool = False
    output_directory: str | None = None
    mpirun: str | None = None
    mpirun_options: tuple[str, ...] = ()
    by: Literal["auto", "mpirun", "python"] = "auto"


@dataclass(frozen=True)
class Plan:
    """What is going to happen.

    Attributes:
        request: the job.
        by: the mpirun that starts it, or None: this process starts the ranks.
        notices: what the user should know about it, a line each.
        hosts: names of the hosts whose ranks are started through an agent or ssh; [] on one host or where a scheduler
            starts them.
    """

    request: Request
    by: Mpirun | None
    notices: tuple[str, ...] = ()
    hosts: tuple[str, ...] = field(default=())


def plan(options: Options) -> Plan:
    """Decide what is started, without starting anything but `mpirun --version`.

    Raises:
        ArgumentError: options that contradict each other or cannot be used.
        LaunchError: no program to run, or nothing that could run it on several hosts.
    """
    _check(options)
    allocation = allocated_hosts() if not options.hosts and not options.hostfile else []
    hosts = _named_hosts(options) or allocation
    available = cores()
    ranks = options.ranks or (slots(hosts) if hosts else accelerators() or available)
    shares = tuple(share(ranks, hosts)) if hosts else ()
    alone = all(is_this_host(part.host) for part in shares)
    launcher, reason = _choose(options, alone)
    most = max((part.ranks for part in shares), default=ranks)
    crowded = (ranks if alone else most) > available
    if crowded and options.bind != "none":
        raise ArgumentError(
            f"--bind {options.bind}: {most} ranks on {available} cores would wait for each other; leave them unbound."
        )
    notices = []
    if reason:
        notices.append(f"{reason}; starting the ranks as processes of this host, which meet in shared memory.")
    if hosts and any(host.slots for host in hosts) and ranks > slots(hosts):
        notices.append(f"{ranks} ranks are more than the {slots(hosts)} slots of the hosts: they share them.")
    if crowded:
        notices.append(f"{most} ranks share {available} cores: they take turns, and every step waits for the slowest.")
    request = Request(
        command=mpirun.program_and_arguments(options.command),
        ranks=ranks,
        shares=() if alone or allocation else shares,
        interface=options.interface or config.INTERFACE.get() or None,
        bind=options.bind,
        crowded=crowded,
        as_root=os.geteuid() == 0,
        agent=options.agent,
        exports=_exports(options, threads_per_rank(available, most), alone),
        tag_output=options.tag_output,
        output_directory=str(Path(options.output_directory).absolute()) if options.output_directory else None,
        options=options.mpirun_options,
    )
    return Plan(request, launcher, tuple(notices), tuple(part.host for part in request.shares))


def fit(planned: Plan, found: Mapping[str, int]) -> Plan:
    """The plan, with what depends on the number of cores of other hosts.

    Args:
        planned: made without knowing them.
        found: cores of each host.
    """
    request = planned.request
    crowded = [part for part in request.shares if part.ranks > found.get(part.host, part.ranks)]
    notices = [
        f"{part.ranks} ranks share {found[part.host]} cores of {part.host}: they take turns, and every step waits for "
        "the slowest."
        for part in crowded
    ]
    exports = dict(request.exports)
    if exports.get("OMP_NUM_THREADS") is not None and "OMP_NUM_THREADS" not in os.environ:
        known = [threads_per_rank(found[part.host], part.ranks) for part in request.shares if part.host in found]
        exports["OMP_NUM_THREADS"] = str(min(known, default=1))
    request = replace(request, crowded=bool(crowded), exports=exports)
    kept = [notice for notice in planned.notices if "they take turns" not in notice]
    return replace(planned, request=request, notices=(*kept, *notices))


def accelerators() -> int:
    """How many NVIDIA devices this host offers, as far as its driver and CUDA_VISIBLE_DEVICES say."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    present = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    if visible is None or not present:
        return present
    return len([device for device in visible.split(",") if device.strip() not in ("", "-1")])


def _check(options: Options) -> None:
    if not options.command:
        raise ArgumentError("nothing to run: write `ring run -n 2 python train.py`.")
    if options.ranks is not None and options.ranks < 1:
        raise ArgumentError(f"-n {options.ranks} is not a positive number of ranks.")
    if options.hosts and options.hostfile:
        raise ArgumentError("-H and --hostfile both name hosts: give one of them.")
    if options.bind not in BINDINGS:
        raise ArgumentError(f"--bind {options.bind} is not one of {', '.join(BINDINGS)}.")


def _named_hosts(options: Options) -> Sequence[Host]:
    if options.hosts:
        return parse_hosts(options.hosts)
    return read_hostfile(options.hostfile) if options.hostfile else []


def _choose(options: Options, alone: bool) -> tuple[Mpirun | None, str]:
    """The mpirun, or None and the reason for doing without."""
    if options.by == "python":
        if not alone:
            raise ArgumentError("--with python starts ranks on this host only; several hosts need mpirun.")
        return None, ""
    found = mpirun.find(options.mpirun)
    if found is None:
        missing = "there is no mpirun beside this Python or on PATH"
    elif importlib.util.find_spec("mpi4py") is None:
        missing = "mpi4py is not installed"
    else:
        return found, ""
    if alone and options.by == "auto" and options.mpirun is None:
        return None, missing
    raise LaunchError(f'{missing}; add it on every host with: pip install "ring_plugins[mpi]"')


def _exports(options: Options, threads: int, alone: bool) -> dict[str, str | None]:
    chosen = exported_variables(options.exports, threads, options.interface or config.INTERFACE.get())
    if alone:  # the ranks inherit everything else
        return {name: value for name, value in chosen.items() if value is not None}
    return chosen
