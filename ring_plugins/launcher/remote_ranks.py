"""Ranks of a function on several hosts: `ring run` starts them, and each calls this process back."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import LaunchError
from ring_plugins.core.rendezvous import detect
from ring_plugins.launcher.control import Driver, Line
from ring_plugins.launcher.hosts import parse_hosts
from ring_plugins.launcher.outcomes import Outcome
from ring_plugins.launcher.output import Relay
from ring_plugins.launcher.plan import is_this_host
from ring_plugins.launcher.process import search_path
from ring_plugins.launcher.rank_assignment import address_towards

_VARIABLE = config.DRIVER.name
_RING = "from ring_plugins.cli.main import main; main()"
_RANK = "from ring_plugins.launcher.remote_ranks import be_a_rank; be_a_rank()"


class RemoteRanks:
    """The ranks of one call. As a context it leaves none of them behind.

    Args:
        ranks: how many.
        hosts: as `ring run -H` takes them.
        interface: as `ring run --interface`, or None.
        variables: to set for the ranks.
        tag_output: put its rank in front of every line.
        relay: takes what they print.
    """

    def __init__(
        self,
        ranks: int,
        hosts: str,
        interface: str | None,
        variables: Mapping[str, str],
        tag_output: bool,
        relay: Relay,
    ) -> None:
        self._ranks = ranks
        self._driver = Driver()
        far = next((host.name for host in parse_hosts(hosts) if not is_this_host(host.name)), "localhost")
        address = address_towards(far.rpartition("@")[2])
        options = ["-n", str(ranks), "-H", hosts, "-x", _VARIABLE, "-x", "PYTHONPATH"]
        options += ["--interface", interface] if interface else []
        options += ["--tag-output"] if tag_output else []
        options += [word for name, value in variables.items() for word in ("-x", f"{name}={value}")]
        out, err = relay.ends(0)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _RING, "run", *options, sys.executable, "-c", _RANK],
            env={
                **os.environ,
                # In the environment, because command lines can be read by everyone on a host.
                _VARIABLE: f"{address} {self._driver.port} {self._driver.key.hex()}",
                "PYTHONPATH": os.pathsep.join(search_path()),
            },
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        relay.start()

    def __enter__(self) -> RemoteRanks:  # noqa: PYI034 - typing.Self is younger than Python 3.10
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._driver.__exit__()  # the ranks hear that; whoever starts them may not have got so far
        try:
            self._process.wait(20.0 if kind is None else 2.0)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(20.0)
            self._process.kill()
            self._process.wait()

    def outcomes(self, packed: bytes, timeout: float | None) -> list[Outcome]:
        """As `LocalRanks.outcomes`.

        Raises:
            LaunchError: `ring run` could not start all ranks.
        """
        return self._driver.outcomes(packed, self._ranks, self._trouble, timeout)

    def _trouble(self) -> str | None:
        status = self._process.poll()
        return None if status is None else f"ring run ended with status {status}; what it printed says why."


def be_a_rank() -> None:
    """Be one of the ranks that `RemoteRanks` had started, and end when the driver ends."""
    address, port, key = os.environ.pop(_VARIABLE).split()
    rank = detect().rank
    if rank is None:
        raise LaunchError("this process was not started by mpirun; ring_plugins.run(hosts=...) starts it.")
    line = Line(address, int(port), bytes.fromhex(key), rank)
    packed = line.work()
    done = threading.Event()
    threading.Thread(target=_end_with, args=(line, done), name="ring:driver", daemon=True).start()
    from ring_plugins.launcher.task import perform

    outcome = perform(packed, rank)
    done.set()
    sys.stdout.flush()
    sys.stderr.flush()
    line.report(outcome)
    # mpirun ends the others when one ends badly, which they could not do by themselves from another host.
    sys.exit(1 if outcome.failure is not None else 0)


def _end_with(line: Line, done: threading.Event) -> None:
    """End this process, unless it is `done`, when the driver hangs up: it has ended, or lost interest."""
    with contextlib.suppress(OSError, EOFError):
        line.connection.poll(None)
    if not done.is_set():
        os.kill(os.getpid(), signal.SIGTERM)
