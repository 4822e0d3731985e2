"""`ring_plugins.ray.run`: calls a function on several Ray actors and returns the results to the driver.

If lost ranks are to be replaced, one actor has the resources of all ranks, and calls the function as
`ring_plugins.run` does: under `ring run`, which replaces processes. The driver itself could not: it sees neither how
far the processes of another host are, nor the memory in which they would meet.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import ArgumentError, LaunchError, MissingDependency
from ring_plugins.core.base.install import pip_command, search_path
from ring_plugins.core.base.progress_line import ProgressLine
from ring_plugins.core.linux.interfaces import reserve_port
from ring_plugins.core.members.policy import FailurePolicy
from ring_plugins.core.rendezvous import record
from ring_plugins.launcher.function import gather
from ring_plugins.launcher.meeting import place_ranks
from ring_plugins.launcher.outcomes import (
    Failure,
    Outcome,
    RankResults,
    call,
    check_options,
    collect,
    pack_call,
    results,
    search_path_of_user,
    unpack_call,
)

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
    docs/fault_tolerance.md says, and the results of those that are left are returned. With `"replace"`, all ranks are
    processes of one actor, which has the resources of all; another process takes the place of a lost one. An exception
    still ends all.

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
        ArgumentError: the function or an argument cannot be used.
        LaunchError: the cluster has no room for all ranks.
        TimeoutExceeded: `timeout` has passed; all ranks have been ended.
        MissingDependency: ray is not installed.
    """
    needs = {"CPU": 1.0, **(resources or {})}
    if not any(amount > 0 for amount in needs.values()):
        raise ArgumentError(f"resources={dict(resources or {})!r} asks for nothing; a rank needs a CPU or a GPU.")
    check_options("num_workers", num_workers, timeout, env)
    policy = FailurePolicy.chosen(on_failure, min_ranks)
    packed = pack_call(function, args, kwargs)
    ray = connect_to_ray()
    ranks = num_workers or _max_ranks(ray.cluster_resources(), needs)
    policy.check_size(ranks)
    actors = RankActors(ranks, needs, placement, dict(env or {}), policy)
    try:
        actors.start(start_timeout)
        if policy.replaces:
            return results(*actors.outcomes_of_one(packed, timeout))
        return results(actors.outcomes(packed, timeout), ranks if policy.recovers else 0)
    finally:
        actors.end()


def connect_to_ray() -> Any:
    """Ray's module, once this process belongs to a cluster.

    Raises:
        MissingDependency: ray is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise MissingDependency(f"ray is not installed ({error}): {pip_command('ray')}") from error
    if not ray.is_initialized():
        ray.init()
    return ray


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


class RankActor:
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
        record.caller = "ring_plugins.ray.run"
        os.environ.update(environment)
        if config.LOSSES_TOLERATED.is_set():
            # Ray's own handler would fail the rank; see core/members/preemption_notice.py.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        return call(packed, rank)

    def gather(
        self,
        packed: bytes,
        ranks: int,
        policy: FailurePolicy,
        needs: Mapping[str, float],
        env: Mapping[str, str],
        timeout: float | None,
    ) -> tuple[list[Outcome], int, str | None]:
        """Run the packed call on processes that this one starts, which may be replaced.

        Args:
            packed, ranks, policy, timeout: as for `function.gather`.
            needs, env: resources and variables of each rank.
        """
        # Ray counts threads for all ranks together.
        threads = str(max(1, int(needs["CPU"])))
        path = os.pathsep.join([*search_path(), *search_path_of_user()])
        variables = {"OMP_NUM_THREADS": threads, "PYTHONPATH": path, **env}
        if gpus := needs.get("GPU", 0.0):
            packed = pack_call(_call_on_own_gpus, (packed, gpus), None)
        return gather(packed, ranks, policy, variables, timeout)


def _call_on_own_gpus(packed: bytes, gpus: float) -> Any:
    """Run a packed call in a rank that has so many of this host's GPUs, and shall see no others."""
    devices, local = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(","), int(os.environ["LOCAL_RANK"])
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices[int(local * gpus) :][: math.ceil(gpus)])
    function, args, kwargs = unpack_call(packed)
    return function(*args, **kwargs)


