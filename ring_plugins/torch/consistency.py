"""What the passes of an averager compare about torch: weights, options of optimizers, and what others update.

How the numbers travel, and when weights are read, stands in `ring_plugins.observe.consistency`; options are in
`compared_options`.

**Weights** are read when the optimizer has updated them, not in the pass: a script may disturb them for a forward, each
rank in its own way, and restore them. If a pass tells that they differed, they are read again, and a script that has
made them equal since goes on. Ranks that differ after the first step are warned of, since later ones may be right.

**Other optimizers.** A script with two optimizers, as for a GAN, may wrap only one. The other steps with each rank's
own gradients, so the ranks train different discriminators, and one generator against all of them. torch calls a global
hook after each optimizer's step, which counts. With the weights, the ranks compare the parameters of all others that
have stepped since the last time, and, once, all that `named_parameters` names beyond the averaged ones. Differences are
reported, not the second optimizer: the script may well average its gradients in another way.

**Where ranks may be lost**, the survivors average that step's gradients once more, without the rank that died
(core/gradients/reducer). They have computed nothing else again, so their weights must be equal to the last bit, and
so must be the averages with which they step. That is checked there and then, before the update: a job that went on with
different weights would end with a useless model, and nobody would know. A process that joins also gets the optimizer's
state, of which the weights tell nothing before it is used. So they are compared in the next pass, too.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ring_plugins.core.arrays.memory import host_memory
from ring_plugins.core.base.errors import ArgumentError, DriftError
from ring_plugins.core.base.log import logger
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.collectives.host import HostCommunicator
from ring_plugins.core.world import current, is_initialized
from ring_plugins.observe.consistency import (
    SWITCH,
    Checks,
    Updates,
    check_equal_after_losses,
    checksum,
    differing_weights,
    is_check_wanted,
    raise_failure_of_gpus,
    what_differs,
)
from ring_plugins.other_names import as_in_script
from ring_plugins.torch.changes import Claim, is_claimed
from ring_plugins.torch.compared_options import Groups, Options, check_equal_options, fixed_options, other_options
from ring_plugins.torch.hooks import after_update, steps_so_far, watch_steps
from ring_plugins.torch.tensor_memory import not_plain

#: Passes after a change of the ranks in which weights are compared at once.
_AFTER_CHANGE = 2
#: Passes after which only weights are compared that the averager trains.
_TRAINED = 2

#: Why weights may differ.
_OTHER_STARTS = (
    "before the first step, if the ranks began with different weights. If they began with equal ones, they have given "
    "parameters or averagers in different orders, or updated weights inside the first backward, as a hook of a "
    "parameter may, before the average."
)
_NOT_AVERAGED = (
    "since no averager has it: a norm over all parameters, as in clip_grad_norm_(model.parameters()), makes a "
    "different factor of it on each rank. Clip what is averaged only, freeze the others (requires_grad_(False)), or "
    "give them to an averaged optimizer."
)
_OWN_CHANGE = (
    "A rank has changed its averages or weights in a way of its own: noise or clipping behind backward, a norm over "
    "parameters that are not averaged, a condition that is true on some ranks only, an optimizer that draws random "
    "numbers, processors or numbers of threads that are not alike, or a memory error. Continue from a checkpoint, or "
    "broadcast the weights of a rank you trust."
)

Named = tuple[str, torch.Tensor]


class TorchChecks(Checks):
    """What the passes of one averager compare.

    Args:
        claim: to the parameters that the averager trains.

    Attributes:
        options, weights: two of the checks.
    """

    def __init__(self, claim: Claim) -> None:
        super().__init__(current().elastic if is_initialized() and current().recovers else None)
        self.options = Options()
        self.weights = Weights(claim, self.options, self.updates)
        self.list += [self.options, self.weights]
        self.read_always.append(self.options)
        self.read_when_due.append(self.weights)
        watch_steps()

    def follow(self, groups: Groups, names: Mapping[nn.Parameter, str], communicator: Communicator[Any] | None) -> None:
        """From now on compare the options of optimizers.

        Args:
            groups: returns their parameter groups.
            names: of all parameters that the script has named.
            communicator: of all ranks, which compare at once what schedulers do not change; None for none.

        Raises:
            MismatchError: those differ.
        """
        if communicator is not None:
            self.options.check_others(groups(), communicator)
        self.options.groups, self.weights.names = groups, names

    def follow_others(self) -> None:
        """From now on compare what optimizers update that are not averaged."""
        others = OtherOptimizers(self.weights.names)
        self.list.append(others)
        self.read_when_due.append(others)

    def set_due(self, is_due: bool) -> None:
        """Note whether the next pass compares weights."""
        super().set_due(is_due)
        (after_update.add if is_due else after_update.discard)(self)

    def read_again(self) -> None:
        """Read the weights behind an update."""
        self.weights.number = None  # of an update before
        self.weights.look(self.passes)


# Weights --------------------------------------------------------------------------------------------


def parameter_checksums(named: Iterable[Named]) -> tuple[list[str], list[int]]:
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
    on_gpu = [value for value in sums if isinstance(value, torch.Tensor)]
    fetched = iter(torch.stack([value.to(on_gpu[0].device) for value in on_gpu]).tolist() if on_gpu else ())
    return names, [next(fetched) if isinstance(value, torch.Tensor) else value for value in sums]


def _on_device(memory: torch.Tensor) -> torch.Tensor:
    """The sum of 16-bit words, or of bytes if their number is odd; torch sums integers in 64 bits."""
    even = memory.numel() % 2 == 0
    return (memory.view(torch.int16) if even else memory).sum()


def samples_checksum(gradients: Iterable[torch.Tensor]) -> int:
    """What tells the samples from others of which a rank has computed gradients that are not averaged yet.

    Those of which all elements are equal do not count, as zeros: they need not depend on samples.
    """
    flat = [one.reshape(-1) for one in gradients]
    return sum(parameter_checksums(("", one) for one in flat if (one != one[:1]).any())[1])


class Weights:
    """The weights that were ever trained by one averager, as far as optimizers have them, and the fixed options.

    Up to the first step, all weights of the model are compared, frozen ones, too.

    Args:
        claim: to the parameters that were ever trained.
        options, updates: of the optimizers.

    Attributes:
        number: see `Check`; None where no comparison is due.
        named: (name, parameter) pairs of the whole model.
        names: of all parameters that the script has named, to be mentioned if they have gradients and no averager.
    """

    def __init__(self, claim: Claim, options: Options, updates: Updates) -> None:
        self.number: int | None = None
        self.named: Sequence[Named] = ()
        self.names: Mapping[nn.Parameter, str] = {}
        self._claim, self._options, self._updates = claim, options, updates
        self._start = self._passes = 0

    def look(self, passes: int) -> None:
        """Read the weights after so many passes, unless that was done behind the last update."""
        if self.number is None and is_check_wanted():
            self._passes, digest = passes, zlib.crc32(repr(self._checksums(passes)[1]).encode())
            if not passes:
                self._start = digest  # told only if weights differ later
            else:
                self.number = zlib.crc32(repr(fixed_options(self._options.groups())).encode(), digest)

    def _checksums(self, passes: int) -> tuple[list[str], list[int]]:
        """Those of the whole model up to the first step: a script may have set what is frozen, on one rank only.

        None where the optimizers have none of the weights: Keras updates its own, and compares them itself.
        """
        trained = self._options.use((name, p) for name, p in self.named if self._claim.has(p))
        return parameter_checksums(self.named if trained and passes < _TRAINED else trained)

    def say(self, communicator: Communicator[Any]) -> None:
        """See `Check`."""
        if self._passes > 1:
            self.compare(f"after {self._updates.count or self._passes} steps", communicator)
        elif found := self._difference(communicator, self._passes):
            causes = self._likely_causes(communicator)
            if communicator.rank == 0:
                logger.warning(f"after the first step {found}. {causes}")
            return
        check_equal_options(self._options.groups(), communicator)

    def compare(self, when: str, communicator: Communicator[Any]) -> None:
        """Compare the weights of all ranks as they are now. Collective.

        Args:
            when: begins the text, such as "after 8 steps".
            communicator: of all ranks.

        Raises:
            DriftError: on all ranks, if they differ. Not if RING_WEIGHT_CHECK=0.
        """
        if is_check_wanted() and (found := self._difference(communicator, _TRAINED)):
            raise DriftError(f"{when} {found}. {self._likely_causes(communicator)}")

    def _difference(self, communicator: Communicator[Any], passes: int) -> str:
        """Which weights differ now, of those compared after so many passes; "" if none does. Collective."""
        names, sums = self._checksums(passes)
        by_rank = communicator.all_gather_object(sums, "check of weights")
        if all(of_rank == by_rank[0] for of_rank in by_rank):
            return ""
        raise_failure_of_gpus(communicator)
        return what_differs(names, by_rank, communicator.ranks)

    def _likely_causes(self, communicator: Communicator[Any]) -> str:
        """Why weights differ, as far as the ranks know, and what to do. Collective."""
        if other := other_options(self._options.groups(), communicator):
            return f"The optimizers differ: {other}. Set the same on all ranks."
        own = [name for one, name in self.names.items() if one.grad is not None and not is_claimed(one)]
        told = communicator.all_gather_object((self._start, own), "causes of differences")
        starts, not_averaged = zip(*told, strict=True)
        causes = []
        if len(set(starts)) > 1:
            ours = "ring_plugins.torch.broadcast_parameters(model)"
            call = as_in_script(ours, "hvd.broadcast_parameters(model.state_dict(), root_rank=0)")
            causes.append(f"Call {call} {_OTHER_STARTS}")
        if own := next(filter(None, not_averaged), []):
            more = f" and {len(own) - 1} more parameter{'s' * (len(own) > 2)}" if len(own) > 1 else ""
            causes.append(f"The gradient of {own[0]}{more} is each rank's own, {_NOT_AVERAGED}")
        return f"{' '.join(causes or [_OWN_CHANGE])} {SWITCH}"


# Other optimizers -----------------------------------------------------------------------------------


class OtherOptimizers:
    """What optimizers update that are not averaged, beside a wrapped one. All ranks make it.

    Args:
        names: of all parameters that the script has named.

    Attributes:
        number: see `Check`; None where no comparison is due.
    """

    def __init__(self, names: Mapping[nn.Parameter, str]) -> None:
        self.number: int | None = None
        self._names, self._is_told, self._passes = names, False, 0
        self._compared: dict[nn.Parameter, str] = {}
        self._kinds: list[str] = []
        self._counted: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary(steps_so_far())

    def look(self, passes: int) -> None:
        """Read what other optimizers have updated since the last time, after so many passes of the wrapped one's."""
        self._passes = passes
        if not passes:
            self._is_told = False
            self.stepped()  # ranks that have joined have not seen earlier steps
        if self._is_told or passes < 2 or not is_check_wanted():
            return
        stepped = self.stepped()
        self._kinds = list(dict.fromkeys(kind for _, kind in stepped))
        self._compared = {p: name for p, name in self._names.items() if not is_claimed(p)} if passes == 2 else {}
        for number, (one, kind) in enumerate(stepped):
            self._compared.setdefault(one, self._names.get(one, f"parameter {number} of another optimizer ({kind})"))
        self.number = zlib.crc32(repr(self._checksums()[1]).encode())

    def _checksums(self) -> tuple[list[str], list[int]]:
        return parameter_checksums((name, one) for one, name in self._compared.items())

    def stepped(self) -> list[tuple[nn.Parameter, str]]:
        """What no averager has and other optimizers have updated since the last call, with the optimizer's class."""
        so_far = steps_so_far()
        active = [optimizer for optimizer, count in so_far if count != self._counted.get(optimizer)]
        self._counted = weakref.WeakKeyDictionary(so_far)
        return [
            (one, type(optimizer).__name__)
            for optimizer in _outermost(active)
            for one in _parameters(optimizer)
            # Other tensors are slices, or inputs that an attack looks for, which are each rank's own.
            if isinstance(one, nn.Parameter) and not is_claimed(one)
        ]

    def say(self, communicator: Communicator[Any]) -> None:
        """See `Check`. Warns once."""
        found = differing_weights(self._checksums, f"after {self._passes} steps", communicator)
        self._is_told = bool(found)
        if found and communicator.rank == 0:
            steps = f", and {' and '.join(self._kinds)} stepped on each rank's own" if self._kinds else ""
            logger.warning(
                f"{found} Their gradients are not averaged: no DistributedOptimizer has them{steps}. Wrap every "
                "optimizer in ring_plugins.torch.DistributedOptimizer, and call broadcast_parameters(model) for the "
                f"whole model. {SWITCH}"
            )


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [one for group in optimizer.param_groups for one in group["params"]]


