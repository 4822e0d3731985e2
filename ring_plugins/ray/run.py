"""`ring_plugins.ray.run`: calls a function on several Ray actors and returns the results to the driver."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import ArgumentError, LaunchError, MissingDependency, SharedMemoryError
from ring_plugins.core.base.install import pip_command
from ring_plugins.core.base.log import logger
from ring_plugins.core.base.progress_line import ProgressLine
from ring_plugins.core.control.liveness import MOST_MEMBERS
from ring_plugins.core.linux.interfaces import reserve_port
from ring_plugins.core.linux.shared_memory import Address, Segment
from ring_plugins.core.members.policy import FailurePolicy
from ring_plugins.core.rendezvous import record
from ring_plugins.core.rendezvous.spawn import SharedMemoryRendezvous, child_environment
from ring_plugins.launcher.meeting import assign_ranks, rank_environment
from ring_plugins.launcher.outcomes import (
    LEFT,
    NOT_JOINED,
    Failure,
    Outcome,
    RankResults,
    call,
    check_options,
    collect,
    pack_call,
    results,
)
from ring_plugins.launcher.restart import MOST, recent

T = TypeVar("T")
#: Seconds between two looks at what Ray has started.
_UPDATE = 0.5


def run(
    function: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_workers: int | None = None,
    *,
    resources: Mapping[str, float] | None = None,
    placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK",
    env: Mapping[str, str] | None = None,
    on_failure: Literal["end", "continue", "replace"] | None = None,
    min_ranks: int | None = None,
    start_timeout: float = 300.0,
    timeout: float | None = None,
) -> RankResults[T]:
    """Call `function(*args, **kwargs)` on several actors of a Ray cluster, all at once.

    Each actor is one rank, in its own process, in which `ring_plugins.init()` finds the others. All ranks end when
    one fails and when the driver ends; a failed rank is not retried. Unless `ray.init()` was called before, Ray finds
    or starts a cluster as usual.

    With `on_failure="continue"` the others go on when a rank's actor, its process or its node is lost, as
    docs/healing.md says, and the results of those that are left are returned. With `"replace"`, another actor also
    takes its place, if all are on one node. An exception still ends all.

    Args:
        function: the function; it may come from a notebook or be a closure.
        args, kwargs: arguments of the function, the same on every rank.
        num_workers: number of ranks; by default as many as the cluster has room for.
        resources: of each rank, as Ray names them; `{"CPU": 1}` by default, `{"CPU": 4, "GPU": 1}` for a GPU each.
        placement: strategy of the placement group: PACK prefers few nodes, SPREAD many.
        env: variables to set for the ranks.
        on_failure: as for `init`, in the ranks of this call; RING_ON_FAILURE or "end" by default.
        min_ranks: as for `init`.
        start_timeout: seconds to wait until Ray has room for all ranks.
        timeout: seconds for the call after that, None for no limit.

    Returns:
        The results in rank order, as `ring_plugins.run` returns them.

    Raises:
        RankFailed: the function raised on a rank, or the rank's actor died; the text names rank and host. With
            `on_failure`: it raised, or fewer ranks than `min_ranks` were left.
        ArgumentError: the function or an argument cannot be used, or `on_failure` not on these nodes.
        LaunchError: the cluster has no room for all ranks.
        TimeoutExceeded: `timeout` has passed; all ranks have been ended.
        MissingDependency: ray is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise MissingDependency(f"ray is not installed ({error}): {pip_command('ray')}") from error
    needs = {"CPU": 1.0, **(resources or {})}
    if not any(amount > 0 for amount in needs.values()):
        raise ArgumentError(f"resources={dict(resources or {})!r} asks for nothing; a rank needs a CPU or a GPU.")
    check_options("num_workers", num_workers, timeout, env)
    policy = FailurePolicy.chosen(on_failure, min_ranks)
    packed = pack_call(function, args, kwargs)
    if not ray.is_initialized():
        ray.init()
    ranks = num_workers or _max_ranks(ray.cluster_resources(), needs)
    policy.check_size(ranks)
    actors = _RankActors(ray, ranks, needs, placement, dict(env or {}), policy)
    try:
        actors.start(start_timeout)
        return results(actors.outcomes(packed, timeout), ranks if policy.recovers else 0)
    finally:
        actors.end()


