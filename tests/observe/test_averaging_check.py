"""Ranks that train by themselves: a loop that averages nothing, and a library that has found no other rank."""

import sys
import time
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ring_plugins.core.base.errors import LaunchError
from ring_plugins.observe import averaging_check
from tests.launch import run_ranks


class Job:
    """Rank 0 of two ranks, with one communicator."""

    topology = SimpleNamespace(size=2, rank=0)
    failure_detector = None
    recovers = False

    def __init__(self, is_unused=False, communicator="gradients", others_wait=False):
        self.operations, self.is_unused, self.communicator = 0, is_unused, communicator
        self.observers = SimpleNamespace(all_stalls=SimpleNamespace(awaits=lambda rank, since: others_wait))

    def is_mine(self):
        return True

    def activities(self):
        return [] if self.is_unused else [SimpleNamespace(communicator=self.communicator, number=self.operations)]


@pytest.fixture
def watched(monkeypatch):
    """Starts the watch of a job; gives what is warned of."""
    warnings = []
    monkeypatch.setattr(averaging_check.logger, "warning", warnings.append)
    monkeypatch.setattr(averaging_check, "is_initialized", lambda: True)
    monkeypatch.setattr(averaging_check, "_HEARD", 0.0)
    monkeypatch.setattr(averaging_check, "argument_observers", observers := [])

    def watch(job, starts_equal=False):
        job.exchanges = lambda x: [observe([x]) for observe in observers]
        monkeypatch.setattr(averaging_check, "current", lambda: job)
        averaging_check.expect_averaging(starts_equal)
        return warnings

    yield watch
    for handle in averaging_check._handles:
        handle.remove()
    averaging_check.atexit.unregister(averaging_check._Watch.at_end)


def steps(count, job=None):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1)
    for _ in range(count):
        if job is not None:
            job.operations += 1
        optimizer.step()


def test_a_second_job_in_the_process_is_watched_too_and_no_step_fails(watched):
    """torch goes on to the next hook after one that has ended its watch: that one must not have removed itself."""
    first, second = Job(), Job()
    for job in (first, second):
        warnings = watched(job)
        later = register_optimizer_step_post_hook(lambda *_: None)
        if job is first:
            steps(2, job)
            steps(30)
            assert warnings == []
        else:
            steps(30)
            (warning,) = warnings
            assert "no gradient has been averaged" in warning
        later.remove()
    assert len(averaging_check._handles) == 1


def called_by(library, function):
    """Call a function from a package of that name."""
    package = ModuleType(f"{library}.trainer")
    exec("def train(function):\n    function()", vars(package))
    package.train(function)


@pytest.mark.parametrize(
    ("library", "remedy"),
    [
        ("transformers", "use_cpu=True"),
        ("accelerate", "cpu=True"),
        ("lightning", "'ring'"),
        ("lightning_fabric", "'ring'"),
    ],
)
def test_a_library_that_counts_processes_is_stopped_at_once_if_it_found_none(watched, library, remedy):
    watched(Job(is_unused=True))
    with pytest.raises(LaunchError, match=f"rank 0 of 2 trains by itself: {library} has found no other") as caught:
        called_by(library, lambda: steps(2))
    assert remedy in str(caught.value) and "RING_WEIGHT_CHECK=0" in str(caught.value)
    steps(30)  # it is said once


@pytest.mark.parametrize(("library", "remedy"), [("accelerate", "on_failure='end'"), ("lightning", "strategy='ring'")])
def test_the_remedy_fits_a_job_that_goes_on_after_losses(watched, library, remedy):
    job = Job(is_unused=True)
    job.recovers = True
    watched(job)
    with pytest.raises(LaunchError, match=remedy):
        called_by(library, lambda: steps(2))


def test_what_trains_alone_after_steps_with_averages_is_told_once(watched):
    warnings = watched(job := Job())
    steps(50, job)
    steps(120)  # an inner loop, perhaps
    steps(60, job)
    assert warnings == []
    steps(400)
    (warning,) = warnings
    assert "no gradient has been averaged in 100 steps" in warning