def _outermost(optimizers: list[Optimizer]) -> list[Optimizer]:
    """Those without optimizers inside others, such as those of a ZeroRedundancyOptimizer.

    These have another part of the parameters on each rank, and update them for the other ranks, too. An optimizer is
    inside another if that one has all of its parameters and finished its step later.
    """
    ids = [{id(one) for one in _parameters(optimizer)} for optimizer in optimizers]
    return [
        optimizer
        for number, optimizer in enumerate(optimizers)
        if not any(ids[number] <= others for others in ids[number + 1 :])
    ]


# Lost ranks -----------------------------------------------------------------------------------------


def check_has_joined() -> None:
    """Check that this process may train.

    Raises:
        ArgumentError: it is to take the place of a lost rank, and has not joined.
    """
    if current().is_joining:
        raise ArgumentError(
            "this process takes the place of a lost rank, and averages gradients before it has joined the others: "
            'with on_failure="replace", make a ring_plugins.torch.TrainingState before the training loop, and call '
            "its commit() after each step."
        )


class RecoveryCheck:
    """Compares all ranks after some were lost or joined, for one averager.

    Args:
        communicator: the averager's.
    """

    def __init__(self, communicator: Communicator[Any]) -> None:
        self._communicator = communicator
        self._job = current()
        self._job.elastic.averages = True
        within_host = communicator.within_host if isinstance(communicator, HostCommunicator) else None
        #: Whether passes tell all ranks of the job what one of them tells, and not only those of this host.
        self.tells_all = within_host is None
        self._within_host = within_host
        self._seen, self._to_compare = self._changes(), 0

    def _changes(self) -> tuple[int, int]:
        """How often the ranks of the job have changed, and those of this host besides."""
        return self._job.elastic.view, 0 if self._within_host is None else self._within_host.losses

    def begin_pass(self) -> bool:
        """Refuse to average before this process has joined the others; returns whether it wants ranks to change.

        Raises:
            ArgumentError: as `check_has_joined`.
        """
        if self._job.is_joining:
            check_has_joined()
        return self._job.elastic.wants_change

    def after_pass(self, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        """If ranks were lost or joined since the last call or the one before, compare weights and averages.

        Collective then. The script is told of the change, too.

        Args:
            named: (name, parameter) pairs, equal on all ranks, at the end of a backward.

        Raises:
            DriftError: on all ranks, if they differ. Not if RING_WEIGHT_CHECK=0.
        """
        if (changes := self._changes()) != self._seen:
            self._seen, self._to_compare = changes, _AFTER_CHANGE
        if not self._to_compare:
            return
        self._to_compare -= 1
        trained = [(name, p.grad) for name, p in named if p.requires_grad]
        averages = [(f"the gradient of {name}", average) for name, average in trained if average is not None]
        check_equal_after_losses(lambda: parameter_checksums([*named, *averages]), self._communicator)
        if self.tells_all:
            self._job.elastic.tell_changes()
