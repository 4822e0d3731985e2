"""The device of each rank, and settings that need a launcher."""

import lightning.pytorch
import pytest
import torch

from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.lightning import RingFabricStrategy, RingStrategy
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


def test_fewer_gpus_than_ranks_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ArgumentError, match="started 4 processes on this node, which has 2 cuda devices"):
        devices_of_node(gpus(0), 4)


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
        ({"zzz": 5}, r"zzz .*did you mean one of accelerator, .*start_method\?"),
    ],
)
def test_an_argument_of_another_strategy_is_refused_with_what_to_do(arguments, text):
    with pytest.raises(ArgumentError, match=text):
        RingStrategy(**arguments)


def test_fabric_refuses_arguments_too():
    with pytest.raises(ArgumentError, match="RingFabricStrategy has no argument static_graph"):
        RingFabricStrategy(static_graph=True)
