"""Ranks that a script under `hydra.main` starts have its output directory; a stand-in where Hydra is not installed."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from ring_plugins import hydra_directory
from tests.launch import run_ranks


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
    assert hydra_directory._overrides(1) == [
        f"hydra.{directory}", "hydra.output_subdir=null", "hydra.job.name=train_rank_1",
    ]  # fmt: skip


def test_scripts_without_hydra_get_none(monkeypatch):
    monkeypatch.delitem(sys.modules, "hydra.core.hydra_config", raising=False)
    assert hydra_directory._overrides(1) == []


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


@pytest.mark.parametrize("arguments", [[], ["--multirun", "rate=0.1,0.2"]])
def test_all_ranks_have_one_directory(arguments):
    pytest.importorskip("hydra")
    result = run_ranks(SCRIPT, 2, "spawned", args=arguments)
    for rate in ("0.1", "0.2")[: 1 + len(arguments) // 2]:
        first, second = result.values(rate)
        assert first == second
