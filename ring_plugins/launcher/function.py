"""`ring_plugins.run`: calls a function on several ranks, from a notebook, a test or a script."""

from __future__ import annotations

import numbers
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from ring_plugins.core import world
from ring_plugins.core.base.errors import ArgumentError, LaunchError
from ring_plugins.core.linux.process import cores
from ring_plugins.core.members.policy import FailurePolicy
from ring_plugins.core.rendezvous import detect
from ring_plugins.launcher.environment import threads_per_rank
from ring_plugins.launcher.hosts import parse_hosts, slots
from ring_plugins.launcher.local_ranks import LocalRanks
from ring_plugins.launcher.outcomes import RankResults, pack_call, results
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
    on_failure: Literal["end", "continue", "replace"] | None = None,
    min_ranks: int | None = None,
    tag_output: bool = False,
    timeout: float | None = None,
) -> RankResults[T]:
    """Call `function(*args, **kwargs)` on several ranks, on this host or several, and return the result of each.

    Every rank is a fresh process of this Python, in which `ring_plugins.init()` finds the others. It shares nothing
    that this process has imported or initialized (torch, TensorFlow, CUDA). All ranks end when one fails, when this
    call is interrupted, and when this process ends for any reason.

    With `on_failure="continue"` or `"replace"` the others go on when a rank is killed or crashes in native code, as
    docs/healing.md says, and the results of those that are left are returned. An exception still ends all.

    Args:
        function: the function. With cloudpickle installed it may come from a notebook or a script, or be a closure,
            whose data travels with it.
        args, kwargs: arguments of the function, the same on every rank.
        ranks: number of ranks; by default one for each core that this process may use, or for each slot of `hosts`.
        hosts: `"host1:2,host2:2"` runs the ranks there, through `ring run` and its checks. All hosts need the same
            Python and packages under the same paths. This process must reach them by ssh, and they must reach it.
        interface: with `hosts`, the network interface that carries the traffic.
        env: variables to set for the ranks. OMP_NUM_THREADS is a rank's share of the cores unless it is set.
        on_failure: as for `init`, in the ranks of this call; RING_ON_FAILURE or "end" by default.
        min_ranks: as for `init`.
        tag_output: put `[rank] ` in front of every line that a rank prints.
        timeout: seconds for the whole call, None for no limit.

    Returns:
        The results in rank order, a list. If ranks were lost, it has those of the others, and its attribute `lost`
        tells what became of each lost one, by the numbers of the start. A process that has taken the place of a lost
        rank returns that rank's result.

    Raises:
        RankFailed: the function raised on a rank, or the rank's process died; the exception is the `__cause__`. With
            `on_failure`: it raised, or fewer ranks than `min_ranks` were left.
        ArgumentError: the function or an argument cannot be used.
        TimeoutExceeded: `timeout` has passed; all ranks have been ended.
        LaunchError: this process is itself a rank of a job, or the ranks could not be started.
    """
    if hosts is not None and not isinstance(hosts, str):
        raise ArgumentError(f'hosts={hosts!r} is not a text: name hosts as in hosts="host1:2,host2:2".')
    available = cores()
    if ranks is None:
        ranks = slots(parse_hosts(hosts)) if hosts else available
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise ArgumentError(f"ranks={ranks!r} is not a positive number of processes.")
    if timeout is not None and not (isinstance(timeout, (int, float, numbers.Real)) and timeout > 0):
        raise ArgumentError(f"timeout={timeout!r} is not a positive number of seconds.")
    for name, value in (env or {}).items():
        if not isinstance(name, str) or not isinstance(value, str):  # the value may be a secret
            raise ArgumentError(f"env: name and value of {name!r} must be texts, as in env={{'OMP_NUM_THREADS': '1'}}.")
    if not detect().launcher.is_none or (world.is_initialized() and world.current().topology.size > 1):
        raise LaunchError(
            f"this process is itself a rank, and ring_plugins.run() would start {ranks} more from each; start the "
            "script with plain python, or call the function itself after ring_plugins.init()."
        )
    policy = FailurePolicy.chosen(on_failure, min_ranks)
    policy.check_size(ranks)
    packed = pack_call(function, args, kwargs)
    is_redirected = sys.stdout is not sys.__stdout__  # as in a notebook
    if hosts or policy.recovers:
        here = f"localhost:{ranks}"  # a scheduler may have allocated further hosts
        with (
            Relay(False, always=is_redirected) as relay,
            RemoteRanks(ranks, hosts or here, policy, interface, dict(env or {}), tag_output, relay) as remote_ranks,
        ):
            return remote_ranks.results(packed, timeout)
    environment = {"OMP_NUM_THREADS": str(threads_per_rank(available, ranks)), **os.environ, **(env or {})}
    with Relay(tag_output, always=is_redirected) as relay, LocalRanks(ranks, environment, relay) as local_ranks:
        return results(local_ranks.outcomes(packed, timeout))
