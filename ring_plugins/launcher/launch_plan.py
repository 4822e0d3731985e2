"""Decides from the options of `ring run` how many ranks a job has, where, how and with which variables they start."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import ArgumentError, LaunchError
from ring_plugins.core.base.install import pip_command
from ring_plugins.core.control.liveness import MOST_MEMBERS
from ring_plugins.core.control.mesh import MOST_RANKS
from ring_plugins.core.linux.process import cores
from ring_plugins.launcher import mpirun
from ring_plugins.launcher.discovery import first_hosts
from ring_plugins.launcher.hosts import allocated_hosts, is_this_host, parse_hosts, read_hostfile, share, slots
from ring_plugins.launcher.mpirun import JobSpec, Mpirun

BINDINGS = ("none", "core", "numa", "socket")
#: Variables that training and its libraries read. All others may differ between hosts.
_PREFIXES = (
    "RING_", "NCCL_", "GLOO_", "UCX_", "FI_", "OMP_", "MKL_", "OPENBLAS_", "KMP_", "GOMP_", "PYTHON",
    "CUDA_", "NVIDIA_", "TORCH_", "PYTORCH_", "KERAS_", "TF_", "XLA_", "JAX_", "PL_", "HF_", "WANDB_", "MLFLOW_",
    "HOROVOD_",
)  # fmt: skip
_NAMES = ("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX")
#: Describes one process to itself; another rank that inherited it would take that process's place.
_NEVER = (config.SPAWNED.name,)


@dataclass(frozen=True)
class Options:
    """The options of `ring run`; its help explains them."""

    command: tuple[str, ...]
    ranks: int | None = None
    hosts: str | None = None
    hostfile: str | None = None
    interface: str | None = None
    bind: str = "none"
    export: tuple[str, ...] = ()
    agent: str | None = None
    tag_output: bool = False
    output_directory: str | None = None
    mpirun: str | None = None
    mpirun_options: tuple[str, ...] = ()
    starter: Literal["auto", "mpirun", "python"] = "auto"
    on_failure: Literal["end", "continue", "replace"] = "end"
    min_ranks: int | None = None
    max_ranks: int | None = None
    standbys: int = 0
    host_discovery: str | None = None


@dataclass(frozen=True)
class LaunchPlan:
    """A job and what starts it.

    Attributes:
        job: the job.
        mpirun: the mpirun that starts it, None if this process, or supervisors of its own on several hosts, do.
        notices: what the user should know, one line each.
        provisional: those of the notices that hold only until the hosts' cores are known; `adapt` replaces them.
        is_local: whether all ranks run on this host.
        recovers: whether the other ranks go on when one is killed.
        replaces: whether another process takes its place.
        standbys: how many processes wait to do so.
        max_ranks: up to how many ranks the job may grow; 0 for no more than at the start.
        own_report: of this host, with which hosts are compared that are added later; None to compare nothing.
        host_discovery: the script that lists the hosts from now on, None if they stay.
    """

    job: JobSpec
    mpirun: Mpirun | None
    notices: tuple[str, ...] = ()
    provisional: tuple[str, ...] = ()
    is_local: bool = False
    recovers: bool = False
    replaces: bool = False
    standbys: int = 0
    max_ranks: int = 0
    own_report: Mapping[str, Any] | None = None
    host_discovery: str | None = None

    @property
    def hosts(self) -> tuple[str, ...]:
        """Hosts where ranks are started by ssh or the agent; none on one host, and where a scheduler starts them."""
        return tuple(part.host for part in self.job.shares)


def make_plan(options: Options, notify: Callable[[str], None] = lambda line: None) -> LaunchPlan:
    """Plan a job. Starts nothing but `mpirun --version`, and the script that lists hosts.

    Args:
        options: of `ring run`.
        notify: shows one line to the user while that script is waited for.

    Raises:
        ArgumentError: an option is wrong, or two contradict each other.
        LaunchError: the program does not exist, nothing here can run it on several hosts, or there are too few.
    """
    _check(options)
    if options.host_discovery is not None:
        options = _with_discovered_hosts(options, options.host_discovery, notify)
    allocation = allocated_hosts() if not options.hosts and not options.hostfile else []
    named = parse_hosts(options.hosts) if options.hosts else []
    hosts = named or (read_hostfile(options.hostfile) if options.hostfile else allocation)
    available = cores()
    ranks = options.ranks or (slots(hosts) if hosts else gpus() or available)
    shares = tuple(share(ranks, hosts)) if hosts else ()
    is_local = all(is_this_host(part.host) for part in shares) and options.host_discovery is None
    recovers = options.on_failure != "end"
    if recovers:
        _check_that_losses_can_be_tolerated(options, ranks, is_local)
        launcher, missing = None, ""
    else:
        launcher, missing = _choose_mpirun(options, is_local)
    most = max((part.ranks for part in shares), default=ranks)
    oversubscribed = (ranks if is_local else most) > available
    if oversubscribed and options.bind != "none":
        raise ArgumentError(
            f"--bind {options.bind}: {most} ranks on {available} cores would wait for each other; leave them unbound."
        )
    notices = []
    if missing:
        notices.append(f"{missing}; starting the ranks as processes of this host, which share memory.")
    if hosts and any(host.slots for host in hosts) and ranks > slots(hosts):
        notices.append(f"{ranks} ranks are more than the {slots(hosts)} slots of the hosts: they share them.")
    provisional = (_oversubscription(most, available),) if oversubscribed else ()
    notices += provisional
    interface = options.interface or config.INTERFACE.get() or None
    environment = exported_variables(options.export, max(1, available // most), interface)
    if recovers:
        environment |= {config.ON_FAILURE.name: options.on_failure, config.LOSSES_TOLERATED.name: "1"}
        environment |= {config.LOSSES_TOLERATED.name: config.OTHERS_MAY_COME} if options.host_discovery else {}
        environment |= {config.MIN_RANKS.name: str(options.min_ranks)} if options.min_ranks is not None else {}
        environment |= {config.MAX_RANKS.name: str(options.max_ranks)} if options.max_ranks is not None else {}
    if is_local:  # the ranks inherit what this process has
        environment = {name: value for name, value in environment.items() if value is not None}
    job = JobSpec(
        command=mpirun.resolve_program(options.command),
        ranks=ranks,
        shares=() if is_local or (allocation and not recovers) else shares,
        interface=interface,
        bind=options.bind,
        oversubscribed=oversubscribed,
        as_root=os.geteuid() == 0,
        agent=options.agent,
        environment=environment,
        tag_output=options.tag_output,
        output_directory=str(Path(options.output_directory).absolute()) if options.output_directory else None,
        options=options.mpirun_options,
    )
    return LaunchPlan(
        job,
        launcher,
        tuple(notices),
        provisional,
        is_local,
        recovers,
        options.on_failure == "replace",
        options.standbys,
        options.max_ranks or 0,
        host_discovery=options.host_discovery,
    )


def _with_discovered_hosts(options: Options, script: str, notify: Callable[[str], None]) -> Options:
    """The options with the hosts that a script lists once there are enough, and as many ranks as fit."""
    most = options.max_ranks or MOST_RANKS
    # A job of one rank cannot grow.
    least = max(options.min_ranks or options.ranks or 1, 1 if most == 1 else 2)
    found = first_hosts(script, least, notify)
    ranks = min(slots(found), most)
    return replace(
        options,
        hosts=",".join(f"{host.name}:{host.slots or 1}" for host in found),
        ranks=ranks,
        max_ranks=most,
    )


def exported_variables(
    wanted: Sequence[str], threads: int, interface: str | None, environment: Mapping[str, str] = os.environ
) -> dict[str, str | None]:
    """The variables that every rank gets: name to value, or to None for the value that this process has.

    Values that are None need not appear on a command line, where every user of the host could read them.

    Args:
        wanted: the user's additions, as `NAME` or `NAME=VALUE`.
        threads: OMP_NUM_THREADS, unless the user has set it.
        interface: network interface for NCCL and gloo, unless the user has set theirs.
        environment: of this process.

    Raises:
        ArgumentError: a wanted variable is not set here.
    """
    chosen: dict[str, str | None] = {
        name: None
        for name in sorted(environment)
        if (name.startswith(_PREFIXES) or name in _NAMES) and name not in _NEVER
    }
    if "OMP_NUM_THREADS" not in environment:
        chosen["OMP_NUM_THREADS"] = str(threads)
    if interface:
        chosen[config.INTERFACE.name] = interface
        is_subnet = "/" in interface  # which NCCL and gloo do not understand
        # "=": NCCL would else take every interface whose name begins so, such as eth10 for eth1.
        theirs = {"NCCL_SOCKET_IFNAME": f"={interface}", "GLOO_SOCKET_IFNAME": interface}
        if not is_subnet:
            chosen |= {name: value for name, value in theirs.items() if name not in environment}
    for text in wanted:
        name, equals, value = text.partition("=")
        if not equals and name not in environment:
            raise ArgumentError(f"-x {name}: {name} is not set here; set it, or write -x {name}=VALUE.")
        chosen[name] = value if equals else None
    return chosen


def adapt(plan: LaunchPlan, cores_of: Mapping[str, int]) -> LaunchPlan:
    """Adapt a plan to the hosts' numbers of cores, which `make_plan` does not know.

    Args:
        plan: the plan.
        cores_of: host name to its number of cores.
    """
    job = plan.job
    oversubscribed = [part for part in job.shares if part.ranks > cores_of.get(part.host, part.ranks)]
    notices = [_oversubscription(part.ranks, cores_of[part.host], part.host) for part in oversubscribed]
    environment = dict(job.environment)
    if environment.get("OMP_NUM_THREADS") is not None and "OMP_NUM_THREADS" not in os.environ:
        known = [cores_of[part.host] // part.ranks for part in job.shares if part.host in cores_of]
        environment["OMP_NUM_THREADS"] = str(max(1, min(known, default=1)))
    job = replace(job, oversubscribed=bool(oversubscribed), environment=environment)
    kept = [notice for notice in plan.notices if notice not in plan.provisional]
    return replace(plan, job=job, notices=(*kept, *notices), provisional=())


def _oversubscription(ranks: int, available: int, host: str = "") -> str:
    where = f" of {host}" if host else ""
    return f"{ranks} ranks share {available} cores{where}: they take turns, and every step waits for the slowest."


def gpus() -> int:
    """Number of NVIDIA GPUs that this host's driver and CUDA_VISIBLE_DEVICES offer.

    As in CUDA, what is behind an invalid name is not seen, and of slices of a GPU (MIG) only one is.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    present = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    if visible is None or not present:
        return present
    found = 0
    for name in map(str.strip, visible.split(",")):
        if name.startswith("MIG-"):
            return max(found, 1)
        if not name.startswith("GPU-") and not (name.isdigit() and int(name) < present):
            break
        found += 1
    return found


