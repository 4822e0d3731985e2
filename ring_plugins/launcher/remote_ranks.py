"""Runs a call on ranks that `ring run` starts, each of which connects back to get the call.

So it runs on several hosts, and wherever the job is to go on without ranks that are lost, which `ring run` can do.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import LaunchError
from ring_plugins.core.base.log import flush_output
from ring_plugins.core.base.own_python import RING, own_python, search_path
from ring_plugins.core.base.threads import HelperThread
from ring_plugins.core.control.liveness import MOST_MEMBERS
from ring_plugins.core.linux.interfaces import address_towards
from ring_plugins.core.members.policy import FailurePolicy
from ring_plugins.core.rendezvous import detect
from ring_plugins.launcher.control import Driver, DriverConnection
from ring_plugins.launcher.environment import search_path_of_user, take_search_path
from ring_plugins.launcher.hosts import is_this_host, parse_hosts
from ring_plugins.launcher.outcomes import RankResults, call, results
from ring_plugins.launcher.output import Relay

#: Seconds after which a rank that outlives its driver is told again to end.
_AGAIN_SECONDS = 0.2
_RANK = "from ring_plugins.launcher.remote_ranks import run_rank; run_rank()"


class RemoteRanks:
    """The ranks of one call. Leaving the context ends all of them.

    Args:
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
        ranks: int,
        hosts: str,
        policy: FailurePolicy,
        interface: str | None,
        variables: Mapping[str, str],
        tag_output: bool,
        relay: Relay,
    ) -> None:
        self._ranks, self._policy = ranks, policy
        self._path = [] if "PYTHONPATH" in variables else search_path_of_user()
        with contextlib.ExitStack() as undo:  # if `ring run` cannot be started
            self._driver = Driver()
            undo.callback(self._driver.__exit__)
            remote = next((host.name for host in parse_hosts(hosts) if not is_this_host(host.name)), "localhost")
            address = address_towards(remote.rpartition("@")[2]) or socket.gethostname()
            # Every user of a host can read its command lines, so these hold names; the values are in the environment.
            environment = {
                config.DRIVER.name: f"{address} {self._driver.port} {self._driver.key.hex()}",
                "PYTHONPATH": os.pathsep.join(search_path()),
                **variables,
            }
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
            undo.pop_all()

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

    def results(self, packed: bytes, timeout: float | None) -> RankResults[Any]:
        """Send the call to every rank and return the results.

        Args:
            packed: what `outcomes.pack_call` made.
            timeout: seconds for all ranks to finish, None for no limit.

        Raises:
            LaunchError: `ring run` could not start all ranks.
            RankFailed: a rank failed, or the job could not go on.
            TimeoutExceeded: the time has passed.
        """
        packed = json.dumps(self._path).encode() + b"\n" + packed
        if not self._policy.recovers:
            return results(self._driver.outcomes(packed, self._ranks, self._trouble, timeout))
        outcomes = self._driver.outcomes(packed, self._ranks, self._trouble, timeout, MOST_MEMBERS)
        trouble = self._trouble() if self._process.returncode else None
        return results(outcomes, self._ranks, trouble and trouble.rstrip("."))

    def _trouble(self) -> str | None:
        status = self._process.poll()
        return None if status is None else f"ring run ended with status {status}; its output above says why."


def run_rank() -> None:
    """Run in a rank of `RemoteRanks`: fetch the call, run it, report its outcome, exit."""
    address, port, key = os.environ.pop(config.DRIVER.name).split()
    # A process that may take the place of a lost rank has a number of its own, and a standby does not know its rank
    # yet.
    number = config.JOINS.get() if config.JOINS.is_set() else detect().rank
    if number is None:
        raise LaunchError("this process was not started by `ring run`; ring_plugins.run() starts it.")
    driver = DriverConnection(address, int(port), bytes.fromhex(key), number)
    path, _, packed = driver.receive_call().partition(b"\n")
    done = threading.Event()
    HelperThread(_end_with_driver, "ring:driver", (driver, done), outside_a_job=_end).start()
    take_search_path(json.loads(path))
    outcome = call(packed, number)
    done.set()
    flush_output()
    driver.report(replace(outcome, rank=detect().rank or 0) if config.JOINS.is_set() else outcome)
    # After a failure the driver cannot end ranks on other hosts; mpirun does, when one exits with a status.
    sys.exit(1 if outcome.failure is not None else 0)


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