def _max_ranks(cluster: Mapping[str, float], needs: Mapping[str, float]) -> int:
    """Number of ranks for which the cluster has room."""
    ranks = min(int(cluster.get(name, 0.0) // amount) for name, amount in needs.items() if amount > 0)
    if ranks < 1:
        raise LaunchError(f"the Ray cluster has {_describe(cluster)}, and a rank needs {_describe(needs)}.")
    return ranks


def _describe(resources: Mapping[str, float]) -> str:
    """`4 CPU, 1 GPU`, without the resources that Ray adds for itself."""
    internal = ("memory", "object_store_memory")
    return ", ".join(
        f"{amount:g} {name}"
        for name, amount in sorted(resources.items())
        if name not in internal and not name.startswith("node:")
    )


def _wait_for(is_done: Callable[[float], bool], doing: Callable[[], str], seconds: float) -> bool:
    """Wait for a part of the start, and say so if it takes long; returns whether it is done.

    Args:
        is_done: waits for it, at most the seconds that it is given.
        doing: describes the wait.
        seconds: to wait at most.
    """
    end = time.monotonic() + seconds
    with ProgressLine() as line:
        while not is_done(max(0.0, min(_UPDATE, end - time.monotonic()))):
            if time.monotonic() >= end:
                return False
            line.show(doing)
    return True


class _RankActor:
    """One rank; `ray.remote` makes an actor of this class. The actor's process ends with the job."""

    def location(self) -> tuple[str, str, int]:
        """The host's name, its address in the cluster, and a port there that stays free for rank 0."""
        import ray

        self._reserved = reserve_port()
        return socket.gethostname(), ray.util.get_node_ip_address(), self._reserved.getsockname()[1]

    def share_slots(self, ranks: int, others: Sequence[Address]) -> Address:
        """Map the memory in which the ranks of one host meet, and later processes the others; returns where it is.

        Args:
            ranks: number of them.
            others: where actors have it already; none if this one is to make it.
        """
        if not others:
            self._segment = Segment.create(SharedMemoryRendezvous.nbytes(ranks))
        for number, address in enumerate(others, 1):
            # Some of them may have ended.
            with contextlib.suppress(*[SharedMemoryError] * (number < len(others))):
                self._segment = Segment.open(address, 0)
                break
        return self._segment.address

    def call(self, packed: bytes, rank: int, environment: Mapping[str, str], size: int = 0, joins: int = 0) -> Outcome:
        """Run the packed call as a rank.

        Args:
            packed: what `pack_call` made.
            rank: number of this rank.
            environment: variables by which `ring_plugins.init()` finds the others.
            size: number of ranks that meet in the memory of `share_slots`; 0 if they meet otherwise.
            joins: number under which this process takes the place of a lost rank; 0 if it does not.
        """
        record.caller = "ring_plugins.ray.run"
        os.environ.update(environment)
        if config.LOSSES_TOLERATED.is_set():
            # Ray's own handler would fail the rank; see core/members/preemption_notice.py.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if size:
            os.environ.update(child_environment(self._segment, rank, size, 0))
        if joins:
            os.environ[config.JOINS.name] = str(joins)
            SharedMemoryRendezvous(self._segment, rank, size, []).slots.clear(rank)  # a former process's
        return call(packed, rank)


class _Call(NamedTuple):
    """A call of which an actor is to return the outcome.

    Attributes:
        rank, host: of the actor.
        process: index of the actor and of its place among Ray's bundles.
        started: a reference that is there once the actor runs, of one that takes the place of a lost rank; else None.
    """

    rank: int
    host: str
    process: int
    started: Any = None


class _RankActors:
    """The actors of one call, in their own placement group; `end` removes both."""

    def __init__(
        self,
        ray: Any,
        ranks: int,
        needs: dict[str, float],
        placement: str,
        variables: dict[str, str],
        policy: FailurePolicy,
    ) -> None:
        from ray.util import placement_group

        self._ray, self._ranks, self._needs, self._placement, self._policy = ray, ranks, needs, placement, policy
        self._group = placement_group([dict(needs) for _ in range(ranks)], strategy=placement)
        self._options = {
            "num_cpus": needs["CPU"],
            "num_gpus": needs.get("GPU", 0),
            "resources": {name: amount for name, amount in needs.items() if name not in ("CPU", "GPU")},
            "max_restarts": 0,
            # With its own runtime environment an actor cannot use a process that Ray has started ahead.
            "runtime_env": {"env_vars": variables} if variables else None,
        }
        self._actors: list[Any] = []
        self._replacements: list[list[float]] = [[] for _ in range(ranks)]
        self._slots: list[Address] = []
        self._number, self._ends_soon = ranks, False

    def _start(self, number: int) -> Any:
        """Start the actor of a bundle of the placement group."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=number)
        return self._ray.remote(_RankActor).options(scheduling_strategy=where, **self._options).remote()

    def start(self, seconds: float) -> None:
        """Start all actors, and assign their ranks.

        Args:
            seconds: to wait until Ray has room for all, and then until all run.

        Raises:
            LaunchError: it does not, or they do not.
            ArgumentError: lost ones are to be replaced, and they are on several hosts.
        """
        ray, ranks, each = self._ray, self._ranks, _describe(self._needs)
        room = f"waiting for Ray to make room for {ranks} ranks of {each} each"
        if not _wait_for(self._group.wait, lambda: room, seconds):
            raise LaunchError(
                f"after {seconds:g} s Ray has no room for {ranks} ranks of {each} each, placed {self._placement}: "
                f"the cluster has {_describe(ray.cluster_resources())}, of which "
                f"{_describe(ray.available_resources())} are free. Start fewer ranks, or add nodes."
            )
        self._actors += map(self._start, range(ranks))
        asked = [actor.location.remote() for actor in self._actors]
        came: list[Any] = []

        def have_started(seconds: float) -> bool:
            came[:] = ray.wait(asked, num_returns=ranks, timeout=seconds)[0]
            return len(came) == ranks

        if not _wait_for(have_started, lambda: f"Ray has started {len(came)} of {ranks} ranks", seconds):
            raise LaunchError(
                f"after {seconds:g} s Ray has started {len(came)} of {ranks} ranks, although it has room: `ray list "
                "actors` shows the others' state. Give it longer with start_timeout."
            )
        locations = ray.get(asked)
        self._hosts = [host for host, _, _ in locations]
        if self._policy.replaces:
            self._share_slots(self._hosts)
        self._assignments = assign_ranks(self._hosts)
        first = next(process for process, assignment in enumerate(self._assignments) if assignment.rank == 0)
        # It travels as an argument of a call; Ray shows runtime environments, such as `env`, to everyone.
        self._rendezvous = (*locations[first][1:], secrets.token_hex(32))

    def _share_slots(self, hosts: Sequence[str]) -> None:
        """Let all actors map the memory in which processes that take the places of lost ones find the others.

        Raises:
            ArgumentError: they are on several hosts.
        """
        if len(set(hosts)) > 1:
            raise ArgumentError(
                'on_failure="replace" works on one node of Ray, but the ranks are on '
                f'{", ".join(sorted(set(hosts)))}: pass placement="STRICT_PACK", or on_failure="continue".'
            )
        first, *others = self._actors
        address = self._ray.get(first.share_slots.remote(self._ranks, []))
        shared = [actor.share_slots.remote(self._ranks, [address]) for actor in others]
        self._slots = [address, *self._ray.get(shared)]

    def outcomes(self, packed: bytes, timeout: float | None) -> list[Outcome]:
        """Run the call on every rank and collect the outcomes, in the order of their arrival."""
        ray, waiting = self._ray, dict[Any, _Call]()
        for process, (actor, assignment) in enumerate(zip(self._actors, self._assignments, strict=True)):
            # They find each other in shared memory, or over the network.
            size = self._ranks if self._policy.replaces else 0
            variables = {} if size else rank_environment(assignment, *self._rendezvous)
            reference = actor.call.remote(packed, assignment.rank, {**variables, **self._policy.environment}, size)
            waiting[reference] = _Call(assignment.rank, self._hosts[process], process)

        def poll(seconds: float) -> Iterator[Outcome]:
            for reference in ray.wait(list(waiting), num_returns=1, timeout=seconds)[0]:
                one = waiting.pop(reference)
                try:
                    outcome = ray.get(reference)
                except ray.exceptions.RayError as error:
                    why = next(iter(str(error).strip().splitlines()), repr(error)).strip("'")
                    failure = Failure(one.host, f"its actor ended: {why}", is_loss=True)
                    outcome = Outcome(one.rank, failure=failure)
                has_failed = outcome.failure is not None and not outcome.failure.is_loss
                self._ends_soon = self._ends_soon or has_failed
                is_gone = outcome.left == LEFT or (outcome.failure is not None and not has_failed)
                if is_gone and (living := self._may_replace(one, waiting)):
                    waiting.update([self._replace(packed, one, living)])
                else:
                    yield outcome
            yield from self._never_started(waiting)

        return collect(self._ranks, poll, timeout, recovers=self._policy.recovers)

    def _may_replace(self, lost: _Call, waiting: Mapping[Any, _Call]) -> list[Address]:
        """Where a process that takes a lost place finds the others; nowhere if none is to take it.

        Nobody takes it in a job that ends, where all others have ended, or of which too many have been lost.
        """
        is_hopeless = recent(self._replacements[lost.process]) >= MOST or self._number >= MOST_MEMBERS
        if not self._policy.replaces or self._ends_soon or is_hopeless:
            return []
        return [self._slots[one.process] for one in waiting.values() if self._has_started(one)]

    def _has_started(self, one: _Call) -> bool:
        """Whether an actor runs; notes where it has mapped the memory of the slots."""
        if one.started is None:
            return True
        if not self._ray.wait([one.started], timeout=0)[0]:
            return False
        with contextlib.suppress(self._ray.exceptions.RayError):  # it has died; its call says so
            self._slots[one.process] = self._ray.get(one.started)
        return True

    def _replace(self, packed: bytes, lost: _Call, living: Sequence[Address]) -> tuple[Any, _Call]:
        """Start an actor that takes the place of a lost one, and call the function in it."""
        self._replacements[lost.process].append(time.monotonic())
        logger.warning(f"starting another actor in the place of rank {lost.rank}.")
        with contextlib.suppress(Exception):
            self._ray.kill(self._actors[lost.process])  # one that has left on SIGTERM still has its resources
        actor = self._actors[lost.process] = self._start(lost.process)
        started = actor.share_slots.remote(self._ranks, living)
        reference = actor.call.remote(packed, lost.rank, self._policy.environment, self._ranks, self._number)
        self._number += 1
        return reference, lost._replace(started=started)

    def _never_started(self, waiting: dict[Any, _Call]) -> Iterator[Outcome]:
        """Once all others have ended, the outcomes of actors for which Ray has found no room yet."""
        if not any(map(self._has_started, waiting.values())):
            for one in waiting.values():
                yield Outcome(one.rank, left=NOT_JOINED)
            waiting.clear()

    def end(self) -> None:
        """Remove all actors, and their placement group."""
        from ray.util import remove_placement_group

        for actor in self._actors:
            with contextlib.suppress(Exception):  # the actor, or Ray itself, has ended already
                self._ray.kill(actor)
        with contextlib.suppress(Exception):
            remove_placement_group(self._group)
