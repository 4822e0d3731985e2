"""Sharded optimizers on one to five ranks; the checks themselves are in checks_sharded_optimizer.py."""

import re
from pathlib import Path

import pytest

from tests.launch import Result, run_ranks, shared

CHECKS = Path(__file__).with_name("checks_sharded_optimizer.py")
NAMES = re.findall(r"@check(\w*)\ndef (\w+)", CHECKS.read_text())
LAUNCHES = [
    pytest.param(1, "", id="1", marks=pytest.mark.slow),
    pytest.param(2, "", id="2"),
    # Two of the three ranks share memory.
    pytest.param(3, "1,2", id="3 on two nodes", marks=[pytest.mark.mpi, pytest.mark.slow]),
    pytest.param(3, "", id="3", marks=pytest.mark.slow),
    pytest.param(4, "2,2", id="4 on two nodes", marks=[pytest.mark.mpi, pytest.mark.slow]),
    pytest.param(5, "", id="5", marks=pytest.mark.slow),
]
QUICK = "fifty_steps_equal_those_without_sharding", "state_in_the_ordinary_format", "whole_tensors_on_one_rank"


@shared
def outcome(ranks: int, nodes: str) -> Result:
    only = ",".join(QUICK) if nodes else ""
    launcher = "mpirun" if nodes else "spawned"
    env = {"RING_VIRTUAL_NODES": nodes, "TEST_ONLY": only}
    return run_ranks(CHECKS, ranks, launcher, env=env, timeout=400, check=False)


@pytest.mark.parametrize(("where", "name"), NAMES, ids=[name for _, name in NAMES])
@pytest.mark.parametrize(("size", "nodes"), LAUNCHES)
def test_sharded_optimizers(size: int, nodes: str, where: str, name: str) -> None:
    if (where and size == 1) or (nodes and name not in QUICK):
        pytest.skip("not here")
    result = outcome(size, nodes)
    for rank in range(size):
        assert result.reports.get(rank, {}).get(name) == "ok", result


@pytest.mark.slow
def test_training_continues_on_another_number_of_ranks_with_the_same_bits(tmp_path: Path) -> None:
    state = tmp_path / "state.pt"

    def weights(ranks: int) -> set[str]:
        env = {"TEST_STATE": str(state)}
        return set(run_ranks(CHECKS, ranks, env=env, timeout=200).values("weights"))

    (made,) = weights(2)
    continued = [weights(ranks) for ranks in (2, 3, 1)]
    assert len(set.union(*continued)) == 1
    assert continued[0] != {made}


@pytest.mark.slow
def test_a_rank_that_gathers_the_state_alone_is_told_that_all_must():
    script = """
    import os
    import ring_plugins as ring
    ring.init(ranks=int(os.environ["TEST_RANKS"]))
    import torch
    from ring_plugins.torch import DistributedOptimizer
    model = torch.nn.Linear(4, 4)
    for parameter in model.parameters():
        torch.nn.init.ones_(parameter)
    optimizer = DistributedOptimizer(torch.optim.Adam(model.parameters()), model.named_parameters(), shard=True)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        if ring.rank() == 0:
            optimizer.state_dict()
    """
    result = run_ranks(script, 2, timeout=120, check=False)
    assert result.returncode != 0
    assert "DeadlockError: rank" in result.output
    assert "state_dict() of a sharded optimizer, which all ranks have to call" in result.output


@pytest.mark.slow
def test_weights_tied_by_their_data_after_the_first_step_are_rejected():
    script = """
    import os
    import ring_plugins as ring
    ring.init(ranks=int(os.environ["TEST_RANKS"]))
    import torch
    from ring_plugins.torch import DistributedOptimizer
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), shard=True)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        model[1].weight.data = model[0].weight.data
    """
    result = run_ranks(script, 2, timeout=120, check=False)
    assert result.returncode != 0
    assert "0.weight and 1.weight lie in the same memory" in result.output
