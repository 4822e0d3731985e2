"""What each framework is told, and when it is left alone; stand-ins for the frameworks, so that none is loaded."""

import sys
from types import SimpleNamespace

import pytest

from ring_plugins import framework_threads
from ring_plugins.core.linux.thread_count import Applied


class Torch:
    def __init__(self, threads):
        self.threads = threads

    def get_num_threads(self):
        return self.threads

    def set_num_threads(self, threads):
        self.threads = threads


class Threading:
    """As `tensorflow.config.threading`, before or after the first operation."""

    def __init__(self, threads=0, has_started=False):
        self.threads, self.has_started = threads, has_started

    def get_intra_op_parallelism_threads(self):
        return self.threads

    def set_intra_op_parallelism_threads(self, threads):
        if self.has_started:
            raise RuntimeError("too late")
        self.threads = threads


def test_what_is_not_loaded_reads_its_variable_later(monkeypatch):
    for name, apply in (
        ("torch", framework_threads._set_torch),
        ("tensorflow", framework_threads._set_tensorflow),
        ("jax._src.xla_bridge", framework_threads._set_jax),
    ):
        monkeypatch.setitem(sys.modules, name, None)
        assert apply(3) is Applied.NOT_LOADED


@pytest.mark.parametrize(("is_default", "expected", "threads"), [(True, Applied.DONE, 3), (False, Applied.KEPT, 7)])
def test_torch_keeps_what_the_script_chose(monkeypatch, is_default, expected, threads):
    torch = Torch(7)
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(framework_threads, "is_default", lambda found: is_default and found == 7)
    assert framework_threads._set_torch(3) is expected
    assert torch.threads == threads


@pytest.mark.parametrize(
    ("threading", "expected", "threads"),
    [
        (Threading(), Applied.DONE, 3),
        (Threading(threads=5), Applied.KEPT, 5),
        (Threading(has_started=True), Applied.TOO_LATE, 0),
    ],
)
def test_tensorflow_is_told_before_its_first_operation_only(monkeypatch, threading, expected, threads):
    monkeypatch.setitem(sys.modules, "tensorflow", SimpleNamespace(config=SimpleNamespace(threading=threading)))
    assert framework_threads._set_tensorflow(3) is expected
    assert threading.threads == threads


@pytest.mark.parametrize(
    ("has_started", "backend", "expected"),
    [(False, "cpu", Applied.DONE), (True, "cpu", Applied.TOO_LATE), (True, "gpu", Applied.NOT_LOADED)],
)
def test_jax_reads_its_variable_when_its_client_starts(monkeypatch, has_started, backend, expected):
    bridge = SimpleNamespace(backends_are_initialized=lambda: has_started)
    monkeypatch.setitem(sys.modules, "jax._src.xla_bridge", bridge)
    monkeypatch.setitem(sys.modules, "jax", SimpleNamespace(default_backend=lambda: backend))
    assert framework_threads._set_jax(3) is expected
