"""The device of each rank, and settings that need a launcher."""

import inspect
from types import SimpleNamespace

import lightning.pytorch
import pytest
import torch
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy

from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.base.member import Topology
from ring_plugins.lightning import RingFabricStrategy, RingStrategy, parallel
from ring_plugins.lightning.parallel import devices_of_node


def gpus(*indices):
    return [torch.device("cuda", index) for index in indices]


def test_all_ranks_share_the_cpu():
    assert devices_of_node([torch.device("cpu")], 3) == [torch.device("cpu")] * 3


@pytest.mark.parametrize(
    ("given", "local_size", "visible", "expected"),
    [
        ([0, 1], 2, 2, [0, 1]),
        ([2, 3], 2, 4, [2, 3]),  # those that the script chose
        ([0], 2, 1, [0, 0]),  # CUDA_VISIBLE_DEVICES names one for each rank
        ([0], 4, 4, [0, 1, 2, 3]),  # devices=1, but the launcher started four and all see all
    ],
)
def test_each_rank_gets_its_gpu(monkeypatch, given, local_size, visible, expected):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    assert devices_of_node(gpus(*given), local_size) == gpus(*expected)


def test_fewer_gpus_than_ranks_are_rejected(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ArgumentError, match="started 4 processes on this node, which has 2 cuda devices"):
        devices_of_node(gpus(0), 4)


def test_a_rank_that_was_renumbered_keeps_its_gpu_in_the_next_trainer(monkeypatch):
    elastic = SimpleNamespace(view=0)
    job = SimpleNamespace(elastic=elastic, topology=Topology(1, 2, 1, 2, 0, 1), launcher=SimpleNamespace(is_none=False))
    monkeypatch.setattr(parallel.world, "current", lambda: job)
    monkeypatch.setattr(parallel.world, "is_initialized", lambda: True)
    monkeypatch.setattr(parallel, "_kept", gpus(2))
    strategy = RingStrategy(parallel_devices=gpus(0, 1))
    assert strategy.root_device == gpus(1)[0]
    elastic.view = 1  # rank 1 was lost, and this is no longer rank 2
    assert strategy.root_device == gpus(2)[0]


def test_several_nodes_need_a_launcher():
    with pytest.raises(ArgumentError, match=r"num_nodes=2.*mpirun, torchrun or srun"):
        lightning.pytorch.Trainer(strategy="ring", devices=2, num_nodes=2, accelerator="cpu", logger=False)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            {"find_unused_parameters": True},
            r"RingStrategy has no argument find_unused_parameters \(given: True\): leave it",
        ),
        ({"ddp_comm_state": None}, "ddp_comm_state .*compression='fp16'"),
        ({"bucket_size": 5}, r"bucket_size \(given: 5\): did you mean bucket_bytes\?"),
        ({"zzz": 5}, r"zzz .*did you mean one of accelerator, .*group\?"),
        (
            {"cluster_environment": LightningEnvironment()},
            r"cluster_environment=LightningEnvironment\(\)\) has to be a RingEnvironment\. Leave it out",
        ),
        ({"timeout": 30}, r"timeout=30\) has to be a timedelta"),
        ({"accelerator": 2}, r"accelerator=2\) has to be an Accelerator.*devices=2 for two ranks"),
        ({"num_ranks": 2}, r"num_ranks \(given: 2\): the number of ranks is the launcher's.*devices=2"),
        ({"sync_batchnorm": True}, r"sync_batchnorm .*Trainer\(sync_batchnorm=True\)"),
        ({"start_method": "pop"}, r"start_method='pop'\) has to be one of 'popen', 'fork', 'forkserver', 'spawn'"),
    ],
)
def test_an_argument_that_cannot_work_is_rejected_with_what_to_do(arguments, text):
    with pytest.raises(ArgumentError, match=text):
        RingStrategy(**arguments)


def test_fabric_rejects_arguments_too():
    with pytest.raises(ArgumentError, match="RingFabricStrategy has no argument static_graph"):
        RingFabricStrategy(static_graph=True)
    with pytest.raises(ArgumentError, match="on_failure .*Those of a Trainer with RingStrategy, .* can go on"):
        RingFabricStrategy(on_failure="replace")


@pytest.mark.parametrize(
    ("ours", "ddp", "lacking"),
    [
        (RingStrategy, DDPStrategy, {"configure_ddp", "determine_ddp_device_ids", "setup_distributed"}),
        (RingFabricStrategy, FabricDDPStrategy, set()),
    ],
)
def test_what_is_public_in_ddp_strategy_exists_but_for_what_makes_its_wrapper(ours, ddp, lacking):
    """docs/lightning.md names what is lacking. Attributes that can be set there can be set here."""
    public = {name for name in dir(ddp) if not name.startswith("_")}
    assert {name for name in public if not hasattr(ours, name)} == lacking
    for name in public - lacking:
        theirs, own = inspect.getattr_static(ddp, name), inspect.getattr_static(ours, name)
        if isinstance(theirs, property):
            assert isinstance(own, property) and (theirs.fset is None or own.fset is not None), name
        elif inspect.isfunction(theirs):
            required = [p for p in inspect.signature(theirs).parameters.values() if p.default is p.empty]
            inspect.signature(own).bind(*(None for p in required if p.kind is p.POSITIONAL_OR_KEYWORD))
    assert ours().process_group_backend is None, "as DDPStrategy before the ranks are connected"
