"""The strategies for `lightning` and `pytorch_lightning`, before any process is started."""

import importlib
import pickle
import subprocess
import sys
import textwrap

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


#: Each script imports only `pytorch_lightning`, or `lightning` later, where both are installed.
IMPORTS = {
    "before ours": """
        import pytorch_lightning, ring_plugins.lightning
        from ring_plugins.lightning import BalanceMonitor, RingStrategy
        assert issubclass(RingStrategy, pytorch_lightning.strategies.ParallelStrategy)
        assert issubclass(BalanceMonitor, pytorch_lightning.Callback)
    """,
    "after ours": """
        import ring_plugins.lightning
        assert not {"lightning", "pytorch_lightning", "lightning_fabric"} & set(sys.modules)
        import pytorch_lightning
        assert trainer(pytorch_lightning, "ring_fork") == "pytorch_lightning.RingStrategy"
    """,
    "one after the other": """
        import lightning_fabric
        from ring_plugins.lightning import RingFabricStrategy, RingStrategy
        assert "lightning" not in sys.modules
        mine = RingFabricStrategy(), RingStrategy()
        import lightning.pytorch
        lightning.Fabric(strategy=mine[0], devices=2, accelerator="cpu")
        assert trainer(lightning.pytorch, mine[1]) == "lightning.RingStrategy"
        sys.exit()
    """,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "when", [pytest.param(when, marks=[pytest.mark.slow] * (when != "one after the other")) for when in IMPORTS]
)
def test_only_the_package_that_the_script_imports_is_imported(when):
    script = """
        import sys
        from lightning_utilities.core import rank_zero

        def trainer(package, strategy):
            made = package.Trainer(strategy=strategy, devices=2, accelerator="cpu", logger=False)
            return type(made.strategy).__qualname__
    """
    check = """
        assert trainer(pytorch_lightning, "ring") == "pytorch_lightning.RingStrategy"
        assert "lightning" not in sys.modules
        assert rank_zero.log.name.startswith("pytorch_lightning"), rank_zero.log
    """
    parts = map(textwrap.dedent, (script, IMPORTS[when], check))
    ended = subprocess.run([sys.executable, "-c", "".join(parts)], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(("package", "ours"), TRAINERS)
def test_before_the_processes_are_launched_reduce_returns_its_input_and_samplers_have_their_numbers(package, ours):
    """As with Lightning's own strategies: `setup` of a callback may ask, and the Trainer has no processes yet."""
    strategy = package.Trainer(strategy="ring", devices=2, accelerator="cpu", logger=False).strategy
    assert strategy.reduce(torch.tensor(3.0), reduce_op="sum") == 3.0
    assert strategy.broadcast("text") == "text"
    strategy.barrier()
    sampler = torch.utils.data.DistributedSampler(range(5), shuffle=False, **strategy.distributed_sampler_kwargs)
    assert list(sampler) == [0, 2, 4]


@pytest.mark.parametrize("hook", ["on_exception", "on_train_end", "pre_backward", "teardown"])
def test_hooks_of_the_base_class_are_called(hook, monkeypatch):
    called = []
    base = lightning.pytorch.strategies.Strategy
    strategy = lightning.pytorch.Trainer(strategy="ring", devices=2, accelerator="cpu", logger=False).strategy
    original = getattr(base, hook)
    monkeypatch.setattr(base, hook, lambda *args: (called.append(hook), original(*args)))
    strategy.model = strategy._lightning_module = torch.nn.Linear(1, 1)
    arguments = {"on_exception": [KeyboardInterrupt()], "pre_backward": [torch.ones(())]}
    monkeypatch.setattr(type(strategy), "_broadcast_all_buffers", lambda self: None)
    getattr(strategy, hook)(*arguments.get(hook, []))
    assert called == [hook]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (RingStrategy, lightning.pytorch.strategies.DDPStrategy),
        (RingFabricStrategy, lightning.fabric.strategies.DDPStrategy),
    ],
)
def test_what_can_be_set_on_ddp_can_be_set_here(ours, theirs):
    for name in dir(theirs):
        mine, other = getattr(ours, name, None), getattr(theirs, name)
        if isinstance(other, property) and other.fset is not None:
            assert not isinstance(mine, property) or mine.fset is not None, name


def test_a_users_own_subclass_is_rejected_with_the_right_import():
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
    monkeypatch.setattr(RingStrategy, "is_interactive", True)
    launcher = lightning.pytorch.Trainer(strategy="ring", devices=2, accelerator="cpu", logger=False).strategy.launcher
    assert isinstance(launcher, RingStrategy.lightnings_launcher)
    assert launcher.is_interactive_compatible


def test_without_lightning_the_package_to_install_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match=r'pip install "ring_plugins\[lightning\]"'):
        importlib.reload(ring_plugins.lightning)


@pytest.mark.parametrize(("package", "ours"), TRAINERS)
def test_compiled_modules_are_accepted(package, ours):
    module = importlib.import_module(f"{package.__name__}.utilities.compile")
    boring = importlib.import_module(f"{package.__name__}.demos.boring_classes")
    compiled = torch.compile(boring.BoringModel(), backend="eager")
    module._verify_strategy_supports_compile(compiled, ours.RingStrategy())
