"""`ring_plugins.ray.run`: calls a function on several Ray actors and returns the results to the driver."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

from ring_plugins.core.base.errors import ArgumentError, LaunchError, MissingDependency
from ring_plugins.core.base.install import pip_command
from ring_plugins.core.base.progress_line import ProgressLine
from ring_plugins.core.linux.interfaces import reserve_port
from ring_plugins.launcher.outcomes import Failure, Outcome, call, collect, pack_call, results
from ring_plugins.launcher.rank_assignment import assign_ranks

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
    start_timeout: float = 300.0,
    timeout: float | None = None,
) -> list[T]:
    """Call `function(*args, **kwargs)` on several actors of a Ray cluster, all at once.

    Each actor is one rank, in its own process, in which `ring_plugins.init()` finds the others. All ranks end when
    one fails and when the driver ends; a failed rank is not retried. Unless `ray.init()` was called before, Ray finds
    or starts a cluster as usual.

    Args:
        function: the function; it may come from a notebook or be a closure.
        args, kwargs: arguments of the function, the same on every rank.
        num_workers: number of ranks; by default as many as the cluster has room for.
        resources: of each rank, as Ray names them; `{"CPU": 1}` by default, `{"CPU": 4, "GPU": 1}` for a GPU each.
        placement: strategy of the placement group: PACK prefers few nodes, SPREAD many.
        env: variables to set for the ranks.
        start_timeout: seconds to wait until Ray has room for all ranks.
        timeout: seconds for the call after that, None for no limit.

    Returns:
        The results in rank order.

    Raises:
        RankFailed: the function raised on a rank, or the rank's actor died; the text names rank and host.
        ArgumentError: the function or an argument cannot be used.
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
    if num_workers is not None and (
        isinstance(num_workers, bool) or not isinstance(num_workers, int) or num_workers < 1
    ):
        raise ArgumentError(f"num_workers={num_workers!r} is not a positive number of ranks.")
    packed = pack_call(function, args, kwargs)
    if not ray.is_initialized():
        ray.init()
    ranks = num_workers or _max_ranks(ray.cluster_resources(), needs)
    with _RankActors(ray, ranks, needs, placement, dict(env or {}), start_timeout) as actors:
        return results(actors.outcomes(packed, timeout))


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

    def call(self, packed: bytes, rank: int, environment: Mapping[str, str]) -> Outcome:
        """Run the packed call as a rank.

        Args:
            packed: what `pack_call` made.
            rank: number of this rank.
            environment: variables by which `ring_plugins.init()` finds the others.
        """
        os.environ.update(environment)
        return call(packed, rank)


class _RankActors:
    """The actors of one call, in their own placement group. Leaving the context removes both."""

    def __init__(
        self,
        ray: Any,
        ranks: int,
        needs: dict[str, float],
        placement: str,
        variables: dict[str, str],
        start_timeout: float,
    ) -> None:
        from ray.util import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._ray, self._actors = ray, []
        self._group = placement_group([dict(needs) for _ in range(ranks)], strategy=placement)
        try:
            room = f"waiting for Ray to make room for {ranks} ranks of {_describe(needs)} each"
            if not _wait_for(self._group.wait, lambda: room, start_timeout):
                raise LaunchError(
                    f"after {start_timeout:g} s Ray has no room for {ranks} ranks of {_describe(needs)} each, placed "
                    f"{placement}: the cluster has {_describe(ray.cluster_resources())}, of which "
                    f"{_describe(ray.available_resources())} are free. Start fewer ranks, or add nodes."
                )
            others = {name: amount for name, amount in needs.items() if name not in ("CPU", "GPU")}
            for number in range(ranks):
                options = {
                    "num_cpus": needs["CPU"],
                    "num_gpus": needs.get("GPU", 0),
                    "resources": others,
                    "max_restarts": 0,
                    # With its own runtime environment an actor cannot use a process that Ray has started ahead.
                    "runtime_env": {"env_vars": variables} if variables else None,
                    "scheduling_strategy": PlacementGroupSchedulingStrategy(
                        self._group, placement_group_bundle_index=number
                    ),
                }
                self._actors.append(ray.remote(_RankActor).options(**options).remote())
            asked = [actor.location.remote() for actor in self._actors]
            came: list[Any] = []

            def have_started(seconds: float) -> bool:
                came[:] = ray.wait(asked, num_returns=ranks, timeout=seconds)[0]
                return len(came) == ranks

            if not _wait_for(have_started, lambda: f"Ray has started {len(came)} of {ranks} ranks", start_timeout):
                raise LaunchError(
                    f"after {start_timeout:g} s Ray has started {len(came)} of {ranks} ranks, although it has room: `"
                    "ray list actors` shows the others' state. Give it longer with start_timeout."
                )
            locations = ray.get(asked)
        except BaseException:
            self._end()
            raise
        self._hosts = [host for host, _, _ in locations]
        self._assignments = assign_ranks(self._hosts)
        first = next(process for process, assignment in enumerate(self._assignments) if assignment.rank == 0)
        # It travels as an argument of a call; Ray shows runtime environments, such as `env`, to everyone.
        self._rendezvous = (*locations[first][1:], secrets.token_hex(32))

    def __enter__(self) -> _RankActors:  # noqa: PYI034 - typing.Self needs Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def outcomes(self, packed: bytes, timeout: float | None) -> list[Outcome]:
        """Run the call on every rank and collect the outcomes, in the order of their arrival."""
        ray = self._ray
        waiting = {
            actor.call.remote(packed, assignment.rank, assignment.environment(*self._rendezvous)): (
                assignment.rank,
                host,
            )
            for actor, assignment, host in zip(self._actors, self._assignments, self._hosts, strict=True)
        }

        def poll(seconds: float) -> Iterator[Outcome]:
            for reference in ray.wait(list(waiting), num_returns=1, timeout=seconds)[0]:
                rank, host = waiting.pop(reference)
                try:
                    yield ray.get(reference)
                except ray.exceptions.RayError as error:
                    why = next(iter(str(error).strip().splitlines()), repr(error)).strip("'")
                    yield Outcome(rank, failure=Failure(host, f"its actor ended: {why}"))

        return collect(len(self._actors), poll, timeout)

    def _end(self) -> None:
        from ray.util import remove_placement_group

        for actor in self._actors:
            with contextlib.suppress(Exception):  # the actor, or Ray itself, has ended already
                self._ray.kill(actor)
        with contextlib.suppress(Exception):
            remove_placement_group(self._group)
