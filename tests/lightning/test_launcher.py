"""How ranks are started: by the Trainer, mpirun, torchrun, SLURM, or forked as in a notebook."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ring_plugins as ring
from ring_plugins.lightning import launcher
from tests.launch import Launcher, Result, run_ranks

WORKER = Path(__file__).with_name("launch_worker.py")


def check_training(result: Result, package: str) -> None:
    first, second = result.values("weights")
    assert first == second
    assert result.values("group") == [["ring", 2]] * 2
    assert result.values("strategy") == [[f"{package}.RingStrategy", True]] * 2
    # The progress bar and rank_zero_only speak on rank 0 only.
    assert result.output.count("rank-zero-info from 0") == 1
    assert "rank-zero-info from 1" not in result.output
    assert result.stdout.count("4/4") >= 1


@pytest.mark.parametrize("package", ["lightning", pytest.param("pytorch_lightning", marks=pytest.mark.slow)])
def test_a_script_started_alone_starts_the_other_ranks(package: str) -> None:
    """Also that one RingStrategy serves the Trainers of both packages."""
    module = {"lightning": "lightning.pytorch"}.get(package, package)
    result = run_ranks(WORKER, args=["--alone"], env={"TEST_PACKAGE": module})
    check_training(result, package)
    assert result.values("rank_before") == [0, 1]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpirun", "torchrun"])
def test_under_a_launcher_its_counts_win(launcher: Launcher) -> None:
    result = run_ranks(WORKER, launcher=launcher)
    check_training(result, "lightning")
    assert result.values("rank_before") == [0, 1]
    for rank, places in enumerate(result.values("places")):
        assert places == [[rank, 2, 2, 1]] * 5
    # devices=3 and num_nodes=2 are contradicted, once, on rank 0, with both numbers.
    (one, auto, two, three, nodes), silence = result.values("said")
    assert one == auto == two == []
    assert silence == [[]] * 5
    assert len(three) == len(nodes) == 1
    assert "`devices=3`" in three[0]
    assert "started with 2 processes on this node" in three[0]
    assert "`num_nodes=2`" in nodes[0]
    assert "started with 1 node. " in nodes[0]


def test_the_ranks_of_a_script_that_called_init_itself_are_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(launcher, "rank_zero_info", said.append)
    alone: Any = SimpleNamespace(world_size=lambda: 1, creates_processes_externally=False, failure_policy={})
    ring.init()
    try:
        assert launcher.join_world(alone) is launcher.join_world(alone)
    finally:
        ring.shutdown()
    assert said == ["ring_plugins: 1 rank on 1 host; pass devices= to start more"]


FORKED = """
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
import ring_plugins.lightning
from tests.worker import report

class Model(BoringModel):
    def on_train_end(self):
        strategy = self.trainer.strategy
        own = [self.trainer.global_rank, self.trainer.world_size, strategy._averager is not None]
        report(f"inside_{self.trainer.world_size}", [own, self.layer.weight.sum().item()], self.trainer.global_rank)

def trainer(devices):
    return Trainer(strategy="ring_notebook", devices=devices, accelerator="cpu", max_epochs=1, limit_train_batches=4,
                   limit_val_batches=1, logger=False, enable_checkpointing=False, enable_progress_bar=False)

if __name__ == "__main__":
    model = Model()
    trainer(1).fit(model)  # in this process, which must not tie the next trainer to one rank
    before = model.layer.weight.sum().item()
    two = trainer(2)
    assert two.strategy.launcher.is_interactive_compatible
    two.fit(model)
    report("outside", [before, model.layer.weight.sum().item()], 0)
    two.validate(model, verbose=False)
"""


def test_a_notebook_forks_its_ranks() -> None:
    result = run_ranks(FORKED)
    assert [own for own, _ in result.values("inside_1")] == [[0, 1, False]]
    (first, first_sum), (second, second_sum) = result.values("inside_2")
    assert [first, second] == [[0, 2, True], [1, 2, True]]
    assert "2 ranks on 1 host, started by Lightning\n" in result.output
    assert first_sum == second_sum
    [(before, after)] = result.values("outside")
    assert after == pytest.approx(first_sum)
    assert before != after


SLURM = """
import os, subprocess, sys
script = os.path.join(os.path.dirname(__file__), "rank.py")
open(script, "w").write('''
from tests.lightning import launch_worker
launch_worker.main()
''')
common = dict(SLURM_NTASKS="2", SLURM_STEP_NUM_TASKS="2", SLURM_NTASKS_PER_NODE="2", SLURM_STEP_TASKS_PER_NODE="2",
              SLURM_JOB_ID="77", SLURM_STEP_ID="0", SLURM_JOB_NAME="train", SLURM_STEP_NODELIST="127.0.0.1",
              SLURM_NODEID="0")
ranks = [subprocess.Popen([sys.executable, script], env={**os.environ, **common, "SLURM_PROCID": str(rank),
         "SLURM_LOCALID": str(rank)}) for rank in range(2)]
sys.exit(any([rank.wait() for rank in ranks]))
"""


@pytest.mark.slow
def test_slurm() -> None:
    result = run_ranks(SLURM)
    check_training(result, "lightning")
    assert result.values("places") == [[[rank, 2, 2, 1]] * 5 for rank in range(2)]
