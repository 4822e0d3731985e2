"""RING_METRICS: what `ring top` shows, in Prometheus' text format, by prometheus-client's own server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from ring_plugins.core.base.errors import MissingDependency
from ring_plugins.core.base.install import pip_command

#: By name: the entry of a row of `LiveView.snapshot`, and what it means.
_OF_RANKS = {
    "steps": ("steps", "Steps that the rank has finished."),
    "step_seconds": ("step_seconds", "Seconds of a step, in the last second or so."),
    "waiting_ratio": ("waiting", "Share of the time in which the rank waits for a slower one."),
    "moving_ratio": ("moving", "Share of the time in which the rank waits for bytes to move."),
    "step_bytes": ("step_bytes", "Bytes of gradients in a step."),
    "memory_bytes": ("memory_bytes", "Memory of the rank's process."),
    "wait_seconds": ("waits_seconds", "Seconds for which the rank waits in one operation."),
    "up": ("answers", "1 if the rank has answered in the last five seconds."),
}
_OF_JOB = {
    "ranks": ("ranks", "Ranks of the job now."),
    "ranks_at_start": ("ranks_at_start", "Places of the job, filled or not."),
    "membership_changes_total": ("changes", "How often ranks were lost, have left or joined."),
}


class End(Protocol):
    """Ends a server."""

    def __call__(self, is_forked: bool = False) -> None:
        """Close its sockets, and end its thread unless this is a forked child, which has none."""


class Collector:
    """What prometheus-client asks for when somebody scrapes.

    Args:
        snapshot: returns the job and its ranks, see `LiveView.snapshot`.
    """

    def __init__(self, snapshot: Callable[[], dict[str, Any]]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        job = self._snapshot()
        for name, (key, meaning) in _OF_JOB.items():
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            yield kind(f"ring_{name}", meaning, value=job[key])
        for name, (key, meaning) in _OF_RANKS.items():
            family = GaugeMetricFamily(f"ring_rank_{name}", meaning, labels=["rank", "host"])
            for row in job["rows"]:
                if row.get(key) is not None:
                    family.add_metric([str(row["rank"]), row["host"]], float(row[key]))
            yield family


def serve(address: tuple[str, int], snapshot: Callable[[], dict[str, Any]], warn: Callable[[str], None]) -> End | None:
    """Serve the numbers of a job; returns what ends that, None if nothing can listen there.

    Args:
        address: host and port.
        snapshot: as for `Collector`.
        warn: tells the user why nothing can.
    """
    host, port = address
    registry = _client().CollectorRegistry()
    registry.register(Collector(snapshot))
    try:
        server, thread = _client().start_http_server(port, host, registry)
    except OSError as error:
        warn(f"RING_METRICS={host}:{port}: nothing can listen there: {error}. The job goes on, and tries it again.")
        return None

    def end(is_forked: bool = False) -> None:
        if not is_forked:
            server.shutdown()
        server.server_close()
        if not is_forked:
            thread.join()

    return end


def check() -> None:
    """Find out whether the numbers can be served.

    Raises:
        MissingDependency: prometheus-client is not installed.
    """
    _client()


def _client() -> Any:
    try:
        import prometheus_client
    except ImportError as error:
        raise MissingDependency(f"RING_METRICS needs prometheus-client: {pip_command('metrics')}") from error
    return prometheus_client
