"""Averaged gradients on one to three ranks; the checks themselves are in checks_gradients.py."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from ring_plugins.torch import GradientAverager, gradients
from tests.core.collectives.thread_ranks import on_thread_ranks
from tests.gpu_stand_in import StandInDriver, Streams, on_gpus, pass_for_gpu
from tests.launch import Result, run_ranks, shared
from tests.launchers import Launcher

CHECKS = Path(__file__).with_name("checks_gradients.py")
NAMES = re.findall(r"@check(\w*)\ndef (\w+)", CHECKS.read_text())


class Launch(NamedTuple):
    launcher: Launcher
    ranks: int
    nodes: str = ""
    only: tuple[str, ...] = ()
    slow: bool = False
    overlap: str = ""  # RING_OVERLAP

    def runs(self, name: str, where: str) -> bool:
        runs_there = {"": True, "_among_several": self.ranks > 1, "_on_gpus": False}[where]
        return runs_there and (not self.only or name in self.only)

    def __str__(self) -> str:
        overlap = {"": "", "0": "in-line", "1": "overlapped"}[self.overlap]
        parts = self.launcher, str(self.ranks), self.nodes, self.only and "subset", overlap
        return "-".join(filter(None, parts))


EQUALITY = "equals_one_process_on_the_concatenated_batch"
SWITCH = "a_switch_between_overlapped_and_synchronous_changes_no_bit"
# Checks that take another path through the core between hosts than inside one.
BETWEEN_HOSTS = (
    EQUALITY,
    "unused_parameters",
    "sparse_gradients_gathered_or_densified",
    "large_gradients_stay_where_autograd_put_them",
    "gradients_in_sixteen_bits",
    "averagers_that_were_dropped_leave_nothing_behind",
    "differentiable_collectives_against_one_process",
    "differentiable_collectives_keep_their_order_among_independent_nodes",
    "different_results_used_by_the_ranks_are_rejected",
)
# Checks in which it matters that the communication thread works while autograd does.
OVERLAPPED = (EQUALITY, SWITCH, "tuned_buckets_change_between_steps_and_results_do_not", "unused_parameters")
OVERLAPPED += ("sparse_gradients_gathered_or_densified", "averagers_that_were_dropped_leave_nothing_behind")
# Checks that run again in the ordinary launch, behind all others: overlapped.
AGAIN = (EQUALITY, SWITCH)
ORDINARY = Launch("spawned", 2)
LAUNCHES = [
    Launch("spawned", 1),
    ORDINARY,
    Launch("spawned", 2, overlap="1", slow=True),
    Launch("spawned", 3, only=(EQUALITY, SWITCH), overlap="1", slow=True),
    Launch("spawned", 4, only=(EQUALITY, SWITCH), overlap="0", slow=True),
    Launch("spawned", 5, only=(EQUALITY, SWITCH), overlap="0", slow=True),
    # Three ranks on two nodes: two of them share memory, and the nodes have different numbers of ranks.
    Launch("mpirun", 3, "1,2", only=BETWEEN_HOSTS, slow=True),
    Launch("mpirun", 3, "1,2", slow=True),
]


@shared
def outcome(launch: Launch) -> Result:
    env = {"RING_VIRTUAL_NODES": launch.nodes, "TEST_ONLY": ",".join(launch.only)}
    env |= {"RING_OVERLAP": launch.overlap, "TEST_OVERLAPPED": ",".join(AGAIN) if launch == ORDINARY else ""}
    return run_ranks(CHECKS, launch.ranks, launch.launcher, env=env, timeout=200, check=False)


def parameters(launch: Launch, name: str) -> Any:
    marks = [pytest.mark.mpi] * (launch.launcher == "mpirun") + [pytest.mark.slow] * launch.slow
    return pytest.param(launch, name, marks=marks, id=f"{launch}-{name}")


@pytest.mark.parametrize(
    ("launch", "name"),
    [parameters(launch, name) for launch in LAUNCHES for where, name in NAMES if launch.runs(name, where)],
)
def test_gradients(launch: Launch, name: str) -> None:
    result = outcome(launch)
    for rank in range(launch.ranks):
        assert result.reports.get(rank, {}).get(name) == "ok", result


@pytest.mark.parametrize("name", AGAIN)
def test_gradients_overlapped(name: str) -> None:
    result = outcome(ORDINARY)
    for rank in range(ORDINARY.ranks):
        assert result.reports.get(rank, {}).get(f"{name} overlapped") == "ok", result


def test_a_gradient_passes_at_most_twelve_files_in_at_most_seventy_calls(monkeypatch) -> None:
    """A reader follows it from the hook to the optimizer: what an ordinary step need not ask is asked elsewhere."""
    monkeypatch.setattr("ring_plugins.torch.bucket_sets.has_room_to_overlap", lambda threads: False)
    package = str(Path(gradients.__file__).parents[1])

    def rank_of(rank, communicator):
        model, ways = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), []
        averager = GradientAverager(model, communicator=communicator, overlap=False)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def note(frame, event, _):
            if event == "call" and frame.f_code.co_filename.startswith(package):
                ways[-1].append((frame.f_code.co_filename.removeprefix(package), frame.f_code.co_name))

        for _ in range(30):
            ways.append([])
            sys.setprofile(note)
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            sys.setprofile(None)
        averager.close()
        return min(ways, key=len)  # in others a rank waits, or weights are compared

    way = on_thread_ranks(2, rank_of)[0]
    assert ("/core/collectives/shm_group.py", "all_reduce") in way
    assert len(way) <= 70, way
    assert len({file for file, _ in way}) <= 12, way


@pytest.mark.parametrize(
    ("inputs", "loss", "is_told"),
    [
        ((1, 1, 2), lambda out: out.square().sum(), True),
        ((1, 2, 3), lambda out: out.square().sum(), False),
        ((0, 0, 2), lambda out: out.square().sum(), False),  # a rank of zeros says nothing of samples
        ((1, 1, 1), lambda out: out.sum() * 0, False),
    ],
)
def test_ranks_that_begin_with_the_gradients_of_the_same_samples_are_told_so_once(
    inputs, loss, is_told, monkeypatch, caplog
):
    monkeypatch.setattr("ring_plugins.observe.same_samples._told", [])

    def rank_of(rank, communicator):
        model = nn.Linear(4, 3, bias=False)
        with torch.no_grad():
            model.weight.copy_(torch.arange(12.0).view(3, 4))
        averager = GradientAverager(model, communicator=communicator)
        finish = averager._buckets.finish  # all ranks are in this process here, so each averager has another beside it
        averager._buckets.finish = lambda at_once: finish(at_once)._replace(has_others=False)
        for _ in range(3):
            loss(model(inputs[rank] * torch.arange(8.0).view(2, 4))).backward()
        averager.close()

    with caplog.at_level("WARNING", "ring_plugins"):
        on_thread_ranks(3, rank_of)
    told = [one.getMessage() for one in caplog.records if "same samples" in one.getMessage()]
    assert len(told) == is_told
    assert all("ranks 0, 1 have the same" in text and "DistributedSampler" in text for text in told)


def test_a_single_rank_averages_through_a_communicator_that_it_is_given(gpu) -> None:  # as benchmarks/gpu_step.py does
    model = nn.Linear(3, 2)
    averager = GradientAverager(model, communicator=gpu.communicator)
    model(torch.ones(1, 3)).sum().backward()
    assert averager.steps == 1
    assert gpu.nccl.log == [["all_reduce"]]
    assert model.weight.grad.tolist() == [[1.0] * 3] * 2
    averager.close()


def test_ranks_average_on_gpus_and_end_with_the_weights_of_one_process(monkeypatch) -> None:
    monkeypatch.setenv("RING_SHARE_GPU", "1")
    pass_for_gpu(streams := Streams(StandInDriver()), monkeypatch.setattr)
    x, y = torch.randn(6, 5), torch.randn(6, 1)

    def trained(part: slice, communicator: Any = None) -> torch.Tensor:
        model = nn.Sequential(nn.Linear(5, 30), nn.Tanh(), nn.Linear(30, 1), nn.Linear(1, 1))  # the last one is unused
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
        optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
        averager = communicator and GradientAverager(model, communicator=communicator, bucket_bytes=128)
        for _ in range(5):
            optimizer.zero_grad()
            (model[:3](x[part]) - y[part]).square().mean().backward()
            optimizer.step()
        if averager is not None:
            averager.close()
        return nn.utils.parameters_to_vector(model.parameters()).detach()

    def of_rank(rank: int, communicator: Any, library: Any) -> torch.Tensor:
        weights = trained(slice(rank, None, 2), communicator)
        assert sum(call.count("all_reduce") for call in library.log if isinstance(call, list)) >= 5
        return weights

    ours, others = on_gpus(2, of_rank, streams)
    assert torch.equal(ours, others)
    assert torch.allclose(ours, trained(slice(None)), atol=1e-5)


@pytest.mark.parametrize("has_not_joined", [False, True])
def test_an_averager_that_is_dropped_unused_is_reported_unless_the_process_never_joined(
    monkeypatch, capsys, has_not_joined
):
    """As a process that was to take a lost rank's place ends, when the others have ended."""
    monkeypatch.setattr(gradients, "has_not_joined", lambda: has_not_joined)
    nothing = SimpleNamespace(name="gradients", remove=list, drop=list, discard=list, groups=[()], has_averaged=False)
    gradients._discard(nothing, nothing, nothing)
    assert ("the averager was dropped before it averaged anything" in capsys.readouterr().err) != has_not_joined
