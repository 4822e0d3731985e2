"""Cells of a notebook, in a kernel as Jupyter starts it.

The kernel comes with `pip install "ring_plugins[docs]"`. tests/test_first_hour.py types the same into Python's prompt.
"""

import pytest

from tests.launchers import bare_environment

pytestmark = pytest.mark.slow


@pytest.fixture
def run_cells(tmp_path):
    """Runs cells one after the other; returns what each printed to standard output."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")

    def run(*cells):
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        directory = {"metadata": {"path": str(tmp_path)}}
        nbclient.NotebookClient(notebook, timeout=200, resources=directory).execute(env=bare_environment())
        return ["".join(out.text for out in cell.outputs if out.get("name") == "stdout") for cell in notebook.cells]

    return run


def test_a_cell_runs_a_function_on_ranks_and_is_told_that_init_cannot(run_cells):
    rejected, result, after = run_cells(
        "import ring_plugins as ring\ntry:\n    ring.init(ranks=2)\n"
        "except ring.LaunchError as error:\n    print(error)",
        "def total():\n    ring.init()\n    print('from rank', ring.rank())\n"
        "    return float(ring.all_reduce(ring.rank() + 1.0, ring.SUM))\n"
        "print(ring.run(total, ranks=2))",
        "try:\n    ring.run(lambda: ring.init() and 1 / 0, ranks=2)\nexcept ring.RankFailed as error:\n"
        "    print(type(error.__cause__).__name__)\nprint(ring.run(total, ranks=2)[1])",
    )
    assert "not a notebook" in rejected and "ring_plugins.run(function, ranks=2) without init()" in rejected
    assert sorted(result.splitlines()) == ["[3.0, 3.0]", "from rank 0", "from rank 1"]
    assert after.startswith("ZeroDivisionError\n") and after.endswith("3.0\n")


def test_a_trainer_trains_in_a_cell(run_cells):
    (printed,) = run_cells(
        """
import lightning as L, torch
from lightning.pytorch.demos.boring_classes import BoringModel
from ring_plugins.lightning import RingStrategy

class Model(BoringModel):
    def on_train_end(self):
        trainer = self.trainer
        text = f"rank {trainer.global_rank} of {trainer.world_size}: {trainer.global_step} steps"
        print(text + "\\n", end="", flush=True)  # in one piece, since the other rank prints at the same time

model = Model()
before = model.layer.weight.detach().clone()
L.Trainer(strategy=RingStrategy(), accelerator="cpu", devices=2, max_epochs=1, logger=False,
          enable_checkpointing=False, enable_progress_bar=False).fit(model)
print("the weights came back:", not torch.equal(before, model.layer.weight))
"""
    )
    assert sorted(line for line in printed.splitlines() if line) == [
        "rank 0 of 2: 32 steps",
        "rank 1 of 2: 32 steps",
        "the weights came back: True",
    ]
