"""The watch for a loop that broadcasts its weights and then averages nothing."""

from types import SimpleNamespace

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ring_plugins.torch import averaging_check


class Job:
    """Rank 0 of two ranks, with one communicator."""

    topology = SimpleNamespace(size=2, rank=0)

    def __init__(self):
        self.operations = 0

    def activities(self):
        return [SimpleNamespace(communicator="all ranks", number=self.operations)]


def steps(count):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1)
    for _ in range(count):
        optimizer.step()


def test_a_second_job_in_the_process_is_watched_too_and_no_step_fails(monkeypatch):
    """torch goes on to the next hook after one that has ended its watch: that one must not have removed itself."""
    warnings = []
    monkeypatch.setattr(averaging_check.logger, "warning", warnings.append)
    first, second = Job(), Job()
    for job in (first, second):
        monkeypatch.setattr(averaging_check, "current", lambda job=job: job)
        averaging_check.expect_averaging()
        later = register_optimizer_step_post_hook(lambda *_: None)
        if job is first:
            job.operations += 1
            steps(30)
            assert warnings == []
        else:
            steps(30)
            (warning,) = warnings
            assert "no gradient has been averaged" in warning
        later.remove()
    assert len(averaging_check._handles) == 1
