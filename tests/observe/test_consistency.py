"""One flipped bit on one rank is found, and named."""

import re
from types import SimpleNamespace

import numpy as np
import pytest

from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.arrays.memory import HostMemory
from ring_plugins.core.base.errors import ArgumentError, DeviceError, MismatchError
from ring_plugins.core.collectives.single import SingleCommunicator
from ring_plugins.observe import consistency
from ring_plugins.observe.consistency import (
    Checks,
    DriftCheck,
    Place,
    _unequal,
    bits_of,
    checksum,
    chosen_interval,
    differ,
    trained_error,
    what_differs,
)
from tests.core.collectives.mortal_ranks import on_mortal_ranks
from tests.launch import run_ranks

TORCH = """
import os
import ring_plugins as ring
ring.init(ranks=int(os.environ["TEST_RANKS"]))
import torch
from ring_plugins.torch import DistributedOptimizer, broadcast_parameters
from tests.worker import report

torch.set_num_threads(1)
torch.manual_seed(ring.rank())  # with small steps: a large update would round the bit away, and rightly pass the check
model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
broadcast_parameters(model)
optimizer = DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9), model.named_parameters(), drift_check_every=2
)
for step in range(20):
    if step == 7 and ring.rank() == 1:
        with torch.no_grad():
            # One bit of one of 63 numbers.
            model[1].weight.view(torch.int32)[2, 4] ^= 1 << 10
    optimizer.zero_grad()
    model(torch.randn(4, 5)).square().sum().backward()
    try:
        optimizer.step()
    except ring.DriftError as error:
        report("step", step)
        report("error", str(error))
        break
"""

LIGHTNING = """
import os
import ring_plugins as ring
ring.init(ranks=2)  # before the imports, which ranks then do at the same time
import torch
import lightning as L
from lightning.pytorch.demos.boring_classes import BoringModel
from ring_plugins.lightning import BalanceMonitor, RingStrategy, TimelineCallback
from tests.worker import report

L.seed_everything(0)  # a large update of a small number would round the bit away

class Model(BoringModel):
    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 8 and self.global_rank == 1:  # behind step 8, after which weights are compared anyway
            with torch.no_grad():
                self.layer.bias.view(torch.int32)[0] ^= 1 << 10

class Logger(L.pytorch.loggers.logger.DummyLogger):
    def log_metrics(self, metrics, step=None):
        report("logged", sorted(metrics))

trainer = L.Trainer(
    strategy=RingStrategy(drift_check_every=5), accelerator="cpu", devices=2, max_epochs=1, limit_val_batches=0,
    enable_checkpointing=False, enable_model_summary=False, enable_progress_bar=False, logger=Logger(),
    log_every_n_steps=2, callbacks=[BalanceMonitor(), TimelineCallback(os.environ["TMPDIR"], 2, 3)])
try:
    trainer.fit(Model())
except ring.DriftError as error:
    report("error", str(error))
report("batches", trainer.fit_loop.epoch_loop.batch_progress.current.ready)
"""


