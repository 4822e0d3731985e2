"""`ring_plugins.run`: a function on several ranks, from a notebook, a test or a script."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from ring_plugins.core import world
from ring_plugins.core.base.errors import ArgumentError, LaunchError
from ring_plugins.core.linux.process import cores
from ring_plugins.core.rendezvous import detect
from ring_plugins.launcher.environment import threads_per_rank
from ring_plugins.launcher.hosts import parse_hosts, slots
from ring_plugins.launcher.local_ranks import LocalRanks
from ring_plugins.launcher.outcomes import pack_call, results
from ring_plugins.launcher.output import Relay
from ring_plugins.launcher.remote_ranks import RemoteRanks

T = TypeVar("T")


def run(
    function: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    ranks: int | None = None,
    *,
    hosts: str | None = None,
    interface: str | None = None,
    env: Mapping[str, str] | None = None,
    tag_output: bool = False,
    timeout: float | None = None,
) -> list[T]:
    """Call `function(*args, **kwargs)` on several ranks, of this host or of several, and return what each returned.

    Every rank is a fresh process of this Python, in which `ring_plugins.init()` finds the others; what this process
    has imported or initialised (torch, TensorFlow, CUDA) is not shared and does no harm. All ranks end when one
    fails, when this call is interrupted, and when this process ends, however it does.

    Args:
        function: also one from a notebook, a script or a closure, where cloudpickle is installed. Data that it
            refers to travels with it.
        args, kwargs: for the function, the same on every rank.
        ranks: how many; by default one for every core that this process may use, or for every slot of `hosts`.
        hosts: `"host1:2,host2:2"` runs there, by way of `ring run` with its checks, instead of on this host alone. All
            need the same Python and packages under the same paths; this process must reach them by ssh, and they it.
        interface: with `hosts`, the network interface that carries the traffic.
        env: variables to set for the ranks. OMP_NUM_THREADS is their share of the cores, unless it is set.
        tag_output: put `[rank] ` in front of every line that a rank prints.
        timeout: seconds for everything, without limit by default.

    Returns:
        The results in rank order.

    Raises:
        RankFailed: the function raised on a rank, or its process died; the exception is the `__cause__`.
        ArgumentError: a function, argument or number that cannot be used.
        TimeoutExceeded: `timeout` passed; all ranks have been ended.
        LaunchError: this process is itself a rank of a job, or the ranks could not be started.
    """
    available = cores()
    if ranks is None:
        ranks = slots(parse_hosts(hosts)) if hosts else available
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise ArgumentError(f"ranks={ranks!r} is not a positive number of processes.")
    if timeout is not None and timeout <= 0:
        raise ArgumentError(f"timeout={timeout!r} is not a positive number of seconds.")
    if detect().kind != "alone" or (world.is_initialized() and world.current().topology.size > 1):
        raise LaunchError(
            f"this process is itself a rank, and ring_plugins.run() would start {ranks} more on each; start the script "
            "alone, or call the function itself after ring_plugins.init()."
        )
    packed = pack_call(function, args, kwargs)
    elsewhere = sys.stdout is not sys.__stdout__  # as in a notebook
    if hosts:
        with (
            Relay(False, always=elsewhere) as relay,
            RemoteRanks(ranks, hosts, interface, dict(env or {}), tag_output, relay) as remote,
        ):
            return results(remote.outcomes(packed, timeout))
    environment = {"OMP_NUM_THREADS": str(threads_per_rank(available, ranks)), **os.environ, **(env or {})}
    with Relay(tag_output, always=elsewhere) as relay, LocalRanks(ranks, environment, relay) as local:
        return results(local.outcomes(packed, timeout))
