"""Averaged gradients on one to three ranks; the checks themselves are in checks_gradients.py."""

import json
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
from tests.launch import Result, run_ranks, shared
from tests.launchers import Launcher

CHECKS = Path(__file__).with_name("checks_gradients.py")
NAMES = re.findall(r"@check(\w*)\ndef (\w+)", CHECKS.read_text())


class Launch(NamedTuple):
    launcher: Launcher
    ranks: int
    nodes: str = ""
    gpu: str = ""  # if not empty, a stand-in for GPUs and for NCCL: see tests/gpu_stand_in.py
    only: tuple[str, ...] = ()
    slow: bool = False
    overlap: str = ""  # RING_OVERLAP
    registered: str = ""  # RING_NCCL_REGISTER

    def runs(self, name: str, where: str) -> bool:
        runs_there = {"": True, "_among_several": self.ranks > 1, "_on_gpus": bool(self.gpu)}[where]
        return runs_there and (not self.only or name in self.only)

    def __str__(self) -> str:
        overlap = {"": "", "0": "in-line", "1": "overlapped"}[self.overlap]
        parts = self.launcher, str(self.ranks), self.nodes, self.gpu, self.only and "subset", overlap
        parts += (self.registered and "registered",)
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
# Checks of what registered memory must not change. Large gradients live in it, so they do not stay where they are.
REGISTERED = (
    EQUALITY,
    "tuned_buckets_change_between_steps_and_results_do_not",
    "unused_parameters",
    "gradients_in_sixteen_bits",
    "averagers_that_were_dropped_leave_nothing_behind",
)
# Checks in which it matters that the communication thread works while autograd does.
OVERLAPPED = (EQUALITY, SWITCH, "tuned_buckets_change_between_steps_and_results_do_not", "unused_parameters")
OVERLAPPED += ("sparse_gradients_gathered_or_densified", "averagers_that_were_dropped_leave_nothing_behind")
# Checks that run again in the ordinary launch, behind all others: overlapped, and on a stand-in for GPUs and for NCCL.
AGAIN = {"overlapped": (EQUALITY, SWITCH), "on GPUs": (EQUALITY, SWITCH, "unused_parameters")}
ORDINARY = Launch("spawned", 2)
LAUNCHES = [
    Launch("spawned", 1),
    ORDINARY,
    Launch("spawned", 2, overlap="1", slow=True),
    Launch("spawned", 3, only=(EQUALITY, SWITCH), overlap="1", slow=True),
    Launch("spawned", 4, only=(EQUALITY, SWITCH), overlap="0", slow=True),
    Launch("spawned", 5, only=(EQUALITY, SWITCH), overlap="0", slow=True),
    Launch("spawned", 2, gpu="GPU", slow=True),
    # Three ranks on two nodes: two of them share memory, and the nodes have different numbers of ranks.
    Launch("mpirun", 3, "1,2", only=BETWEEN_HOSTS, slow=True),
    Launch("mpirun", 3, "1,2", slow=True),
    Launch("spawned", 3, gpu="GPU", only=(EQUALITY,), slow=True),
    Launch("spawned", 2, gpu="GPU", registered="1", only=REGISTERED, slow=True),
]


@shared
def outcome(launch: Launch) -> Result:
    env = {"RING_VIRTUAL_NODES": launch.nodes, "TEST_GPU_STAND_IN": launch.gpu, "TEST_ONLY": ",".join(launch.only)}
    env |= {"RING_OVERLAP": launch.overlap, "RING_NCCL_REGISTER": launch.registered}
    env |= {"TEST_AGAIN": json.dumps(AGAIN)} if launch == ORDINARY else {}
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
        assert (result.reports[rank]["launched by NCCL"] > 10) == bool(launch.gpu)


@pytest.mark.parametrize(("turn", "name"), [(turn, name) for turn, names in AGAIN.items() for name in names])
def test_gradients_again(turn: str, name: str) -> None:
    result = outcome(ORDINARY)
    for rank in range(ORDINARY.ranks):
        assert result.reports.get(rank, {}).get(f"{name} {turn}") == "ok", result
        assert (result.reports[rank][f"launched by NCCL {turn}"] > 10) == (turn == "on GPUs")


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


@pytest.mark.parametrize("has_not_joined", [False, True])
def test_an_averager_that_is_dropped_unused_is_reported_unless_the_process_never_joined(
    monkeypatch, capsys, has_not_joined
):
    """As a process that was to take a lost rank's place ends, when the others have ended."""
    monkeypatch.setattr(gradients, "has_not_joined", lambda: has_not_joined)
    nothing = SimpleNamespace(name="gradients", remove=list, drop=list, discard=list, groups=[()], has_averaged=False)
    gradients._discard(nothing, nothing, nothing)
    assert ("the averager was dropped before it averaged anything" in capsys.readouterr().err) != has_not_joined
