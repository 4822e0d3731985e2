"""Check that all ranks train in the same way, and nothing else trains the model in parallel.

Ranks that differ would hang in a collective or diverge silently. Each check raises an error with the value on every
rank and the remedy.
"""

from __future__ import annotations

import contextlib
import functools
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.arrays.memory import HostMemory
from ring_plugins.core.base import config
from ring_plugins.core.base.errors import ArgumentError, MismatchError, name_ranks
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.collectives.fingerprint import purpose
from ring_plugins.core.groups import Group
from ring_plugins.core.world import current
from ring_plugins.keras.backends import backend
from ring_plugins.keras.consistency import KerasChecks, all_equal, by_rank


def check_root(root_rank: int | None, group: Group | None = None) -> int:
    """The rank of the job that is the root of these ranks: the first of them by default.

    Raises:
        ArgumentError: it is none of them.
    """
    size, ranks = current().topology.size, group.ranks if group else range(current().topology.size)
    root = ranks[0] if root_rank is None else root_rank
    if isinstance(root, bool) or not isinstance(root, int) or not 0 <= root < size:
        raise ArgumentError(
            f"root_rank={root_rank!r} is not a rank of this job of {size}; pass a number from 0 to {size - 1}."
        )
    if root not in ranks:
        raise ArgumentError(f"root_rank={root}, a rank of the job, is not in the {group.name if group else 'job'}.")
    return root


def check_other_parallelism(model: Any) -> None:
    """Check that nothing else trains the model in parallel.

    Raises:
        ArgumentError: a TensorFlow strategy, `keras.distribution` or DistributedDataParallel is active.
    """
    distribution = keras.distribution.distribution()
    if distribution is not None:
        raise ArgumentError(
            f"keras.distribution is set to {type(distribution).__name__}, which places the model itself. Call "
            "keras.distribution.set_distribution(None) before the model is built, or fit without this callback."
        )
    backend().check_other_parallelism(model)


def check_equal(value: Any, communicator: Communicator[Any], problem: str, remedy: str) -> None:
    """Raise MismatchError with every rank's value if they differ. Collective."""
    values = communicator.all_gather_object(value, "arguments")
    if not all_equal(values):
        raise MismatchError(f"{problem} ({by_rank(values, communicator.ranks)}). {remedy}")


class SynchronizedStop:
    """Stops all ranks after the same step, and detects epochs of different lengths.

    After every step and every epoch the ranks exchange whether any of them wants to stop, in a reduction of 64 bytes.
    It also tells whether a rank is to leave, or others wait to join, and compares the checks of `fit`. It costs little,
    because the averaging has just synchronized the ranks.

    Between two steps a rank may also ask the others, which come to the next exchange, to take part in something.

    Args:
        communicator: must have no other use.
        take_part: called on the ranks that a request reaches, with its number.
        tell: lets ranks that wait for this one in whatever `fit` calls raise this error.
        checks: what the exchanges compare.
    """

    _STEP, _EPOCH = 0, 1

    def __init__(
        self,
        communicator: Communicator[Any],
        take_part: Callable[[int], None],
        tell: Callable[[MismatchError], None],
        checks: KerasChecks,
    ) -> None:
        self._communicator, self._take_part, self._tell, self._checks = communicator, take_part, tell, checks
        self._steps = 0
        #: Whether the ranks tell each other that the job is to end. Other groups would not know of it.
        self.follows_signals = False
        #: How many batches the rank with the most has for the next step, as the last step's exchange has told.
        self.most = 0
        #: The text of the error that this raised, "" if none. The error itself would keep the frames of `fit` alive.
        self.mismatch = ""

    def after_step(self, model: Any, batch: int, more: int = 0, backup_is_due: bool = False) -> int:
        """Set `model.stop_training` on all ranks if any rank has set it. Collective.

        Args:
            model: that is trained.
            batch: its number in this epoch, from 0.
            more: how many this rank has for the next step, if ranks may have different numbers.
            backup_is_due: whether this rank is to save the state of all ranks.

        Returns:
            `CHANGE` if any rank was told to leave, or sees others that wait to join, else `BACKUP` if one is due on
            any; 0 if neither.

        Raises:
            MismatchError, DriftError: another rank has ended its epoch, or the checks say so.
        """
        self._steps = batch + 1
        return self._exchange(model, self._STEP, more, backup_is_due)

    def after_epoch(self, model: Any) -> bool:
        """Do the same at the end of an epoch. Collective.

        Raises:
            MismatchError, DriftError: another rank has not ended its epoch, or the checks say so.
        """
        wants_change = self._exchange(model, self._EPOCH) == CHANGE
        self._steps = 0
        return wants_change

    def request(self, number: int) -> None:
        """Make all other ranks take part in what has this number, counted from 1. Collective, as the others' exchange.

        Returns when they are about to. If ranks ask for different things at once, all take part in each.
        """
        while (found := self._reduced([0, self._STEP, -self._STEP, 0, number, 0, 0, 0])[4]) != number:
            self._take_part(found)

    def _reduced(self, flags: list[int]) -> list[int]:
        array = np.array(flags, np.int64)
        with purpose("comparison of steps"):
            self._communicator.all_reduce(HostMemory(array, "int64"), Op.MAX)
        found: list[int] = array.tolist()
        return found

    def _exchange(self, model: Any, point: int, more: int = 0, backup_is_due: bool = False) -> int:
        # max(-point) is -min(point), so one reduction shows whether all ranks are at the same point.
        world, number = current(), self._checks.number()
        follows = world.recovers or self.follows_signals  # else only `preempted` asks, among all ranks
        wish = CHANGE if follows and world.elastic.wants_change else BACKUP * backup_is_due
        flags = [int(model.stop_training), point, -point, wish, 0, more, number, -number]
        where = f"has {'ended its epoch after' if point == self._EPOCH else 'taken'} {self._steps} steps"
        with self._same_step(where):
            while (found := self._reduced(flags))[4]:
                self._take_part(found[4])
            stop, largest, negated_smallest, wish, _, most, *numbers = found
            if largest != -negated_smallest:
                raise self._unequal(where)
        self._checks.note_compared()
        self.most = most
        if sum(numbers):
            self._checks.say(self._communicator)
        if stop:
            model.stop_training = True
        return wish

    def watch_steps(self, model: Any) -> None:
        """Let the train function raise as `after_step` does, in a step that another rank does not take."""
        step = model.train_function
        if getattr(step, "_ring_stop", None) is self:
            return

        @functools.wraps(step)
        def same_step(*args: Any) -> Any:
            with self._same_step(f"is in step {self._steps + 1} of its epoch"):
                return step(*args)

        same_step._ring_stop = self  # type: ignore[attr-defined]
        model.train_function = same_step

    @contextlib.contextmanager
    def _same_step(self, where: str) -> Iterator[None]:
        """Raise in this block, on all ranks, a `MismatchError` where another rank is not in the same step."""
        try:
            yield
        except Exception as error:  # around which Keras may have put one of another class, with the same text
            # Does a rank wait for others that have ended their step or epoch, or the reverse, in operations of ours?
            names = re.findall(r"waits for rank \d+ in ([^:]+):", str(error))
            between = [name for name in names if name in (STOP, FIT)]
            is_between = bool(between) and all(name in between or name.startswith(_IN_STEPS) for name in names)
            # Another rank may have found it first, told this one, or be gone.
            if not is_between and _UNEQUAL not in str(error):
                raise
            raise self._unequal(where) from error

    def _unequal(self, where: str) -> MismatchError:
        self.mismatch = (
            f"{_UNEQUAL}: this rank {where}, and another rank is elsewhere. Probably they have unequal numbers of "
            "batches: give every rank the same amount of data, as ring_plugins.keras.shard does, or pass "
            "steps_per_epoch to fit(). Otherwise a condition in the training step is true on some ranks only."
        )
        error = MismatchError(self.mismatch)
        self._tell(error)
        return error


