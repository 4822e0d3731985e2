"""RING_METRICS: the numbers of the live view in Prometheus' text format."""

import socket
import sys
import urllib.request

import pytest

from ring_plugins import MissingDependency
from ring_plugins.core.base import config
from ring_plugins.core.observe import metrics

JOB = {
    "ranks": 2,
    "ranks_at_start": 3,
    "changes": 1,
    "rows": [
        {"rank": 0, "host": "a", "answers": True, "steps": 7, "step_seconds": None, "memory_bytes": 4096},
        {"rank": 1, "host": "b", "answers": False},
    ],
}


def test_each_rank_has_a_line_for_what_is_known_of_it():
    pytest.importorskip("prometheus_client", reason="needs ring_plugins[metrics]")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    end = metrics.serve(("127.0.0.1", port), lambda: JOB, pytest.fail)
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20).read().decode()
    told = []
    assert metrics.serve(("127.0.0.1", port), lambda: JOB, told.append) is None  # it is taken
    end()
    assert "ring_ranks 2.0" in text and "ring_ranks_at_start 3.0" in text
    assert 'ring_rank_steps{host="a",rank="0"} 7.0' in text and 'ring_rank_up{host="b",rank="1"} 0.0' in text
    assert "ring_rank_step_seconds{" not in text
    assert f"RING_METRICS=127.0.0.1:{port}: nothing can listen there" in told[0]


def test_a_job_that_cannot_serve_them_does_not_start(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(MissingDependency, match=r"RING_METRICS needs prometheus-client: .*metrics"):
        metrics.check()


@pytest.mark.parametrize("text", ["host", "host:0", "host:70000", "host:x"])
def test_what_is_no_address_is_rejected(text, monkeypatch):
    monkeypatch.setenv(config.METRICS.name, text)
    with pytest.raises(ValueError, match="not HOST:PORT"):
        config.METRICS.get()


def test_a_port_alone_is_on_this_host(monkeypatch):
    for text in ("9400", ":9400"):
        monkeypatch.setenv(config.METRICS.name, text)
        assert config.METRICS.get() == ("127.0.0.1", 9400)
