"""Whether all ranks' weights stay equal: checksums of torch parameters, compared after 2, 4, 8... steps.

**Problem.** Averaged gradients keep weights equal only if nothing else changes on one rank: noise that is added after
backward, a clipping by a norm over parameters that are not averaged, an option that one rank changes. A comparison
after the first step finds what is wrong from the start, and nothing that begins later.

**Idea.** After 2, 4, 8... up to 1024 passes, and after each 1024 from there, each rank reads its weights once and mixes
a checksum into the numbers that the next pass compares anyway (`compared_options`), so ranks send nothing more and wait
for nothing. Reading all weights costs less than an update of them, and is done so seldom that it cannot be measured.

The weights are read when the optimizer has updated them, not in the pass: a script may disturb them for a forward, each
rank in its own way, and restore them. If a pass tells that they differed, they are read again, and a script that has
made them equal since goes on.
"""

from __future__ import annotations

import functools
import weakref
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ring_plugins.core.arrays.memory import host_memory
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.observe.drift import Checksums, checksum, is_check_wanted, is_compared_after, what_differs
from ring_plugins.torch.device import is_capturing
from ring_plugins.torch.ownership import is_claimed
from ring_plugins.torch.tensor_memory import not_plain

#: Those of all averagers that are to be read after the next update. Most steps find none.
_due: weakref.WeakSet[WeightsInStep] = weakref.WeakSet()


def parameter_checksums(named: Iterable[tuple[str, torch.Tensor]]) -> tuple[list[str], list[int]]:
    """Names and checksums of parameters that have memory of their own; on a GPU computed there and fetched together.

    Args:
        named: (name, parameter) pairs.
    """
    names: list[str] = []
    sums: list[int | torch.Tensor] = []
    for name, parameter in named:
        if not_plain(parameter, name):  # quantized weights that are frozen, parts of a distributed one
            continue
        names.append(name)
        memory = parameter.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        sums.append(checksum(host_memory(memory).array) if memory.device.type == "cpu" else _on_device(memory))
    return names, [int(value) for value in sums]


def _on_device(memory: torch.Tensor) -> torch.Tensor:
    """The sum of 16-bit words, or of bytes if their number is odd; torch sums integers in 64 bits."""
    even = memory.numel() % 2 == 0
    return (memory.view(torch.int16) if even else memory).sum()


class Hints(NamedTuple):
    """What a rank knows about why weights may differ.

    Attributes:
        start: a checksum of its weights before the first step.
        not_averaged: names of parameters with gradients that are its own.
    """

    start: int
    not_averaged: Sequence[str]


class WeightsInStep:
    """The weights of one averager, read at the steps after which ranks compare them.

    Args:
        checksums: returns those of the weights that the averager trains.

    Attributes:
        names: of all parameters that the script has named, to be mentioned if they have gradients and no averager.
        passes: how many the averager has ended since the ranks of the job last changed.
        is_due: whether the next pass compares weights; the same on all ranks.
    """

    def __init__(self, checksums: Checksums) -> None:
        self._checksums = checksums
        self.names: Mapping[Any, str] = {}
        self.passes, self.is_due = 0, False
        self._start, self._digest, self._noted_at = 0, 0, 0
        _watch()

    def count(self, passes: int) -> None:
        """Note how many passes the averager has ended."""
        self.passes = passes
        self.is_due = is_compared_after(passes)
        (_due.add if self.is_due else _due.discard)(self)

    def note(self) -> None:
        """Read the weights behind an update, if the next pass compares them."""
        if self.is_due and is_check_wanted():
            self._digest, self._noted_at = _digest(self._checksums()[1]), self.passes

    def number(self) -> int | None:
        """A checksum for this pass to compare; None if it compares no weights."""
        if not self.passes and is_check_wanted():
            self._start = _digest(self._checksums()[1])  # told only if weights differ later
        if self._noted_at != self.passes:  # no optimizer has updated them since the last pass
            self.note()
        return self._digest if self.passes and self._noted_at == self.passes else None

    def hints(self) -> Hints:
        """Why weights may differ, as far as this rank knows."""
        own = [name for one, name in self.names.items() if one.grad is not None and not is_claimed(one)]
        return Hints(self._start, own)

    def difference(self, communicator: Communicator[Any]) -> str:
        """Which weights differ now, "" if none does. Collective."""
        names, sums = self._checksums()
        by_rank = communicator.all_gather_object(sums, "check of weights")
        is_equal = all(of_rank == by_rank[0] for of_rank in by_rank)
        return "" if is_equal else what_differs(names, by_rank, communicator.ranks)


def likely_causes(hints: Sequence[Hints]) -> str:
    """Sentences that say why weights may differ, and what to do, after hints of all ranks."""
    causes = []
    if len({hint.start for hint in hints}) > 1:
        causes.append(
            "Call ring_plugins.torch.broadcast_parameters(model) before the first step, if the ranks began with "
            "different weights. If they began with equal ones, they have given parameters or averagers in different "
            "orders, or updated weights inside the first backward, as a hook of a parameter may, before the average."
        )
    own = next((hint.not_averaged for hint in hints if hint.not_averaged), ())
    if own:
        more = f" and {len(own) - 1} more parameters" if len(own) > 1 else ""
        causes.append(
            f"The gradient of {own[0]}{more} is each rank's own, since no averager has it: a norm over all parameters, "
            "as in clip_grad_norm_(model.parameters()), makes a different factor of it on each rank. Clip what is "
            "averaged only, freeze the others (requires_grad_(False)), or give them to an averaged optimizer."
        )
    if not causes:
        causes.append(
            "A rank has changed its averages or weights in a way of its own: noise or clipping behind backward, a norm "
            "over parameters that are not averaged, a condition that is true on some ranks only, an optimizer that "
            "draws random numbers, processors or numbers of threads that are not alike, or a memory error. Continue "
            "from a checkpoint, or broadcast the weights of a rank you trust."
        )
    return f"{' '.join(causes)} If they differ on purpose, RING_WEIGHT_CHECK=0 switches this comparison off."


def _digest(sums: Sequence[int]) -> int:
    return zlib.crc32(repr(sums).encode())


@functools.cache
def _watch() -> None:
    """From now on read weights, where that is due, whenever a torch optimizer has made a step."""
    register_optimizer_step_post_hook(_after_step)


def _after_step(*_: Any) -> None:
    if _due and not torch.compiler.is_compiling() and not is_capturing():
        for weights in list(_due):
            weights.note()
