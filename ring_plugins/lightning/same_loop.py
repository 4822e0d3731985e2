"""Ranks begin batches and end epochs together, and compute logged metrics together.

**Steps.** Lightning compares nothing among ranks. Where one has a batch less, or sets ``trainer.should_stop`` alone,
its next collective meets another one of the others. But at the start of every batch all ranks read rank 0's SIGTERM
flag, by a broadcast. In its place they tell each other here where they are, which costs as much, and do so once more
before they validate and at the end of an epoch. So all of them learn which rank went on alone, and why, and whether any
was told that the job is to end.

**Metrics.** A value that is logged with ``on_epoch=True`` is reduced over the ranks when it is first read. Progress
bars read it on rank 0 only, before the module's ``on_train_epoch_end``, and so do users' callbacks that work on rank 0
only. All ranks read it here before callbacks do. If there is none that could, it is read as late as without this.

Lightning 2.6.6 has no hook before these places, so methods of its loops are replaced in the Trainer's own objects:
pytorch/loops/training_epoch_loop.py:259 (the flag), pytorch/loops/fit_loop.py:474 and evaluation_loop.py:293 (the end
of an epoch), and the ``run`` of the loop that validates.
"""

from __future__ import annotations

import functools
import operator
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

import ring_plugins.core.functions as ring
from ring_plugins.core.arrays.memory import HostMemory
from ring_plugins.core.base.errors import MismatchError, PeerLeft, name_ranks
from ring_plugins.core.collectives.fingerprint import purpose
from ring_plugins.core.groups import Group, communicator_of
from ring_plugins.lightning.preemption import REQUEUE, STOP, Preemption
from ring_plugins.torch.loaders import samplers_of

_BATCH, _VALIDATION, _EPOCH_END = range(3)
_DOING = (
    ("goes on with another batch", "go on with another batch"),
    ("validates", "validate"),
    ("has left it", "have left it"),
)
#: Bits of what a rank tells: its phase, a flag, what signals have told it, how many batches of this epoch it has begun,
#: and of its next batch.
_PHASE, _STOPS, _TOLD, _BATCHES, _DATA = 3, 4, 3, 5, 32