#: What a rank may wish behind a step. The larger one is heard first, the other one in the next step.
BACKUP, CHANGE = 1, 2
#: Names of communicators of which all operations stand between steps, and the beginnings of those in steps.
STOP, FIT = "stop", "fit"
_IN_STEPS = ("gradients", "sharded updates", "batch normalization")
_UNEQUAL = "epochs differ in length among ranks"


@functools.lru_cache(maxsize=1)
def warn_of_gpu_copies(rank: int, is_compressed: bool = False) -> None:
    """Warn once, on rank 0, if gradients leave the GPU to be averaged.

    On torch, NCCL reduces them on the GPU. On TensorFlow and JAX it does so only on request, since these paths have
    never run on a GPU (`backends/tensorflow_device.py`, `backends/jax_device.py`), and without compression.
    """
    switch = backend().nccl
    if switch is None or (switch.get() and not is_compressed) or rank != 0 or not backend().has_gpus():
        return
    name = keras.backend.backend()
    warning = (
        f"ring_plugins averages gradients of the {name} backend in CPU memory: each step copies all of them "
        "from the GPU and back (twice over PCIe: 10 ms or more per step for 100 MB of gradients at 20 GB/s). "
        f"KERAS_BACKEND=torch averages them on the GPUs. {switch.name}=1 does so on this backend too, without "
        "compression, but has not been tried on a GPU yet."
    )
    if name == "jax":
        warning += " On one host with several GPUs, keras.distribution.DataParallel keeps them there as well."
    warnings.warn(warning, stacklevel=2)


def all_use_nccl(switch: config.Variable[bool], has_gpu: bool, framework: str, communicator: Communicator[Any]) -> bool:
    """Whether NCCL averages the backend's gradients on all ranks. Collective.

    Args:
        switch: the variable that requests it.
        has_gpu: whether this rank has one.
        framework: its name, for the error.
        communicator: of all ranks.

    Raises:
        MismatchError: some ranks request that and have a GPU, and others do not.
    """
    where = communicator.all_gather_object(switch.get() and has_gpu, "choice of NCCL")
    if len(set(where)) > 1:
        lacking = [rank for rank, is_there in zip(communicator.ranks, where, strict=True) if not is_there]
        raise MismatchError(
            f"{name_ranks(lacking)}: no GPU for {framework}, or no {switch.name}=1, unlike other ranks. Set the "
            "variable on all ranks or on none, and give each rank a GPU."
        )
    return all(where)