def test_scripts_that_average_weights_by_themselves_after_steps_with_averages_are_left_alone(watched):
    warnings = watched(job := Job())
    steps(50, job)
    for _ in range(12):
        steps(20)
        job.exchanges(torch.ones(1))
    assert warnings == []


def test_accelerate_may_have_connected_the_ranks_and_train_alone(watched, monkeypatch):
    monkeypatch.setattr(averaging_check, "_is_connected_otherwise", lambda: True)
    processes = 1
    accelerate = SimpleNamespace(PartialState=lambda: SimpleNamespace(num_processes=processes))
    monkeypatch.setitem(sys.modules, "accelerate", accelerate)
    watched(Job())
    with pytest.raises(LaunchError, match="accelerate has found no other process"):
        called_by("accelerate", lambda: steps(2))
    processes = 2
    watched(Job())
    called_by("accelerate", lambda: steps(30))


def test_a_package_that_another_thread_imports_is_not_asked(monkeypatch):
    """The monitor thread asks twice a second, also while the script imports torch."""
    for name in ("torch", "jax"):
        package = ModuleType(name)
        package.__spec__ = SimpleNamespace(_initializing=True)
        monkeypatch.setitem(sys.modules, name, package)
    assert not averaging_check._is_connected_otherwise()


def test_a_library_is_left_alone_if_ranks_communicate(watched):
    job = Job()
    warnings = watched(job)
    called_by("lightning", lambda: steps(30, job))
    assert warnings == []


def train(job, count, between):
    """Steps of a model of 8 elements, between which the job exchanges something."""
    parameter = torch.nn.Parameter(torch.ones(8))
    optimizer = torch.optim.SGD([parameter], 0.1)
    for step in range(count):
        parameter.grad = torch.ones(8)
        between(step)
        job.operations += 1
        optimizer.step()


@pytest.mark.parametrize(
    "exchanges",
    [
        lambda job: lambda step: None,  # barriers
        lambda job: lambda step: job.exchanges(torch.ones(())),
        lambda job: lambda step: job.exchanges([torch.ones(()), {"accuracy": 0.5}]),
    ],
)
def test_barriers_and_losses_for_the_log_are_no_averaging(watched, exchanges):
    job = Job(communicator="ring")
    watched(job)
    with pytest.raises(LaunchError, match="taken 2 steps without averaging"):
        called_by("lightning", lambda: train(job, 3, exchanges(job)))
    warnings = watched(job)
    train(job, 20, exchanges(job))
    (warning,) = warnings
    assert "no gradient has been averaged" in warning


@pytest.mark.parametrize(
    "exchanges",
    [
        lambda job: lambda step: job.exchanges(torch.ones(8)),  # of gradients
        lambda job: lambda step: [job.exchanges(torch.ones(4)) for _ in range(2)],  # of parts
        lambda job: lambda step: job.exchanges({"weights": [np.ones(8)]}),
        lambda job: lambda step: step % 6 == 0 and job.exchanges(torch.ones(8)),  # of weights, after some steps
    ],
)
def test_scripts_that_average_by_themselves_are_left_alone(watched, exchanges):
    job = Job(communicator="ring")
    warnings = watched(job)
    called_by("lightning", lambda: train(job, 30, exchanges(job)))
    assert warnings == []


def test_rank_0_may_train_alone_while_the_others_wait_for_it(watched):
    warnings = watched(Job(is_unused=True, others_wait=True))
    called_by("lightning", lambda: steps(30))
    assert warnings == []


def test_ranks_that_begin_equal_may_average_seldom_but_hear_of_it_if_they_never_do(watched, monkeypatch):
    job = Job(communicator="ring")
    watched(job, starts_equal=True)
    with pytest.raises(LaunchError, match="taken 20 steps"):
        called_by("lightning", lambda: train(job, 20, lambda step: None))
    at_end = []
    monkeypatch.setattr(averaging_check.atexit, "register", lambda function, watch: at_end.append(watch.at_end))
    warnings = watched(job, starts_equal=True)
    called_by("lightning", lambda: train(job, 16, lambda step: None))
    assert warnings == []
    at_end[0]()
    assert "each rank trains by itself: lightning has found no other process, and has taken 16 steps" in warnings[0]


