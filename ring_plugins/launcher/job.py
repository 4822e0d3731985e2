"""Runs a launch plan: starts mpirun or the ranks, watches them, and ends all of them together."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
from collections.abc import Callable, Mapping
from functools import partial

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import name_ranks
from ring_plugins.core.control.liveness import MOST_MEMBERS
from ring_plugins.core.control.parent_notifier import ParentNotifier
from ring_plugins.core.linux.shared_memory import Segment
from ring_plugins.core.rendezvous.slots import Slots
from ring_plugins.core.rendezvous.spawn import SharedMemoryRendezvous, child_environment, ending, silent_end
from ring_plugins.launcher import mpirun, preflight, several_hosts
from ring_plugins.launcher.growth import GrowthRequests
from ring_plugins.launcher.hosts import is_this_host
from ring_plugins.launcher.hung_mpirun import HungMpirun, OtherHosts
from ring_plugins.launcher.launch_plan import LaunchPlan
from ring_plugins.launcher.lost_host import LostHost
from ring_plugins.launcher.output import Relay
from ring_plugins.launcher.replacements import Replacements, has_vanished, how_often
from ring_plugins.launcher.standbys import Standbys
from ring_plugins.launcher.supervision import Supervisor

_DEAF = "ended every rank because the thread that reads mpirun's errors died; its traceback is above."


def shell_command(plan: LaunchPlan) -> str:
    """The command that `run` runs, in a form that can be pasted into a shell."""
    if plan.mpirun is not None:
        return shlex.join(mpirun.command_line(plan.mpirun, plan.job))
    variables = [f"{name}={value}" for name, value in plan.job.environment.items() if value is not None]
    command = shlex.join(["env", *variables, *plan.job.command] if variables else plan.job.command)
    where = ", ".join(f"{part.ranks} on {part.host}" for part in plan.job.shares if plan.hosts)
    return f"{command}  # ranks: {where}" if where else command


def run(plan: LaunchPlan, notify: Callable[[str], None]) -> int:
    """Run a job to its end.

    Args:
        plan: the job and what starts it.
        notify: shows one line to the user.

    Returns:
        The exit status: 0 only if every rank exited with 0, or, where losses are tolerated, all that were not killed.
    """
    own = _rendezvous(plan) if plan.mpirun is None and not plan.hosts else None
    with Supervisor(plan.recovers, own.slots if own is not None else None) as supervisor:
        if plan.mpirun is not None:
            status, why = _run_mpirun(plan, supervisor)
        elif own is None:
            status, why = several_hosts.run(plan.job, plan.replaces, plan.max_ranks, supervisor, notify)
        else:
            status, why = _run_ranks(plan, own, supervisor, notify)
        if why:
            notify(why)
        if supervisor.signalled is not None:
            notify(f"ended every rank because of {supervisor.signalled.name}.")
    return status


def _run_mpirun(plan: LaunchPlan, supervisor: Supervisor) -> tuple[int, str | None]:
    assert plan.mpirun is not None
    with ParentNotifier() as notifier, contextlib.ExitStack() as stack:
        environment = {**os.environ, **notifier.environment}
        lost = stack.enter_context(LostHost()) if plan.mpirun.flavor == "Open MPI" and not plan.is_local else None
        # On SIGTERM mpirun ends its ranks on all hosts; whatever remains on this one is killed.
        process = supervisor.start(
            mpirun.command_line(plan.mpirun, plan.job),
            environment,
            end_signal=signal.SIGTERM,
            stderr=None if lost is None else lost.stderr,
        )
        if lost is not None:
            lost.start()
        others = _other_hosts(plan, process.pid)
        if others is not None:
            supervisor.own_helpers = others.pids
        hangs = HungMpirun(process.pid, plan.is_local, notifier.first_message, others)

        def find_trouble() -> str | None:
            return _DEAF if lost is not None and lost.has_died else hangs()

        status, why = supervisor.wait(find_trouble)
        stack.close()
        if lost is not None and lost.has_died:
            return status or 1, _DEAF
        cause = notifier.first_message() if supervisor.signalled is None else None
        if cause is None and lost is not None and lost.found:
            cause = "mpirun lost a host and ended the ranks of the others"
        # Open MPI 5 exits with 0 after it has lost a host. The cause is repeated as the last line: what the ranks
        # printed stands above mpirun's own banners.
        return status or (1 if cause else 0), why or (cause and f"{cause.rstrip('.')}.")


def _other_hosts(plan: LaunchPlan, mpirun: int) -> OtherHosts | None:
    """The hosts to ask whether ranks still run there, None if that is not possible."""
    hosts = [part.host for part in plan.job.shares if part.ranks and not is_this_host(part.host)]
    is_known = plan.mpirun is not None and plan.mpirun.uses_prrte and not plan.is_local and plan.job.shares
    return OtherHosts(preflight.login(plan.job), hosts, mpirun) if is_known else None


def _rendezvous(plan: LaunchPlan) -> SharedMemoryRendezvous:
    """In which the ranks that this process starts on this host meet, as it sees it."""
    ranks, most = plan.job.ranks, max(plan.max_ranks, plan.job.ranks)
    return SharedMemoryRendezvous(Segment.create(SharedMemoryRendezvous.nbytes(ranks, most)), 0, ranks, [], most)


def _run_ranks(
    plan: LaunchPlan, rendezvous: SharedMemoryRendezvous, supervisor: Supervisor, notify: Callable[[str], None]
) -> tuple[int, str | None]:
    job, segment, slots = plan.job, rendezvous.segment, rendezvous.slots
    most = slots.number
    variables: Mapping[str, str] = {name: value for name, value in job.environment.items() if value is not None}
    with Relay(job.tag_output, job.output_directory) as relay, contextlib.ExitStack() as stack:
        inherited = {name: value for name, value in os.environ.items() if name != config.JOINS.name}

        def start(slot: int | None, world_rank: int) -> subprocess.Popen[bytes]:
            """Start a rank, a process that takes the slot of one, or, without a slot, a standby."""
            is_new = world_rank >= job.ranks
            was_there = slot is None or slot < len(supervisor.processes)
            out, err = relay.files(world_rank if slot is None else slot, again=is_new and was_there)
            joins = {config.JOINS.name: str(world_rank)} if is_new else {}
            size = max(job.ranks, slots.size_until_joined(slot) if is_new and slot is not None else 0)
            own = child_environment(segment, slot, size, 0, most)
            process = supervisor.start(
                job.command,
                {**inherited, **variables, **own, **joins},
                pass_fds=[segment.fd],
                stdin=None if world_rank == 0 else subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                index=slot if is_new else None,
                is_standby=slot is None,
            )
            if is_new:
                relay.start()
            return process

        for rank in range(job.ranks):
            start(rank, rank)
        relay.start()
        unused = iter(range(most, MOST_MEMBERS))
        standbys = Standbys(supervisor, slots, plan.standbys, unused, partial(start, None), relay.rename)
        told = notify if plan.replaces else None
        replacements = Replacements(supervisor, slots, job.ranks, unused, start, told, standbys)
        supervisor.is_out = replacements.is_out
        if plan.recovers:  # else it is the last line
            supervisor.tell_of_memory = lambda rank: notify(f"rank {rank} {supervisor.silent_end(rank)}.")
        requests = stack.enter_context(GrowthRequests(replacements.add)) if plan.replaces else None

        def find_missing_rank() -> str | None:
            """A rank that ended before or in init(), where the others wait for it; fills the places of lost ones."""
            if requests is not None:
                requests.poll()
            replacements.tick()
            rounds = [rendezvous.rounds(rank) for rank in range(job.ranks)]
            for rank, process in enumerate(supervisor.processes[: job.ranks]):
                if rounds[rank] < max(rounds) and (code := process.poll()) is not None:
                    if rendezvous.rounds(rank) == max(rounds):  # it came meanwhile, and ended
                        continue
                    return (
                        f"rank {rank} {silent_end(code) if code < 0 else f'ended ({ending(code)})'} before it "
                        f"{'completed' if rounds[rank] else 'reached'} ring_plugins.init(), where the others wait for "
                        f"it{'' if code < 0 else '; its own output says why'}."
                    )
            return None

        status, why = supervisor.wait(find_missing_rank)
    return status, why or _failed_rank(supervisor, slots, replacements)


def _failed_rank(supervisor: Supervisor, slots: Slots, replacements: Replacements) -> str | None:
    """The rank that failed; a killed rank leaves no traceback that would say so."""
    everyone = range(len(supervisor.processes))
    left = [rank for rank in everyone if slots.has_left(rank)]
    codes = [(rank, supervisor.processes[rank].returncode) for rank in everyone if not supervisor.is_out(rank)]
    failed = [(rank, code) for rank, code in codes if code]
    dead = [rank for rank in everyone if rank in dict(failed) or has_vanished(supervisor, slots, rank)]
    filled, late, added = replacements.filled, replacements.late, replacements.added
    if not (dead or left or filled or late or added) or supervisor.signalled is not None:
        return None
    if supervisor.has_succeeded():
        told = [f"{name_ranks(ranks)} {how}" for ranks, how in ((left, "left"), (dead, "died")) if ranks]
        told = [*([f"other processes took the place of {how_often(filled)}"] if filled else []), *told]
        told = [*([f"{name_ranks(added)} joined"] if added else []), *told]
        added_late = [rank for rank in late if slots.is_new(rank)]
        empty = [rank for rank in late if rank not in added_late]
        told += [f"nobody had joined yet in the place of {name_ranks(empty)}"] if empty else []
        told += [f"{name_ranks(added_late)} had not joined yet"] if added_late else []
        others = "the other" if left or dead or late else "all"
        return f"{', '.join(told)}, and {others} {len(codes) - len(failed)} ended normally."
    if (first := supervisor.first_failure()) is None:
        return None
    rank, code = first
    return f"rank {rank} {supervisor.silent_end(rank)}." if code < 0 else f"rank {rank} ended with {ending(code)}."
