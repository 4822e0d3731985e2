"""`ring_plugins.ray.run`: a function on several Ray actors, with the results on the driver."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

from ring_plugins.core.base.errors import ArgumentError, LaunchError, MissingDependency
from ring_plugins.launcher.outcomes import Failure, Outcome, collect, pack_call, results
from ring_plugins.launcher.rank_assignment import seats
from ring_plugins.ray.actor import Rank

T = TypeVar("T")


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

    One actor is one rank, and a process of its own, in which `ring_plugins.init()` finds the others. All end when one
    fails and when the driver does. A rank that fails is not tried again. Without `ray.init()` before, Ray finds or
    starts a cluster as it always does.

    Args:
        function: also one from a notebook or a closure.
        args, kwargs: for the function, the same on every rank.
        num_workers: number of ranks; by default as many as the cluster has room for.
        resources: of each rank, in Ray's words; `{"CPU": 1}` by default, `{"CPU": 4, "GPU": 1}` with a GPU each.
        placement: strategy of the placement group: few nodes (PACK), or many (SPREAD).
        env: variables to set for the ranks.
        start_timeout: seconds to wait until Ray has room for all ranks.
        timeout: seconds for everything after that, without limit by default.

    Returns:
        The results in rank order.

    Raises:
        RankFailed: the function raised on a rank, or its actor died; the text names rank and host.
        ArgumentError: a function, argument or number that cannot be used.
        LaunchError: the cluster has no room for all ranks.
        TimeoutExceeded: `timeout` passed; all ranks have been ended.
        MissingDependency: ray is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise MissingDependency(f'ray is not installed ({error}): pip install "ring_plugins[ray]"') from error
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
    ranks = num_workers or _room(ray.cluster_resources(), needs)
    with _Group(ray, ranks, needs, placement, dict(env or {}), start_timeout) as group:
        return results(group.outcomes(packed, timeout))


def _room(cluster: Mapping[str, float], needs: Mapping[str, float]) -> int:
    """How many ranks a cluster has room for."""
    ranks = min(int(cluster.get(name, 0.0) // amount) for name, amount in needs.items() if amount > 0)
    if ranks < 1:
        raise LaunchError(f"the Ray cluster has {_words(cluster)}, and a rank needs {_words(needs)}.")
    return ranks


def _words(amounts: Mapping[str, float]) -> str:
    """`4 CPU, 1 GPU`, without what Ray counts for itself."""
    own = ("memory", "object_store_memory")
    return ", ".join(
        f"{amount:g} {name}"
        for name, amount in sorted(amounts.items())
        if name not in own and not name.startswith("node:")
    )


class _Group:
    """The actors of one call, in a placement group of their own. As a context it leaves neither behind."""

    def __init__(
        self, ray: Any, ranks: int, needs: dict[str, float], placement: str, env: dict[str, str], patience: float
    ) -> None:
        from ray.util import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._ray, self._actors = ray, []
        self._group = placement_group([dict(needs) for _ in range(ranks)], strategy=placement)
        try:
            if not self._group.wait(patience):
                raise LaunchError(
                    f"after {patience:g} s Ray has no room for {ranks} ranks of {_words(needs)} each, placed "
                    f"{placement}: the cluster has {_words(ray.cluster_resources())}, of which "
                    f"{_words(ray.available_resources())} are free. Start fewer ranks, or add nodes."
                )
            others = {name: amount for name, amount in needs.items() if name not in ("CPU", "GPU")}
            for number in range(ranks):
                options = {
                    "num_cpus": needs["CPU"],
                    "num_gpus": needs.get("GPU", 0),
                    "resources": others,
                    "max_restarts": 0,
                    "runtime_env": {"env_vars": env} if env else None,  # with one, no process stands ready
                    "scheduling_strategy": PlacementGroupSchedulingStrategy(
                        self._group, placement_group_bundle_index=number
                    ),
                }
                self._actors.append(ray.remote(Rank).options(**options).remote())
            told = ray.get([actor.where.remote() for actor in self._actors], timeout=patience)
        except BaseException:
            self._end()
            raise
        self._hosts = [host for host, _, _ in told]
        self._seats = seats(self._hosts)
        first = self._seats.index(next(seat for seat in self._seats if seat.rank == 0))
        self._meeting = (told[first][1], told[first][2])

    def __enter__(self) -> _Group:  # noqa: PYI034 - typing.Self is younger than Python 3.10
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def outcomes(self, packed: bytes, timeout: float | None) -> list[Outcome]:
        """Let every rank do its work, and gather how each ended, the first to end first."""
        ray = self._ray
        waiting = {
            actor.perform.remote(packed, seat.rank, seat.environment(*self._meeting)): (seat.rank, host)
            for actor, seat, host in zip(self._actors, self._seats, self._hosts, strict=True)
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
            with contextlib.suppress(Exception):  # it is dead already, or Ray is
                self._ray.kill(actor)
        with contextlib.suppress(Exception):
            remove_placement_group(self._group)