class RankActors:
    """The actors of some ranks, in a placement group; `end` removes them.

    Args:
        ranks: their number.
        needs: resources of each rank.
        placement: strategy of the placement group.
        variables: of the ranks' environment.
        policy: what happens when a rank is lost.
        kind: the class of the actors.
        bundles: into how many equal parts of the placement group they go; one for each by default.
        group: a placement group that the caller has made, None to make one, which `end` removes, too.
    """

    def __init__(
        self,
        ranks: int,
        needs: dict[str, float],
        placement: str,
        variables: dict[str, str],
        policy: FailurePolicy,
        kind: type[RankActor] = RankActor,
        bundles: int | None = None,
        group: Any = None,
    ) -> None:
        from ray.util import placement_group

        self._ray, self._ranks, self._needs, self._placement, self._policy = (
            connect_to_ray(),
            ranks,
            needs,
            placement,
            policy,
        )
        self._env, self._number, self._kind = variables, 1 if policy.replaces else ranks, kind
        self._is_ours, self._bundles = group is None, bundles or self._number
        bundle, own = (
            {name: amount * ranks / parts for name, amount in needs.items()} for parts in (self._bundles, self._number)
        )
        self._group = group or placement_group([dict(bundle) for _ in range(self._bundles)], strategy=placement)
        self._options = {
            "num_cpus": own["CPU"],
            "num_gpus": own.get("GPU", 0),
            "resources": {name: amount for name, amount in own.items() if name not in ("CPU", "GPU")},
            "max_restarts": 0,
            # With its own runtime environment an actor cannot use a process that Ray has started ahead.
            "runtime_env": {"env_vars": variables} if variables else None,
        }
        self._actors: list[Any] = []

    def _start(self, number: int) -> Any:
        """Start an actor in its bundle of the placement group, or in any of the caller's."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = number * self._bundles // self._number if self._is_ours else -1
        where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        return self._ray.remote(self._kind).options(scheduling_strategy=where, **self._options).remote()

    def start(self, seconds: float) -> None:
        """Start all actors.

        Args:
            seconds: to wait until Ray has room for all, and then until all run.

        Raises:
            LaunchError: it does not, or they do not.
        """
        ray, number, placed = self._ray, self._number, f"placed {self._placement}"
        what = f"{self._ranks} ranks of {_describe(self._needs)} each"
        if self._policy.replaces:
            placed = "on one node, where lost ones are replaced"
        if not _wait_for(self._group.wait, lambda: f"waiting for Ray to make room for {what}", seconds):
            raise LaunchError(
                f"after {seconds:g} s Ray has no room for {what}, {placed}: the cluster has "
                f"{_describe(ray.cluster_resources())}, of which {_describe(ray.available_resources())} are free. "
                "Start fewer ranks, or add nodes."
            )
        self._actors += map(self._start, range(number))
        asked = [actor.location.remote() for actor in self._actors]
        came: list[Any] = []

        def have_started(seconds: float) -> bool:
            came[:] = ray.wait(asked, num_returns=number, timeout=seconds)[0]
            return len(came) == number

        if not _wait_for(have_started, lambda: f"Ray has started {len(came)} of {number} actors", seconds):
            raise LaunchError(
                f"after {seconds:g} s Ray has started {len(came)} of {number} actors, although it has room: `ray list "
                "actors` shows the others' state. Give it longer with start_timeout."
            )
        self._locations = ray.get(asked)

    def places(self) -> list[tuple[Any, int, dict[str, str]]]:
        """Each actor, its rank and the variables by which it finds the others, of one job of all."""
        # The secret travels in arguments of a call: Ray shows runtime environments, such as `env`, to everyone.
        places = place_ranks(self._locations, secrets.token_hex(32))
        return [
            (actor, rank, {**variables, **self._policy.environment})
            for actor, (rank, variables) in zip(self._actors, places, strict=True)
        ]

    def outcomes(self, packed: bytes, timeout: float | None) -> list[Outcome]:
        """Run the call on every actor and collect the outcomes, in the order of their arrival."""
        ray, waiting = self._ray, dict[Any, tuple[int, str]]()
        for (actor, rank, variables), (host, _, _) in zip(self.places(), self._locations, strict=True):
            waiting[actor.call.remote(packed, rank, variables)] = rank, host

        def poll(seconds: float) -> Iterator[Outcome]:
            for reference in ray.wait(list(waiting), num_returns=1, timeout=seconds)[0]:
                rank, host = waiting.pop(reference)
                try:
                    yield ray.get(reference)
                except ray.exceptions.RayError as error:
                    yield Outcome(rank, failure=Failure(host, _end_of_actor(error), is_loss=True))

        return collect(self._ranks, poll, timeout, recovers=self._policy.recovers)

    def outcomes_of_one(self, packed: bytes, timeout: float | None) -> tuple[list[Outcome], int, str | None]:
        """Have the only actor run the call on ranks of its own; returns the arguments of `results`."""
        exceptions = self._ray.exceptions
        (actor,) = self._actors
        try:
            gathered: tuple[list[Outcome], int, str | None] = self._ray.get(
                actor.gather.remote(packed, self._ranks, self._policy, self._needs, self._env, timeout)
            )
        except exceptions.RayTaskError as error:  # as of a call whose time has passed
            raise error.cause from None
        except exceptions.RayError as error:
            return [], self._ranks, _end_of_actor(error)
        return gathered

    def end(self) -> None:
        """Remove all actors, and their placement group if it is theirs alone."""
        from ray.util import remove_placement_group

        for actor in self._actors:
            with contextlib.suppress(Exception):  # the actor, or Ray itself, has ended already
                self._ray.kill(actor)
        if self._is_ours:
            with contextlib.suppress(Exception):
                remove_placement_group(self._group)


def _end_of_actor(error: Exception) -> str:
    why = next(iter(str(error).strip().splitlines()), repr(error)).strip("'")
    return f"its actor ended: {why}"
