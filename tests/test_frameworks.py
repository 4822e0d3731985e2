"""What the core needs of frameworks: their threads, and Hydra's directory; stand-ins, so that none is loaded."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from ring_plugins import frameworks
from ring_plugins.core.linux.thread_count import Applied
from tests.launch import run_ranks


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
        ("torch", frameworks._set_torch),
        ("tensorflow", frameworks._set_tensorflow),
        ("jax._src.xla_bridge", frameworks._set_jax),
    ):
        monkeypatch.setitem(sys.modules, name, None)
        assert apply(3) is Applied.NOT_LOADED


@pytest.mark.parametrize(("is_default", "expected", "threads"), [(True, Applied.DONE, 3), (False, Applied.KEPT, 7)])
def test_torch_keeps_what_the_script_chose(monkeypatch, is_default, expected, threads):
    torch = Torch(7)
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(frameworks, "is_default", lambda found: is_default and found == 7)
    assert frameworks._set_torch(3) is expected
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
    assert frameworks._set_tensorflow(3) is expected
    assert threading.threads == threads


@pytest.mark.parametrize(
    ("has_started", "backend", "expected"),
    [(False, "cpu", Applied.DONE), (True, "cpu", Applied.TOO_LATE), (True, "gpu", Applied.NOT_LOADED)],
)
def test_jax_reads_its_variable_when_its_client_starts(monkeypatch, has_started, backend, expected):
    bridge = SimpleNamespace(backends_are_initialized=lambda: has_started)
    monkeypatch.setitem(sys.modules, "jax._src.xla_bridge", bridge)
    monkeypatch.setitem(sys.modules, "jax", SimpleNamespace(default_backend=lambda: backend))
    assert frameworks._set_jax(3) is expected


class Found(SimpleNamespace):
    def __getitem__(self, name):
        return getattr(self, name)


@pytest.mark.parametrize(
    ("mode", "directory"),
    [("RunMode.RUN", "run.dir='/home/it\\'s/outputs/1'"), ("RunMode.MULTIRUN", "sweep.dir='/sweeps'")],
)
def test_overrides_name_the_directory_of_rank_0(monkeypatch, mode, directory):
    found = Found(mode=mode, runtime=Found(cwd="/home/it's"), run=Found(dir="outputs/1"), sweep=Found(dir="/sweeps"))
    found.job = Found(name="train")
    config = ModuleType("hydra.core.hydra_config")
    config.HydraConfig = SimpleNamespace(initialized=lambda: True, get=lambda: found)
    monkeypatch.setitem(sys.modules, config.__name__, config)
    assert frameworks._hydra_overrides(1) == [
        f"hydra.{directory}", "hydra.output_subdir=null", "hydra.job.name=train_rank_1",
    ]  # fmt: skip


def test_scripts_without_hydra_get_none(monkeypatch):
    monkeypatch.delitem(sys.modules, "hydra.core.hydra_config", raising=False)
    assert frameworks._hydra_overrides(1) == []


SCRIPT = """
import hydra, time
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
import ring_plugins as ring
from tests.worker import report

@hydra.main(config_path=None, config_name="c", version_base="1.3")
def main(config):
    time.sleep(1.1)  # the directory's name has seconds
    ring.init(ranks=2)
    report(f"{config.rate}", HydraConfig.get().runtime.output_dir)
    ring.barrier()

ConfigStore.instance().store(name="c", node={"rate": 0.1})
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [[], ["--multirun", "rate=0.1,0.2"]])
def test_all_ranks_have_one_directory(arguments):
    pytest.importorskip("hydra")
    result = run_ranks(SCRIPT, 2, "spawned", args=arguments)
    for rate in ("0.1", "0.2")[: 1 + len(arguments) // 2]:
        first, second = result.values(rate)
        assert first == second