# Between two steps after which weights are compared anyway.
LATE = """
import os
import ring_plugins as ring
ring.init(ranks=2)
import torch
import lightning as L
from lightning.pytorch.demos.boring_classes import BoringModel
from ring_plugins.lightning import RingStrategy
from tests.worker import report

class Model(BoringModel):
    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 5 and self.global_rank == 1:
            self.layer.bias.data += 1
        if batch_idx == 6 and os.environ["TEST_SAVES"]:
            self.trainer.save_checkpoint(os.environ["TMPDIR"] + "/checkpoint")

trainer = L.Trainer(
    strategy=RingStrategy(), accelerator="cpu", devices=2, max_epochs=1, limit_val_batches=0, limit_train_batches=7,
    enable_checkpointing=False, enable_model_summary=False, enable_progress_bar=False, logger=False)
try:
    trainer.fit(Model())
except ring.DriftError as error:
    report("error", str(error))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("saves", "when"), [("", "when training ended"), ("1", "before this checkpoint is saved")])
def test_weights_are_compared_before_checkpoints_and_when_training_ends(saves, when):
    errors = run_ranks(LATE, 2, env={"TEST_SAVES": saves}, timeout=120).values("error")
    assert len(errors) == 2
    for said in errors:
        assert said.startswith(
            f"{when} the weights of rank 0 differ from those of rank 1: first in layer.bias, in 1 of"
        )


@pytest.mark.slow
def test_one_bit_on_one_rank_in_a_torch_loop():
    result = run_ranks(TORCH, 3, timeout=120)
    assert result.values("step") == [7, 7, 7]
    assert len(result.values("error")) == 3
    for said in result.values("error"):
        assert said.startswith("after 8 steps the weights of rank 1 differ from those of ranks 0, 2: first in 1.weight")


@pytest.mark.slow
def test_one_bit_on_one_rank_under_lightning():
    result = run_ranks(LIGHTNING, 2, timeout=120)
    assert result.values("batches") == [10, 10]
    assert len(result.values("error")) == 2
    for said in result.values("error"):
        assert re.match(r"after 10 steps the weights of rank \d differ from those of rank \d: first in layer\.", said)


def test_every_bit_counts():
    rng = np.random.default_rng(0)
    for array in (rng.random(1001).astype(np.float32), rng.random((3, 5)), np.arange(3, dtype=np.uint16)):
        before = checksum(array)
        data = array.reshape(-1).view(np.uint8)
        for bit in range(8):
            for byte in (0, 1, data.size // 2, data.size - 1):
                data[byte] ^= 1 << bit
                assert checksum(array) != before
                data[byte] ^= 1 << bit
        assert checksum(array) == before
    assert checksum(np.empty(0, np.float32)) == 0


def test_the_minority_is_named_as_different():
    text = what_differs(["a", "b", "c"], [[1, 2, 3], [1, 2, 4], [1, 9, 5], [1, 2, 3]], [0, 1, 2, 3])
    assert text.startswith("the weights of rank 2 differ from those of ranks 0, 1, 3: first in b, in 2 of 3")


def test_the_interval_is_the_argument_or_the_variable(monkeypatch):
    monkeypatch.setenv("RING_DRIFT_CHECK", "50")
    assert chosen_interval(None) == 50
    assert chosen_interval(0) == 0
    for bad in (-1, True, 2.5, "x"):
        with pytest.raises(ArgumentError, match="drift_check_every"):
            chosen_interval(bad)
    monkeypatch.setenv("RING_DRIFT_CHECK", "often")
    with pytest.raises(ArgumentError, match="RING_DRIFT_CHECK='often'"):
        chosen_interval(None)


def test_ranks_are_equal_if_the_one_that_differed_dies_while_they_compare(monkeypatch):
    def run(rank):
        ring = rank.communicator("ring")
        first, reduce = rank.barriers, ring.all_reduce

        def die_after(*args):
            reduce(*args)
            rank.dies = lambda _: "before" if rank.rank == 1 else None

        ring.all_reduce = die_after
        return _unequal([7 + (rank.rank == 1)], ring), rank.barriers > first + 1

    assert on_mortal_ranks(monkeypatch, 3, run) == [(None, True), None, (None, True)]


def test_the_comparison_does_not_match_what_a_script_reduces(monkeypatch):
    def run(rank):
        ring = rank.communicator("ring")
        with pytest.raises(MismatchError, match=r"check of weights: all_reduce\(2 x int64, max\)"):
            _unequal([7], ring) if rank.rank else ring.all_reduce(HostMemory(np.zeros(2, np.int64), "int64"), Op.MAX)
        return True

    assert on_mortal_ranks(monkeypatch, 2, run) == [True] * 2


class Alone:
    """Stands for the communicator of a rank whose peers have the same."""

    size, ranks = 2, (0, 1)

    def all_reduce(self, memory, op):
        """Keep the numbers."""


def test_a_drift_check_compares_every_so_many_steps_and_counts_anew_when_ranks_change(monkeypatch):
    compared, check = [], DriftCheck(3)

    def steps(number):
        compared.clear()
        for step in range(number):
            check.after_step(lambda step=step: compared.append(step) or (["a"], [1]), Alone())
        return list(compared)

    assert steps(7) == [2, 5]
    monkeypatch.setattr(consistency, "membership_changes", lambda: 1)
    assert steps(7) == [2, 5]
    check.every = 0
    assert steps(7) == []


class Numbers:
    """A check that notes when it is asked."""

    def __init__(self, number):
        self.number, self.is_asked = number, False

    def say(self, communicator):
        self.is_asked = True


def test_only_the_checks_whose_numbers_differ_are_asked():
    class Communicator:
        ranks = (0, 1)

        def all_gather_object(self, item, purpose=""):
            return [item, tuple(5 if number == 4 else number for number in item)]

    checks, same, other = Checks(place=Place()), Numbers(3), Numbers(4)
    checks.list += [same, other]
    first = checks.number()
    assert checks.number() == first
    assert not differ(bits_of(first).tolist()) and differ(((bits_of(first) + bits_of(7)) / 2).tolist())
    checks.say(Communicator())
    assert (same.is_asked, other.is_asked) == (False, True)
    other.number = 6
    assert checks.number() != first


def test_weights_are_due_after_one_two_four_and_more_passes():
    checks, due = Checks(place=Place()), []
    for passes in range(1, 4097):
        checks.note_compared()
        if checks.is_due:
            due.append(passes)
    assert due == [2**n for n in range(11)] + [2048, 3072, 4096]


def test_updates_are_counted_anew_when_ranks_have_joined():
    """A process that takes a lost rank's place has made none of the updates that the others have made."""
    job = SimpleNamespace(view=0)
    member, joiner = Checks(job, Place()), Checks(job, Place())
    member.updates.set(3)
    member.passes = 3
    assert member.number() != joiner.number()
    job.view = 1
    for checks in (member, joiner):
        checks.follow_members()
    assert member.number() == joiner.number()
    assert (member.updates.count, member.passes) == (0, 0)