def _check(options: Options) -> None:
    if not options.command:
        raise ArgumentError("nothing to run: write `ring run -n 2 python train.py`.")
    if options.ranks is not None and options.ranks < 1:
        raise ArgumentError(f"-n {options.ranks} is not a positive number of ranks: give 1 or more.")
    if options.hosts and options.hostfile:
        raise ArgumentError("-H and --hostfile both name hosts: give one of them.")
    if options.host_discovery is not None and (options.hosts or options.hostfile):
        raise ArgumentError("--host-discovery-script, -H and --hostfile all name hosts: give one of them.")
    if options.host_discovery is not None and options.on_failure != "replace":
        raise ArgumentError(
            "--host-discovery-script needs --on-failure replace, with which ranks can join and leave a job."
        )
    if options.standbys < 0:
        raise ArgumentError(f"--standbys {options.standbys} is not a number of processes: give 0 or more.")
    if options.standbys and options.on_failure != "replace":
        raise ArgumentError(
            f"--standbys {options.standbys} needs --on-failure replace, with which standby processes take the places "
            "of lost ranks; or leave it out, and unset RING_STANDBYS."
        )
    if options.min_ranks is not None and options.on_failure == "end":
        raise ArgumentError(
            f"--min-ranks {options.min_ranks} needs --on-failure continue or replace, with which a job goes on when "
            "ranks are lost; or leave it out, and unset RING_MIN_RANKS."
        )
    if options.max_ranks and options.on_failure != "replace":
        raise ArgumentError(
            f"--max-ranks {options.max_ranks} needs --on-failure replace, with which further processes can join a job; "
            "or leave it out, and unset RING_MAX_RANKS."
        )
    if options.bind not in BINDINGS:
        raise ArgumentError(f"--bind {options.bind} is not one of {', '.join(BINDINGS)}.")


