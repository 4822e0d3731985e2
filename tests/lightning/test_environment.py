"""Ranks as the launcher's variables give them, and settings that contradict them."""

import lightning.pytorch
import pytest

from ring_plugins.lightning import RingEnvironment
from ring_plugins.lightning.environment import count, set_rank_zero


@pytest.fixture
def _rank_zero():
    yield
    set_rank_zero(0)


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
    """Also inside a SLURM allocation, whose own variables say rank 0 on every rank."""
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
    set_rank_zero()
    assert lightning.pytorch.utilities.rank_zero_only.rank == place[0]
    trainer = lightning.pytorch.Trainer(strategy="ring", devices=1, accelerator="cpu", logger=False)
    assert (trainer.global_rank, trainer.world_size, trainer.num_devices) == (place[0], place[1], place[3])
    assert trainer.distributed_sampler_kwargs == {"num_replicas": place[1], "rank": place[0]}


def test_the_warning_counts_in_english():
    assert [count(1, "node"), count(3, "node"), count(2, "process")] == ["1 node", "3 nodes", "2 processes"]