def test_a_change_of_the_ranks_is_told_once_though_a_pass_has_counted_anew_before():
    """A fit asks behind the exchange that compares: only then does it tell the script's functions of the change."""
    job = SimpleNamespace(view=0)
    checks = Checks(job, Place())
    assert not checks.follow_members()
    job.view = 1
    checks.number()
    checks.note_compared()
    assert checks.follow_members()
    assert not checks.follow_members()


def test_an_error_names_the_first_of_many_parameters():
    many = [f"layer {number}" for number in range(9)]
    text = str(trained_error([["shared", *many], ["shared"]], ["", ""], [4, 7]))
    assert "(rank 4: layer 0, layer 1, layer 2, layer 3 and 5 more; rank 7: none that others do not train)" in text
    assert trained_error([many, many], ["", ""], [0, 1]) is None


def test_weights_that_differ_since_a_gpu_failed_are_blamed_on_it(monkeypatch):
    failed = [SimpleNamespace(failed=lambda error=error: error) for error in (None, DeviceError("NCCL failed."))]
    monkeypatch.setattr(consistency, "is_initialized", lambda: True)
    monkeypatch.setattr(consistency, "current", lambda: SimpleNamespace(device_executors=lambda: failed))
    with pytest.raises(DeviceError, match=r"because the GPU of rank 0 failed: NCCL failed\. What they have computed"):
        consistency.raise_failure_of_gpus(SingleCommunicator("job"))
    del failed[1]
    consistency.raise_failure_of_gpus(SingleCommunicator("job"))
