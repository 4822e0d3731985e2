"""Horovod's `RayExecutor`: ranks in Ray actors that live from `start` to `shutdown`, and are called several times.

The actors are those of `ring_plugins.ray.run`, but stay in their job after a call: `hvd.init()` joins it in the first
call, and finds it in later ones. Results are Ray's own, so `run_remote` gives references that `ray.get` reads. With
`min_workers`, each call is one of `ring_plugins.ray.run`, which goes on when actors are lost.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import ArgumentError, LaunchError
from ring_plugins.core.base.log import logger
from ring_plugins.core.members.policy import FailurePolicy
from ring_plugins.launcher.outcomes import check_options, tell_others
from ring_plugins.ray.run import RankActor, RankActors, connect_to_ray
from ring_plugins.ray.run import run as ray_run

T = TypeVar("T")


@dataclass
class MiniSettings:
    """What `RayExecutor.create_settings` makes.

    Attributes:
        nics: network interfaces that carry the traffic.
        timeout_s: seconds that ranks wait for each other in `hvd.init()`.
        placement_group_timeout_s: seconds to wait until Ray has room for all ranks.
    """

    nics: Sequence[str] | None = None
    timeout_s: float = 300
    placement_group_timeout_s: float = 100


class _Worker(RankActor):
    """A rank that stays in its job after a call, and has what `start` has made there."""

    _executable: Any = None

    def prepare(self, variables: Mapping[str, str], kind: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Become a rank, and make the object for `execute`, if there is a class."""
        os.environ.update(variables)
        if kind is not None:
            self._executable = self._tell(kind, *args, **kwargs)

    def execute(self, function: Callable[[Any], Any]) -> Any:
        """Call a function with the object that `prepare` has made."""
        return self._tell(function, self._executable)

    def _tell(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function; if it fails, the other ranks stop waiting for this one."""
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            tell_others(error)
            raise


class RayExecutor:
    """Runs functions on several Ray actors, each of which is a rank.

        executor = RayExecutor(RayExecutor.create_settings(timeout_s=30), num_workers=4)
        executor.start()
        results = executor.run(train, kwargs={"epochs": 3})
        executor.shutdown()

    Args:
        settings: from `create_settings`.
        num_workers: number of ranks; or
        num_hosts, num_workers_per_host: so many on each of several nodes; or
        min_workers, max_workers: the others go on as long as so many are left when ranks are lost, and as many begin
            as the cluster has room for, at most `max_workers`. No process takes the place of a lost one.
        cpus_per_worker, gpus_per_worker: that a rank needs; one GPU with `use_gpu`.
        use_gpu: whether ranks need GPUs.
        use_current_placement_group: whether they go into the placement group in which this code runs, if any.
        reset_limit, cooldown_range, elastic_timeout, override_discovery: have no effect.

    Raises:
        ArgumentError: the numbers contradict each other, or there is none.
        MissingDependency: ray is not installed.
    """

    def __init__(
        self,
        settings: Any = None,
        num_workers: int | None = None,
        num_hosts: int | None = None,
        num_workers_per_host: int = 1,
        cpus_per_worker: int = 1,
        use_gpu: bool = False,
        gpus_per_worker: int | None = None,
        use_current_placement_group: bool = True,
        min_workers: int | None = None,
        max_workers: int | None = None,
        reset_limit: int | None = None,
        cooldown_range: Sequence[int] | None = None,
        elastic_timeout: float = 600,
        override_discovery: bool = True,
    ) -> None:
        given = {"num_workers": num_workers, "num_hosts": num_hosts, "min_workers": min_workers}
        for name, value in {**given, "max_workers": max_workers}.items():
            check_options(name, value, None, None)
        if [value for value in given.values() if value is not None] != [num_workers or num_hosts or min_workers]:
            told = ", ".join(f"{name}={value!r}" for name, value in given.items())
            raise ArgumentError(f"{told}: pass one of them and no other, such as num_workers=4.")
        if max_workers is not None and min_workers is None:
            raise ArgumentError(f"max_workers={max_workers!r} needs min_workers= too, such as min_workers=1.")
        self._settings = settings or MiniSettings()
        self._hosts, self._least, self._most = num_hosts, min_workers, max_workers
        self._ranks = num_workers or (num_hosts or 0) * num_workers_per_host
        self._needs = {"CPU": float(cpus_per_worker), **({"GPU": float(gpus_per_worker or 1)} if use_gpu else {})}
        self._in_current_group = use_current_placement_group
        self._actors: RankActors | None = None
        self._variables: dict[str, str] | None = None
        self._ray = connect_to_ray()

    @classmethod
    def create_settings(
        cls,
        timeout_s: float = 30,
        ssh_identity_file: str | None = None,
        ssh_str: str | None = None,
        placement_group_timeout_s: float = 100,
        nics: Sequence[str] | None = None,
    ) -> MiniSettings:
        """Make settings; `ssh_identity_file` and `ssh_str` have no effect, since Ray starts the ranks."""
        return MiniSettings(sorted(nics) if nics else None, timeout_s, placement_group_timeout_s)

    def start(
        self,
        executable_cls: type[Any] | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, Any] | None = None,
    ) -> None:
        """Start the actors.

        Args:
            executable_cls, executable_args, executable_kwargs: an object that each actor makes, for `execute`.
            extra_env_vars: variables of the ranks.

        Raises:
            LaunchError: Ray has no room for all ranks.
            ArgumentError: there is a class, but `min_workers` lets ranks be lost, with what they have.
        """
        self._variables = {config.START_TIMEOUT.name: str(self._settings.timeout_s)}
        if self._settings.nics:
            self._variables[config.INTERFACE.name] = ",".join(self._settings.nics)
        self._variables |= {name: str(value) for name, value in (extra_env_vars or {}).items()}
        if self._least is not None:
            if executable_cls is not None:
                raise ArgumentError(
                    f"executable_cls={executable_cls!r}: with min_workers= each call starts ranks anew; make the "
                    "object in the function that run() calls."
                )
            return
        group = self._ray.util.get_current_placement_group() if self._in_current_group else None
        placement = "STRICT_SPREAD" if self._hosts else "PACK"
        policy = FailurePolicy.chosen("end", None)
        actors = RankActors(self._ranks, self._needs, placement, self._variables, policy, _Worker, self._hosts, group)
        self._actors = actors
        try:
            actors.start(self._settings.placement_group_timeout_s)
            places = sorted(actors.places(), key=lambda place: place[1])
            self._workers = [actor for actor, _, _ in places]
            args, kwargs = tuple(executable_args or ()), dict(executable_kwargs or {})
            self._results([actor.prepare.remote(found, executable_cls, args, kwargs) for actor, _, found in places])
        except BaseException:
            self.shutdown()
            raise

    def run(
        self,
        fn: Callable[..., T],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callable[[Any], object]] | None = None,
    ) -> list[T]:
        """Call `fn(*args, **kwargs)` on all ranks; returns the results in rank order.

        After an exception the ranks can no longer average: `shutdown()` and `start()` begin anew.

        Args:
            fn, args, kwargs: the call.
            callbacks: have no effect, which is logged.

        Raises:
            ray.exceptions.RayError: the function raised on a rank, whose type the error has too, or a rank was lost.
            RankFailed: the same, with `min_workers`.
        """
        _warn_of(callbacks)
        if self._least is None:
            return self._results(self.run_remote(fn, args, kwargs))
        return ray_run(
            fn,
            tuple(args or ()),
            kwargs,
            self._most,
            resources=self._needs,
            env=self._started(self._variables),
            on_failure="continue",
            min_ranks=self._least,
            start_timeout=self._settings.placement_group_timeout_s,
        )

    def run_remote(
        self, fn: Callable[..., Any], args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Call `fn(*args, **kwargs)` on all ranks; returns references to the results for `ray.get`, without a wait."""
        found, named = tuple(args or ()), dict(kwargs or {})
        return self._begin("run_remote", lambda _: fn(*found, **named))

    def execute(self, fn: Callable[[Any], T], callbacks: Sequence[Callable[[Any], object]] | None = None) -> list[T]:
        """Call `fn(executable)` on all ranks, with the object that `start` has made, as `run` does."""
        if self._least is not None:
            return self.run(fn, (None,), None, callbacks)
        _warn_of(callbacks)
        return self._results(self._begin("execute", fn))

    def execute_single(self, fn: Callable[[Any], T]) -> T:
        """Call `fn(executable)` on rank 0 only, and return its result."""
        found: list[T] = self._results(self._begin("execute_single", fn, 1))
        return found[0]

    def shutdown(self) -> None:
        """End all ranks."""
        if self._actors is not None:
            self._actors.end()
        self._actors = self._variables = None

    def _begin(self, method: str, fn: Callable[[Any], Any], ranks: int | None = None) -> list[Any]:
        if self._least is not None:
            raise ArgumentError(f"{method}() has no ranks to call: with min_workers=, run() and execute() start them.")
        self._started(self._actors)
        return [worker.execute.remote(fn) for worker in self._workers[:ranks]]

    def _results(self, references: Sequence[Any]) -> list[Any]:
        """The results of references in their order, or the error of the one that failed first."""
        waiting = list(references)
        while waiting:
            done, waiting = self._ray.wait(waiting)
            self._ray.get(done)
        found: list[Any] = self._ray.get(list(references))
        return found

    def _started(self, what: T | None) -> T:
        if what is None:
            raise LaunchError("the ranks of this RayExecutor do not run: call start() before, and shutdown() last.")
        return what


def _warn_of(callbacks: Any) -> None:
    if callbacks:
        logger.warning("RayExecutor: callbacks have no effect here; use what Ray or ring_plugins log.")
