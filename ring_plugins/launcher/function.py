"""`ring_plugins.run`: calls a function on several ranks, from a notebook, a test or a script.

The ranks are processes of this host, or ranks that `ring run` starts on one host or several. `ring run` can let a job
continue without ranks that are lost. Without `ring run`, the ranks of this host start at once: they inherit what they
need, and a process that dies is seen with its exit status.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NoReturn, TypeVar

from ring_plugins.core import world
from ring_plugins.core.base import config
from ring_plugins.core.base.errors import ArgumentError, LaunchError
from ring_plugins.core.base.install import RING, own_python, search_path
from ring_plugins.core.base.log import flush_output
from ring_plugins.core.base.threads import HelperThread, until
from ring_plugins.core.control.liveness import MOST_MEMBERS
from ring_plugins.core.linux.interfaces import address_towards
from ring_plugins.core.linux.process import cores, end_with_parent
from ring_plugins.core.linux.shared_memory import Segment
from ring_plugins.core.members.policy import FailurePolicy
from ring_plugins.core.net.auth import Purpose
from ring_plugins.core.net.frames import FrameSocket
from ring_plugins.core.rendezvous import detect, record
from ring_plugins.core.rendezvous.spawn import SharedMemoryRendezvous, child_environment
from ring_plugins.launcher.calls import Driver, DriverConnection, RankProcess, connect_to_driver
from ring_plugins.launcher.hosts import is_this_host, parse_hosts, slots
from ring_plugins.launcher.outcomes import (
    GRACE_SECONDS,
    Outcome,
    RankResults,
    call,
    check_options,
    pack_call,
    results,
    search_path_of_user,
    take_search_path,
)
from ring_plugins.launcher.output import Relay

T = TypeVar("T")
#: Seconds after which a rank that outlives its driver is told again to end.
_AGAIN_SECONDS = 0.2
_RANK = "from ring_plugins.launcher.function import run_rank; run_rank()"


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
    docs/fault_tolerance.md says, and the results of those that are left are returned. An exception still ends all.

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
    if ranks is None:
        ranks = slots(parse_hosts(hosts)) if hosts else cores()
    if not detect().launcher.is_none or (world.is_initialized() and world.current().topology.size > 1):
        raise LaunchError(
            f"this process is itself a rank, and ring_plugins.run() would start {ranks} more from each; start the "
            "script with plain python, or call the function itself after ring_plugins.init()."
        )
    policy = FailurePolicy.chosen(on_failure, min_ranks)
    policy.check_size(ranks)
    variables = {"PYTHONPATH": os.pathsep.join(search_path()), **(env or {})}
    packed = pack_call(function, args, kwargs, [] if "PYTHONPATH" in (env or {}) else search_path_of_user())
    return results(*gather(packed, ranks, policy, variables, timeout, hosts, interface, tag_output))


def gather(
    packed: bytes,
    ranks: int,
    policy: FailurePolicy,
    variables: Mapping[str, str],
    timeout: float | None,
    hosts: str | None = None,
    interface: str | None = None,
    tag_output: bool = False,
) -> tuple[list[Outcome], int, str | None]:
    """Run a packed call on ranks; returns the arguments of `outcomes.results`.

    Args:
        packed: from `pack_call`.
        ranks, timeout, hosts, interface, tag_output: as for `run`.
        policy: what happens when ranks are lost.
        variables: to set for the ranks.
    """
    calls_ring_run = hosts is not None or policy.recovers
    with contextlib.ExitStack() as stack:
        is_redirected = sys.stdout is not sys.__stdout__  # as in a notebook
        relay = stack.enter_context(Relay(tag_output and not calls_ring_run, always=is_redirected))
        driver = stack.enter_context(Driver(listens=calls_ring_run))
        if not calls_ring_run:
            threads = {"OMP_NUM_THREADS": str(max(1, cores() // ranks))}
            stack.enter_context(local_ranks(driver, ranks, {**threads, **os.environ, **variables}, relay))
            return driver.outcomes(packed, ranks, lambda: None, timeout), 0, None
        hosts = hosts or f"localhost:{ranks}"  # a scheduler may have allocated further hosts
        remote = RemoteRanks(driver, ranks, hosts, policy, interface, variables, tag_output, relay)
        stack.enter_context(remote)
        if not policy.recovers:
            return driver.outcomes(packed, ranks, remote.trouble, timeout), 0, None
        outcomes = driver.outcomes(packed, ranks, remote.trouble, timeout, MOST_MEMBERS)
        return outcomes, ranks, remote.failure()


@contextlib.contextmanager
def local_ranks(driver: Driver, ranks: int, environment: Mapping[str, str], relay: Relay) -> Iterator[None]:
    """Start processes of this host. Leaving the context ends all of them.

    Args:
        driver: of the call.
        ranks: number of ranks.
        environment: variables of all ranks; each rank's own ones are added.
        relay: receives what they print.
    """
    segment, patience = Segment.create(SharedMemoryRendezvous.nbytes(ranks)), 0.0
    processes: list[RankProcess] = []
    try:
        for rank in range(ranks):
            own = {**environment, **child_environment(segment, rank, ranks, os.getpid())}
            ours, theirs = socket.socketpair()
            with theirs:
                processes.append(RankProcess(rank, own, theirs.fileno(), [segment.fd], *relay.files(rank)))
            driver.add(rank, ours, processes[-1])
        relay.start()
        yield
        patience = GRACE_SECONDS
    finally:
        until(lambda: all(process.has_ended() for process in processes), patience, 0.005)
        for process in processes:
            process.kill()


def run_rank_here(fd: int, parent: int, rank: int, by: str, path: Sequence[str]) -> NoReturn:
    """Run in the process that `RankProcess` started.

    Args:
        fd: of the connection to the driver.
        parent: process id of the parent.
        rank, by, path: as for `RankProcess`.
    """
    record.caller = by
    end_with_parent()
    if os.getppid() != parent:  # it ended before the line above took effect
        sys.exit(1)
    os.set_inheritable(fd, False)  # what the function starts could keep the connection open
    take_search_path(path)
    frames = FrameSocket(socket.socket(fileno=fd), Purpose.LAUNCHER)
    _serve(DriverConnection(rank, frames), rank, threading.Event())


def _serve(driver: DriverConnection, number: int, done: threading.Event) -> NoReturn:
    """Fetch the call, run it, report its outcome, exit."""
    outcome = call(driver.receive_call(), number)
    done.set()
    flush_output()
    driver.report(replace(outcome, rank=detect().rank or 0) if config.JOINS.is_set() else outcome)
    # After a failure the driver cannot end ranks on other hosts; mpirun does, when one exits with a status.
    sys.exit(1 if outcome.failure is not None else 0)


class RemoteRanks:
    """Ranks that `ring run` starts, each of which connects to the driver. Leaving the context ends all of them.

    Args:
        driver: of the call.
        ranks: number of ranks.
        hosts: as `ring run -H` takes them.
        policy: whether the job goes on without ranks that are lost.
        interface: as `ring run --interface` takes it, or None.
        variables: environment variables to set for the ranks.
        tag_output: put `[rank] ` in front of every line.
        relay: receives what the ranks print.
    """

    def __init__(
        self,
        driver: Driver,
        ranks: int,
        hosts: str,
        policy: FailurePolicy,
        interface: str | None,
        variables: Mapping[str, str],
        tag_output: bool,
        relay: Relay,
    ) -> None:
        self._driver = driver
        remote = next((host.name for host in parse_hosts(hosts) if not is_this_host(host.name)), "localhost")
        address = address_towards(remote.rpartition("@")[2]) or socket.gethostname()
        # Every user of a host can read its command lines, so these hold names; the values are in the environment.
        environment = {config.DRIVER.name: f"{address} {driver.port} {driver.key.hex()}", **variables}
        options = ["-n", str(ranks), "-H", hosts, *(word for name in environment for word in ("-x", name))]
        options += ["--on-failure", policy.on_failure]
        options += ["--min-ranks", str(policy.min_ranks)] if policy.recovers else []
        options += ["--interface", interface] if interface else []
        options += ["--tag-output"] if tag_output else []
        out, err = relay.files(0)
        self._process = subprocess.Popen(
            [*own_python(RING), "run", *options, *own_python(_RANK)],
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        relay.start()

    def __enter__(self) -> RemoteRanks:  # noqa: PYI034 - typing.Self needs Python 3.11
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._driver.__exit__()  # ranks that are connected end now; `ring run` may still be starting others
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(20.0 if kind is None else 2.0)
                return
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(20.0)
                return
        except BaseException:  # Ctrl-C, for example
            self._process.kill()
            raise
        self._process.kill()
        self._process.wait()

    def trouble(self) -> str | None:
        """Why no further rank will connect, None while some may."""
        status = self._process.poll()
        return None if status is None else f"ring run ended with status {status}; its output above says why."

    def failure(self) -> str | None:
        """Why the job as a whole has failed, None if it has ended well, or not yet."""
        text = self.trouble() if self._process.returncode else None
        return text and text.rstrip(".")


def run_rank() -> NoReturn:
    """Run in a rank of `RemoteRanks`."""
    address, port, key = os.environ.pop(config.DRIVER.name).split()
    # A process that may take the place of a lost rank has a number of its own, and a standby does not know its rank
    # yet.
    number = config.JOINS.get() if config.JOINS.is_set() else detect().rank
    if number is None:
        raise LaunchError("this process was not started by `ring run`; ring_plugins.run() starts it.")
    driver, done = connect_to_driver(address, int(port), bytes.fromhex(key), number), threading.Event()
    HelperThread(_end_with_driver, "ring:driver", (driver, done), outside_a_job=_end).start()
    _serve(driver, number, done)


def _end_with_driver(driver: DriverConnection, done: threading.Event) -> None:
    """End this process when the driver closes the connection, unless the call is `done`."""
    driver.wait_for_end()
    if not done.is_set():
        _end()


def _end() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    # In a job that goes on without lost ranks, the first is only a preemption notice
    # (core/members/preemption_notice.py).
    while config.LOSSES_TOLERATED.is_set():
        time.sleep(_AGAIN_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)