class SameLoop:
    """Keeps the loops of one Trainer in step.

    Args:
        trainer: the Trainer, in ``Strategy.setup``.
        compares: whether ranks tell each other where they are.
        group: the ranks that average every step, all by default.
        come_together: called before ranks validate and at the end of an epoch, where hosts exchange weights. Then this
            tells all hosts of signals, and not only the ranks of this one; None where `group` is of all hosts.
    """

    def __init__(
        self,
        trainer: Any,
        compares: bool,
        group: Group | None = None,
        come_together: Callable[[], object] | None = None,
    ) -> None:
        self._come_together = come_together
        self._trainer, self._group = trainer, group
        self._replaced: list[tuple[Any, str]] = []
        connector, loop = trainer._logger_connector, trainer.fit_loop.epoch_loop
        self._compares = compares and trainer.state.fn == "fit" and hasattr(loop, "_broadcast_sigterm_tensor")
        self.preemption = Preemption(trainer, self._compares)
        self._is_told, self._has_met = 0, False
        self._keeps_ranks, size = compares, communicator_of(group).size
        self._ranks = range(size) if group is None else group.ranks
        if self._compares:
            self._communicator = communicator_of(group)
            self._counts = [1] * size
            self._own = HostMemory(np.zeros(1, np.int64), "int64")
            self._all = HostMemory(np.zeros(len(self._counts), np.int64), "int64")
            self._replace(loop, "_broadcast_sigterm_tensor", self._begin_batch)
            self._replace(loop.val_loop, "run", self._validate)
        self._replace(connector, "epoch_end_reached", self._end_epoch)
        self._replace(connector, "_evaluation_epoch_end", self._end_evaluation)

    def close(self) -> None:
        """Leave the Trainer as it was."""
        for owner, name in self._replaced:
            vars(owner).pop(name, None)
        self.preemption.close()

    def _replace(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        original = getattr(owner, name)
        self._replaced.append((owner, name))
        setattr(owner, name, lambda: function(original))

    def _begin_batch(self, _: Callable[[], None]) -> None:
        told = self._is_told if self._has_met else signals_of(self._meet(_BATCH))
        if told and self._come_together is None:
            self.preemption.stop(told)

    def begin_batch(self, data: int) -> list[int]:
        """Tell the others of this rank's next batch; a signal of which any rank tells ends training behind it.

        Args:
            data: what to tell, in 31 bits.

        Returns:
            What each rank has told.

        Raises:
            PeerLeft: ranks are at different places.
        """
        told = self._meet(_BATCH, data) if self._compares else ring.all_gather_object(data << _DATA, group=self._group)
        self._has_met, self._is_told = True, signals_of(told) if self._compares else 0
        return [one >> _DATA for one in told]

    def _validate(self, run: Callable[[], Any]) -> Any:
        self._meet(_VALIDATION)
        if self._come_together is not None:
            self._come_together()
        return run()

    def _end_epoch(self, reach_end: Callable[[], None]) -> None:
        reach_end()
        if self._trainer.training:  # an evaluation calls it too
            if self._compares:
                told = self._meet(_EPOCH_END, self._order())
                self._compare_orders([one >> _DATA for one in told])
                if self._come_together is not None:
                    self._come_together()
                elif (signals := signals_of(told)) & STOP:
                    self.preemption.agree(signals)
            self._compute_metrics("on_train_epoch_end")

    def _end_evaluation(self, end: Callable[[], None]) -> None:
        end()
        if self._keeps_ranks and (order := self._order()):
            self._compare_orders(ring.all_gather_object(order, group=self._group))
        self._compute_metrics("on_test_epoch_end" if self._trainer.testing else "on_validation_epoch_end")

    def _order(self) -> int:
        """A checksum of what samplers have drawn for all ranks in this epoch, below 2 ** 31; 0 where none chose it."""
        combined = self._trainer._active_loop._combined_loader
        loaders = [] if combined is None else combined.flattened
        samplers = [one for loader in loaders for one in (getattr(loader, "batch_sampler", None), *samplers_of(loader))]
        found = {id(one): getattr(one, "checksum", 0) for one in samplers}
        return zlib.crc32(repr(list(found.values())).encode()) >> 1 if any(found.values()) else 0

    def _compare_orders(self, told: list[int]) -> None:
        others = [rank for rank, one in zip(self._ranks, told, strict=True) if one != told[0]]
        if others:
            raise MismatchError(
                f"the samplers of rank {self._ranks[0]} and {name_ranks(others)} have drawn different samples, or in "
                "another order, so that ranks have read some twice and others never. torch's global random numbers are "
                "alike on all ranks by themselves: seed a generator of the sampler's own, and those of random and "
                "numpy, alike on all ranks. If each rank has its own data, pass Trainer(use_distributed_sampler=False)."
            )

    def _compute_metrics(self, hook: str) -> None:
        late = (*self._trainer.checkpoint_callbacks, *self._trainer.early_stopping_callbacks)  # they run on all ranks
        for callback in self._trainer.callbacks:
            method = getattr(callback, hook)
            if callback not in late and getattr(method, "__qualname__", "") != f"Callback.{hook}":
                self._trainer.callback_metrics  # noqa: B018 - reading it computes all
                return

    def _meet(self, phase: int, data: int = 0) -> list[int]:
        """Tell the others where this rank is; return what each of them told.

        Raises:
            PeerLeft: ranks are at different places.
        """
        trainer = self._trainer
        flags = (_STOPS if trainer.should_stop else 0) | self.preemption.told << _TOLD
        batches = trainer.fit_loop.epoch_loop.batch_progress.current.ready << _BATCHES
        self._own.array[0] = phase | flags | batches | data << _DATA
        with purpose("comparison of loops"):
            self._communicator.all_gather(self._own, self._all, self._counts)
        told: list[int] = self._all.array.tolist()
        if any((each ^ told[0]) & _PHASE for each in told):
            raise self._apart(told)
        return told

    def _apart(self, told: list[int]) -> PeerLeft:
        phases = [each & _PHASE for each in told]
        ahead = [rank for rank, phase in zip(self._ranks, phases, strict=True) if phase == max(phases)]
        behind = [rank for rank, phase in zip(self._ranks, phases, strict=True) if phase == min(phases)]
        alone = [rank for rank, each in zip(self._ranks, told, strict=True) if each & _STOPS]
        doing = f"{name_ranks(ahead)} {_DOING[max(phases)][len(ahead) > 1]}"
        others = f"{name_ranks(behind)} {_DOING[min(phases)][len(behind) > 1]}"
        batches = (told[phases.index(max(phases))] & (1 << _DATA) - 1) >> _BATCHES
        if alone and len(alone) < len(told):
            cause = (
                f"trainer.should_stop is set on {name_ranks(alone)} only. Let all ranks decide alike, for example by "
                "self.trainer.strategy.reduce_boolean_decision(stop, all=False)."
            )
        else:
            cause = (
                "Usually the ranks have different numbers of batches: give every rank the same number, by "
                "limit_train_batches, drop_last=True or a sampler that pads. Else look for a condition that is true on "
                "some ranks only."
            )
        epoch = self._trainer.current_epoch
        return PeerLeft(f"after {batches} batches of epoch {epoch}, {doing}, but {others}. {cause}", ahead[0])


def signals_of(told: list[int]) -> int:
    """What any rank was told by a signal, of what all have told."""
    return functools.reduce(operator.or_, told) >> _TOLD & (STOP | REQUEUE)
