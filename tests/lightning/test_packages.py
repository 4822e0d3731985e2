"""The strategies for `lightning` and `pytorch_lightning`, before any process is started."""

import dataclasses
import importlib
import pickle

import lightning.fabric
import lightning.pytorch
import lightning_fabric
import pytest
import pytorch_lightning
import torch

import ring_plugins.lightning
from ring_plugins.core.base.errors import ArgumentError, MissingDependency
from ring_plugins.lightning import RingEnvironment, RingFabricStrategy, RingStrategy, packages

TRAINERS = [(lightning.pytorch, packages.lightning), (pytorch_lightning, packages.pytorch_lightning)]
FABRICS = [(lightning.fabric, packages.lightning), (lightning_fabric, packages.pytorch_lightning)]
NAMES = ["ring", "ring_fork", "ring_notebook"]


@pytest.mark.parametrize("strategy", ["class", *NAMES])
@pytest.mark.parametrize(("package", "ours"), TRAINERS)
def test_a_trainer_of_either_package_takes_it(package, ours, strategy):
    strategy = RingStrategy(bucket_bytes=1000) if strategy == "class" else strategy
    trainer = package.Trainer(strategy=strategy, devices=2, accelerator="cpu", logger=False)
    assert type(trainer.strategy) is ours.RingStrategy
    assert isinstance(trainer.strategy, package.strategies.ParallelStrategy)
    assert trainer.world_size == 2
    assert trainer.strategy.is_distributed
    if not isinstance(strategy, str):
        assert trainer.strategy is strategy
        assert trainer.strategy._averager_arguments["bucket_bytes"] == 1000


@pytest.mark.parametrize("strategy", ["class", *NAMES])
@pytest.mark.parametrize(("package", "ours"), FABRICS)
def test_a_fabric_of_either_package_takes_it(package, ours, strategy):
    fabric = package.Fabric(
        strategy=RingFabricStrategy() if strategy == "class" else strategy, devices=2, accelerator="cpu"
    )
    assert type(fabric.strategy) is ours.RingFabricStrategy
    assert fabric.world_size == 2


def test_a_users_own_subclass_is_refused_with_the_right_import():
    class Own(RingStrategy):
        pass

    assert lightning.pytorch.Trainer(strategy=Own(), devices=2, accelerator="cpu", logger=False).world_size == 2
    with pytest.raises(ArgumentError, match=r"ring_plugins\.lightning\.packages\.pytorch_lightning\.RingStrategy"):
        pytorch_lightning.Trainer(strategy=Own(), devices=2, accelerator="cpu", logger=False)


@pytest.mark.parametrize(("package", "ours"), TRAINERS)
def test_a_strategy_can_be_pickled_for_spawned_processes(package, ours):
    strategy = package.Trainer(strategy="ring", devices=2, accelerator="cpu", logger=False).strategy
    again = pickle.loads(pickle.dumps(strategy))
    assert type(again) is type(strategy)
    assert again.world_size == 2


def test_strategies_are_still_found_where_they_were():
    import ring_plugins.lightning.for_pytorch_lightning as old
    from ring_plugins.lightning.for_lightning import RingStrategy as Old

    assert Old is packages.lightning.RingStrategy
    assert old.RingFabricStrategy is packages.pytorch_lightning.RingFabricStrategy


def test_cluster_environment_is_an_environment_of_both():
    for package in (lightning.fabric, lightning_fabric):
        assert issubclass(RingEnvironment, package.plugins.environments.ClusterEnvironment)


def test_lightning_does_not_start_mpi_where_there_is_no_mpirun(monkeypatch):
    pytest.importorskip("mpi4py")
    monkeypatch.setattr("mpi4py.rc.initialize", True)
    for package in (lightning.fabric, lightning_fabric):
        assert package.plugins.environments.MPIEnvironment.detect() is False


def test_in_a_notebook_workers_are_forked(monkeypatch):
    """There is no script to run again; `strategy="ring"` means the same as "ring_notebook" there."""
    package = dataclasses.replace(RingStrategy.package, is_interactive=True)
    monkeypatch.setattr(RingStrategy, "package", package)
    launcher = lightning.pytorch.Trainer(strategy="ring", devices=2, accelerator="cpu", logger=False).strategy.launcher
    assert isinstance(launcher, package.trainer_launcher)
    assert launcher.is_interactive_compatible


def test_without_lightning_the_package_to_install_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match=r"pip install 'ring_plugins\[lightning\]'"):
        importlib.reload(ring_plugins.lightning)


@pytest.mark.parametrize(("package", "ours"), TRAINERS)
def test_compiled_modules_are_accepted(package, ours):
    module = importlib.import_module(f"{package.__name__}.utilities.compile")
    boring = importlib.import_module(f"{package.__name__}.demos.boring_classes")
    compiled = torch.compile(boring.BoringModel(), backend="eager")
    module._verify_strategy_supports_compile(compiled, ours.RingStrategy())
