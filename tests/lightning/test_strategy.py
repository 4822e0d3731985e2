"""What the strategies promise before any process is started."""

import copy
import dataclasses
import pickle

import lightning.fabric
import lightning.pytorch
import lightning_fabric
import pytest
import pytorch_lightning
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.lightning import (
    RingEnvironment,
    RingFabricStrategy,
    RingStrategy,
    for_lightning,
    for_pytorch_lightning,
)
from ring_plugins.lightning.environment import announce_rank
from ring_plugins.lightning.failure import give_status
from ring_plugins.lightning.parallel import devices_of_node
from ring_plugins.lightning.reduction import all_reduce
from ring_plugins.lightning.sync_batchnorm import HostSyncBatchNorm

TREES = [(lightning.pytorch, for_lightning), (pytorch_lightning, for_pytorch_lightning)]
FABRICS = [(lightning.fabric, for_lightning), (lightning_fabric, for_pytorch_lightning)]
NAMES = ["ring", "ring_fork", "ring_notebook"]


@pytest.mark.parametrize("strategy", ["class", *NAMES])
@pytest.mark.parametrize(("package", "ours"), TREES)
def test_a_trainer_of_either_spelling_takes_it(package, ours, strategy):
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
def test_a_fabric_of_either_spelling_takes_it(package, ours, strategy):
    fabric = package.Fabric(
        strategy=RingFabricStrategy() if strategy == "class" else strategy, devices=2, accelerator="cpu"
    )
    assert type(fabric.strategy) is ours.RingFabricStrategy
    assert fabric.world_size == 2


def test_a_users_own_subclass_is_refused_with_the_right_import():
    class Own(RingStrategy):
        pass

    assert lightning.pytorch.Trainer(strategy=Own(), devices=2, accelerator="cpu", logger=False).world_size == 2
    with pytest.raises(ArgumentError, match=r"ring_plugins\.lightning\.for_pytorch_lightning\.RingStrategy"):
        pytorch_lightning.Trainer(strategy=Own(), devices=2, accelerator="cpu", logger=False)


def test_alone_it_is_a_single_device():
    strategy = lightning.pytorch.Trainer(strategy="ring", devices=1, accelerator="cpu", logger=False).strategy
    assert strategy.launcher is None
    assert not strategy.is_distributed
    assert strategy.waited_seconds == 0.0
    tensor = torch.ones(2)
    assert strategy.reduce(tensor) is tensor
    assert strategy.all_gather(tensor) is tensor


def test_a_gpu_that_is_not_there_is_refused_as_lightning_does():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(MisconfigurationException, match="No supported gpu backend found"):
        lightning.pytorch.Trainer(strategy="ring", accelerator="gpu", devices=2)


def test_several_nodes_need_a_launcher():
    with pytest.raises(ArgumentError, match=r"num_nodes=2.*mpirun, torchrun or srun"):
        lightning.pytorch.Trainer(strategy="ring", devices=2, num_nodes=2, accelerator="cpu", logger=False)


def test_cluster_environment_is_an_environment_of_both():
    for package in (lightning.fabric, lightning_fabric):
        assert issubclass(RingEnvironment, package.plugins.environments.ClusterEnvironment)


@pytest.fixture
def _rank_zero():
    yield
    announce_rank(0)