def _check_that_losses_can_be_tolerated(options: Options, ranks: int, is_local: bool) -> None:
    option = f"--on-failure {options.on_failure}"
    remedy = f"leave out {option}, and unset RING_ON_FAILURE."
    if not is_local and options.standbys:
        raise ArgumentError(
            f"--standbys {options.standbys} works on this host only: name no others, or leave it out and unset "
            "RING_STANDBYS. Lost ranks are then replaced by processes that start at that moment."
        )
    if options.starter == "mpirun" or options.mpirun is not None or options.mpirun_options:
        raise ArgumentError(f"{option} does not work with mpirun, which ends all ranks: {remedy}")
    if options.min_ranks is not None and not 1 <= options.min_ranks <= ranks:
        raise ArgumentError(
            f"--min-ranks {options.min_ranks} is not between 1 and the {ranks} ranks of the job: change it, or "
            f"{config.MIN_RANKS.name} if that sets it."
        )
    most, limit = options.max_ranks, MOST_MEMBERS if is_local else MOST_RANKS
    if most is not None and not ranks <= most <= limit:
        raise ArgumentError(
            f"--max-ranks {most} is not between the {ranks} ranks of the job and {limit}: change it, or "
            f"{config.MAX_RANKS.name} if that sets it."
        )
    if options.standbys > (most or ranks):
        raise ArgumentError(
            f"--standbys {options.standbys} is more than the {most or ranks} ranks whose places standbys can take."
        )
    if ranks == 1 and most is not None and most > 1:
        raise ArgumentError(f"--max-ranks {most}: a job of one rank cannot grow. Start it with -n 2 or more.")


def _choose_mpirun(options: Options, is_local: bool) -> tuple[Mpirun | None, str]:
    """The mpirun to use, or None and what is missing for one."""
    if options.starter == "python":
        if not is_local:
            raise ArgumentError("--with python starts ranks on this host only; several hosts need mpirun.")
        return None, ""
    found = mpirun.find(options.mpirun)
    if found is None:
        missing = "there is no mpirun beside this Python or on PATH"
    elif importlib.util.find_spec("mpi4py") is None:
        missing = "mpi4py is not installed"
    else:
        return found, ""
    if is_local and options.starter == "auto" and options.mpirun is None:
        return None, missing
    raise LaunchError(f"{missing}; add it on every host with: {pip_command('mpi')}")
