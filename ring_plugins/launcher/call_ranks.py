"""The ranks of one call: processes of this host, or ranks that `ring run` starts on one host or several.

`ring run` can let a job continue without ranks that are lost. Without it, the ranks of this host start at once: they
inherit what they need, and a process that dies is seen with its exit status.
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
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NoReturn

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import LaunchError
from ring_plugins.core.base.log import flush_output
from ring_plugins.core.base.own_python import RING, own_python
from ring_plugins.core.base.threads import HelperThread
from ring_plugins.core.linux.interfaces import address_towards
from ring_plugins.core.linux.process import end_with_parent, ending
from ring_plugins.core.linux.shared_memory import Segment
from ring_plugins.core.members.policy import FailurePolicy
from ring_plugins.core.rendezvous import detect, record
from ring_plugins.core.rendezvous.spawn import SharedMemoryRendezvous, child_environment
from ring_plugins.launcher.calls import Driver, DriverConnection, connect_to_driver
from ring_plugins.launcher.hosts import is_this_host, parse_hosts
from ring_plugins.launcher.outcomes import GRACE_SECONDS, Failure, call, take_search_path
from ring_plugins.launcher.output import Relay

#: Seconds after which a rank that outlives its driver is told again to end.
_AGAIN_SECONDS = 0.2
_RANK = "from ring_plugins.launcher.call_ranks import run_rank; run_rank()"
_HERE = "from ring_plugins.launcher.call_ranks import run_rank_here as run; run({fd}, {parent}, {rank}, {by!r}, {path})"


class LocalRanks:
    """Processes of this host. Leaving the context ends all of them.

    Args:
        driver: of the call.
        ranks: number of ranks.
        environment: variables of all ranks; each rank's own ones are added.
        relay: receives what they print.
    """

    def __init__(self, driver: Driver, ranks: int, environment: Mapping[str, str], relay: Relay) -> None:
        segment = Segment.create(SharedMemoryRendezvous.nbytes(ranks))
        self._processes: list[RankProcess] = []
        try:
            for rank in range(ranks):
                own = {**environment, **child_environment(segment, rank, ranks, os.getpid())}
                ours, theirs = socket.socketpair()
                with theirs:
                    process = RankProcess(rank, own, theirs.fileno(), [segment.fd], *relay.files(rank))
                self._processes.append(process)
                driver.add(rank, ours, process)
            relay.start()
        except BaseException:
            self._end()
            raise

    def __enter__(self) -> LocalRanks:  # noqa: PYI034 - typing.Self needs Python 3.11
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._end(patience=GRACE_SECONDS if kind is None else 0.0)

    def trouble(self) -> str | None:
        """Why no further rank will connect: all are connected."""
        return None

    def _end(self, patience: float = 0.0) -> None:
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline and not all(process.has_ended() for process in self._processes):
            time.sleep(0.005)
        for process in self._processes:
            process.kill()


class RankProcess:
    """One rank: a fresh process of this Python, which ends with the thread that started it.

    Args:
        rank: its number.
        environment: all of its variables.
        fd: of its connection to the driver.
        pass_fds: further file descriptors that it inherits.
        stdout, stderr: as for Popen.
        by: what starts it, for messages.
        path: where it searches for modules first.
    """

    def __init__(
        self,
        rank: int,
        environment: Mapping[str, str],
        fd: int,
        pass_fds: Sequence[int] = (),
        stdout: int | None = None,
        stderr: int | None = None,
        by: str = "ring_plugins.run",
        path: Sequence[str] = (),
    ) -> None:
        self._process = subprocess.Popen(
            own_python(_HERE.format(fd=fd, parent=os.getpid(), rank=rank, by=by, path=list(path))),
            env=dict(environment),
            pass_fds=[*pass_fds, fd],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            # Ctrl-C reaches the process that called `run`, which ends the ranks. In its session each of them would
            # print its own KeyboardInterrupt.
            start_new_session=True,
        )

    def failure(self) -> Failure:
        """Wait for the end of the process, which has reported no outcome."""
        code = self._process.wait()
        return Failure(socket.gethostname(), f"its process ended with {ending(code)}", is_loss=code < 0)

    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None

    def kill(self) -> None:
        """Kill the process and whatever it started in its session."""
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


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
    _serve(DriverConnection(rank, socket.socket(fileno=fd)), rank, threading.Event())


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