@pytest.mark.usefixtures("_rank_zero")
@pytest.mark.parametrize(
    ("variables", "place"),
    [
        (
            {
                "OMPI_COMM_WORLD_RANK": "5",
                "OMPI_COMM_WORLD_SIZE": "8",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
            },
            (5, 8, 1, 4, 1, 2),
        ),
        (
            {
                "RANK": "3",
                "WORLD_SIZE": "4",
                "LOCAL_RANK": "1",
                "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": "localhost",
                "MASTER_PORT": "1",
            },
            (3, 4, 1, 2, 1, 2),
        ),
    ],
)
def test_the_launchers_variables_are_followed(monkeypatch, variables, place):
    """Also inside a SLURM allocation, whose own variables say rank 0 to everybody."""
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_NTASKS", "1")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    environment = RingEnvironment()
    assert environment.creates_processes_externally
    found = (
        environment.global_rank(),
        environment.world_size(),
        environment.local_rank(),
        environment.local_world_size(),
        environment.node_rank(),
        environment.num_nodes(),
    )
    assert found == place
    announce_rank()
    assert lightning.pytorch.utilities.rank_zero_only.rank == place[0]
    trainer = lightning.pytorch.Trainer(strategy="ring", devices=1, accelerator="cpu", logger=False)
    assert (trainer.global_rank, trainer.world_size, trainer.num_devices) == (place[0], place[1], place[3])
    assert trainer.distributed_sampler_kwargs == {"num_replicas": place[1], "rank": place[0]}


def test_each_rank_of_a_node_has_a_device(monkeypatch):
    cpu, gpus = [torch.device("cpu")], [torch.device("cuda", index) for index in range(4)]
    assert devices_of_node(cpu, 3) == cpu * 3
    assert devices_of_node(gpus[2:], 2) == gpus[2:]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert devices_of_node(gpus[:1], 4) == gpus
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert devices_of_node(gpus[:1], 2) == [gpus[0], gpus[0]]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ArgumentError, match="started 3 processes on this node, which has 2 cuda devices"):
        devices_of_node(gpus[:1], 3)


def test_an_unknown_reduction_is_named():
    with pytest.raises(ArgumentError, match="reduce_op='median'.*mean, avg, sum"):
        all_reduce(torch.ones(1), reduce_op="median")


def test_sigterm_is_not_success():
    error = lightning.pytorch.utilities.exceptions.SIGTERMException()
    give_status(error)
    assert error.code == 143


def test_lightning_does_not_start_mpi_where_there_is_no_mpirun(monkeypatch):
    pytest.importorskip("mpi4py")
    monkeypatch.setattr("mpi4py.rc.initialize", True)
    for package in (lightning.fabric, lightning_fabric):
        assert package.plugins.environments.MPIEnvironment.detect() is False


def test_a_strategy_travels_to_spawned_processes():
    strategy = lightning.pytorch.Trainer(strategy="ring", devices=2, accelerator="cpu", logger=False).strategy
    again = pickle.loads(pickle.dumps(strategy))
    assert type(again) is type(strategy)
    assert again.world_size == 2


def test_batch_norm_layers_come_back_with_what_they_learned():
    model = torch.nn.ModuleDict({"a": torch.nn.Sequential(torch.nn.BatchNorm2d(3)), "b": torch.nn.BatchNorm1d(2)})
    before, keys = copy.deepcopy(model), list(model.state_dict())
    sync = HostSyncBatchNorm()
    synchronised = sync.apply(model)
    assert list(synchronised.state_dict()) == keys
    assert {type(module).__name__ for module in synchronised.modules()} & {"BatchNorm1d", "BatchNorm2d"} == set()
    synchronised.double().eval()
    synchronised["b"].running_mean.fill_(7)
    reverted = sync.revert(synchronised)
    assert [type(module) for module in reverted.modules()] == [type(module) for module in before.modules()]
    assert reverted["b"].running_mean.dtype == torch.float64
    assert reverted["b"].running_mean.tolist() == [7, 7]
    assert not reverted["b"].training


def test_in_a_notebook_workers_are_forked(monkeypatch):
    """There is no script to run again; `strategy="ring"` means the same as "ring_notebook" there."""
    tree = dataclasses.replace(RingStrategy.tree, is_interactive=True)
    monkeypatch.setattr(RingStrategy, "tree", tree)
    launcher = lightning.pytorch.Trainer(strategy="ring", devices=2, accelerator="cpu", logger=False).strategy.launcher
    assert isinstance(launcher, tree.trainer_launcher)
    assert launcher.is_interactive_compatible
