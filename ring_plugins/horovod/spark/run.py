"""Horovod's `run` and `run_elastic` on Spark: `ring_plugins.spark.run` with Horovod's arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.base.log import logger
from ring_plugins.launcher.outcomes import RankResults
from ring_plugins.spark import run as spark_run

T = TypeVar("T")


def run(
    fn: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    start_timeout: float | None = None,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    extra_mpi_args: str | None = None,
    env: Mapping[str, str] | None = None,
    stdout: Any = None,
    stderr: Any = None,
    verbose: int = 1,
    nics: Iterable[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    executable: str | None = None,
    *,
    on_failure: Literal["end", "continue"] | None = None,
    min_ranks: int | None = None,
) -> RankResults[T]:
    """Call `fn(*args, **kwargs)` on several executors of the active Spark session, all at once.

    Args:
        fn, args, kwargs, num_proc, env, on_failure, min_ranks: as for `ring_plugins.spark.run`.
        start_timeout: seconds to wait until Spark has slots for all ranks; 600 by default.
        nics: network interfaces that carry the traffic.
        use_mpi, use_gloo, extra_mpi_args, verbose: have no effect; ranks need no MPI.
        stdout, stderr, prefix_output_with_timestamp: have no effect, which is logged: Spark keeps the output.
        executable: is rejected; Spark chooses it (spark.pyspark.python).

    Returns:
        The results in rank order.

    Raises:
        RankFailed, ArgumentError, LaunchError, MissingDependency: as for `ring_plugins.spark.run`.
    """
    if executable is not None:
        raise ArgumentError(f"executable={executable!r} is not supported here: set spark.pyspark.python.")
    if stdout is not None or stderr is not None or prefix_output_with_timestamp:
        logger.warning(
            "horovod.spark.run: stdout, stderr and prefix_output_with_timestamp have no effect: what ranks print is in "
            "the logs of Spark's executors."
        )
    variables = {**({config.INTERFACE.name: ",".join(nics)} if nics else {}), **(env or {})}
    return spark_run(
        fn,
        args,
        kwargs,
        num_proc,
        env=variables,
        on_failure=on_failure,
        min_ranks=min_ranks,
        start_timeout=600.0 if start_timeout is None else start_timeout,
    )


def run_elastic(
    fn: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    start_timeout: float | None = None,
    elastic_timeout: float | None = None,
    reset_limit: int | None = None,
    env: Mapping[str, str] | None = None,
    stdout: Any = None,
    stderr: Any = None,
    verbose: int = 1,
    nics: Iterable[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    min_np: int | None = None,
    max_np: int | None = None,
) -> RankResults[T]:
    """`run`, in which the other ranks go on when one is killed, as long as `min_num_proc` are left.

    Spark starts no process in the place of a lost one, so `max_num_proc`, `elastic_timeout` and `reset_limit` have no
    effect. Further arguments are those of `run`.
    """
    least = min_np if min_num_proc is None else min_num_proc
    return run(
        fn,
        args,
        kwargs,
        num_proc,
        start_timeout,
        env=env,
        stdout=stdout,
        stderr=stderr,
        nics=nics,
        prefix_output_with_timestamp=prefix_output_with_timestamp,
        on_failure="continue",
        min_ranks=num_proc if least is None else least,
    )