def test_ranks_may_train_models_of_their_own(watched, monkeypatch):
    monkeypatch.setenv("RING_WEIGHT_CHECK", "0")
    warnings = watched(Job(is_unused=True))
    called_by("lightning", lambda: steps(30))
    assert warnings == []


ALONE = """
import ring_plugins as ring
from tests.worker import report

ring.init(ranks=2)  # before torch is imported

import lightning
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.demos.boring_classes import BoringModel


class Model(BoringModel):
    def training_step(self, batch, index):
        output = super().training_step(batch, index)
        ring.all_reduce(output["loss"].detach())  # for a log: this averages no gradient
        return output


ring.barrier()  # as after a download
options = {"plugins": [LightningEnvironment()]}  # else Lightning looks for mpirun's by starting MPI
options |= dict(accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False)
try:
    lightning.Trainer(devices=1, limit_val_batches=0, **options).fit(Model())
except ring.LaunchError as error:
    report("error", str(error))
ring.barrier()
"""


@pytest.mark.slow
def test_a_trainer_without_the_strategy_is_stopped_on_every_rank():
    errors = run_ranks(ALONE, 2, "spawned").values("error")
    assert [error.partition(":")[0] for error in errors] == [f"rank {rank} of 2 trains by itself" for rank in range(2)]


TRANSFORMERS = """
import ring_plugins as ring
from tests.worker import report

ring.init(ranks=2)

import torch
from transformers import Trainer, TrainingArguments


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x):
        return {"loss": self.layer(x).square().mean()}


data = [{"x": torch.full((4,), float(i))} for i in range(16)]
options = dict(per_device_train_batch_size=2, num_train_epochs=1, save_strategy="no", report_to=[], disable_tqdm=True)
trainer = Trainer(Model(), TrainingArguments("unused", use_cpu=True, **options), train_dataset=data)
trainer.train()
report("steps", trainer.state.global_step)
report("weights", trainer.model.layer.weight.detach())
"""


@pytest.mark.slow
def test_transformers_trains_on_all_ranks():
    pytest.importorskip("transformers")
    result = run_ranks(TRANSFORMERS, 2, "spawned", timeout=180, env={"HIDDEN_PACKAGES": ""})  # see tests/python_path
    assert result.values("steps") == [4, 4]
    assert result.values("weights")[0] == result.values("weights")[1]
    assert "trains by itself" not in result.stderr


@pytest.fixture
def said(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", sys.modules.get("torch", sys))
    found = []
    monkeypatch.setattr(averaging_check.logger, "warning", found.append)
    return found


def job_of(size=2, is_used=False, has_failed=False):
    detector = SimpleNamespace(failed=has_failed, failure=lambda: None)
    topology = SimpleNamespace(size=size)
    return SimpleNamespace(topology=topology, has_communicated=lambda: is_used, failure_detector=detector)


def test_a_job_that_never_communicates_is_named_at_the_end_or_after_ten_minutes_and_once(said):
    watch = averaging_check.UnusedWatch(job_of(3))
    watch.tick(time.monotonic())
    assert said == []
    watch.tick(time.monotonic() + 601)
    watch.close()
    assert len(said) == 1 and said[0].startswith("the 3 ranks of this job have not communicated in their first 10 min")
    averaging_check.UnusedWatch(job_of(3)).close()
    assert len(said) == 2 and said[1].startswith("the 3 ranks of this job have ended without communicating")


def test_jobs_that_communicate_fail_or_do_not_train_are_not_named(said, monkeypatch):
    averaging_check.UnusedWatch(job_of(is_used=True)).close()
    averaging_check.UnusedWatch(job_of(has_failed=True)).close()
    monkeypatch.setattr(averaging_check, "_FRAMEWORKS", ("no such framework",))
    averaging_check.UnusedWatch(job_of()).close()
    assert said == []
