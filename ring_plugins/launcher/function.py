"""`ring_plugins.run`: calls a function on several ranks, from a notebook, a test or a script."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from ring_plugins.core import world
from ring_plugins.core.base.errors import ArgumentError, LaunchError
from ring_plugins.core.base.own_python import search_path
from ring_plugins.core.control.liveness import MOST_MEMBERS
from ring_plugins.core.linux.process import cores
from ring_plugins.core.members.policy import FailurePolicy
from ring_plugins.core.rendezvous import detect
from ring_plugins.launcher.call_ranks import LocalRanks, RemoteRanks
from ring_plugins.launcher.calls import Driver
from ring_plugins.launcher.environment import threads_per_rank
from ring_plugins.launcher.hosts import parse_hosts, slots
from ring_plugins.launcher.outcomes import RankResults, check_options, pack_call, results, search_path_of_user
from ring_plugins.launcher.output import Relay

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
    check_options("ranks", ranks, timeout, env)
    available = cores()
    if ranks is None:
        ranks = slots(parse_hosts(hosts)) if hosts else available
    if not detect().launcher.is_none or (world.is_initialized() and world.current().topology.size > 1):
        raise LaunchError(
            f"this process is itself a rank, and ring_plugins.run() would start {ranks} more from each; start the "
            "script with plain python, or call the function itself after ring_plugins.init()."
        )
    policy = FailurePolicy.chosen(on_failure, min_ranks)
    policy.check_size(ranks)
    variables = {"PYTHONPATH": os.pathsep.join(search_path()), **(env or {})}
    packed = pack_call(function, args, kwargs, [] if "PYTHONPATH" in (env or {}) else search_path_of_user())
    calls_ring_run = hosts is not None or policy.recovers
    here = f"localhost:{ranks}"  # a scheduler may have allocated further hosts
    is_redirected = sys.stdout is not sys.__stdout__  # as in a notebook
    with contextlib.ExitStack() as stack:
        relay = stack.enter_context(Relay(tag_output and not calls_ring_run, always=is_redirected))
        driver = stack.enter_context(Driver(listens=calls_ring_run))
        if not calls_ring_run:
            environment = {"OMP_NUM_THREADS": str(threads_per_rank(available, ranks)), **os.environ, **variables}
            local = stack.enter_context(LocalRanks(driver, ranks, environment, relay))
            return results(driver.outcomes(packed, ranks, local.trouble, timeout))
        remote = RemoteRanks(driver, ranks, hosts or here, policy, interface, variables, tag_output, relay)
        stack.enter_context(remote)
        most = MOST_MEMBERS if policy.recovers else 0
        outcomes = driver.outcomes(packed, ranks, remote.trouble, timeout, most)
        return results(outcomes, ranks if policy.recovers else 0, remote.failure() if policy.recovers else None)
