"""Check that all ranks train in the same way, and nothing else trains the model in parallel.

Ranks that differ would hang in a collective or diverge silently. Each check raises an error with the value on every
rank and the remedy.
"""

from __future__ import annotations

import contextlib
import functools
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.arrays.memory import HostMemory
from ring_plugins.core.base import config
from ring_plugins.core.base.errors import ArgumentError, MismatchError, name_ranks
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.collectives.fingerprint import purpose
from ring_plugins.core.world import World, current
from ring_plugins.keras.backends import backend


def check_root(root_rank: int, world: World) -> None:
    """Check that `root_rank` is a rank of this job.

    Raises:
        ArgumentError: it is not.
    """
    if isinstance(root_rank, bool) or not isinstance(root_rank, int) or not 0 <= root_rank < world.topology.size:
        raise ArgumentError(
            f"root_rank={root_rank!r} is not a rank of this job of {world.topology.size}; pass a number from 0 to "
            f"{world.topology.size - 1}."
        )


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


def check_equal_steps(params: dict[str, Any] | None, communicator: Communicator) -> None:
    """Check that all ranks train for the same numbers of steps and epochs. Collective.

    A rank with more steps would wait forever for the gradients of ranks that have finished.

    Args:
        params: `Callback.params`; "steps" is None for a generator.
        communicator: communicator of all ranks.

    Raises:
        MismatchError: the numbers differ.
    """
    given = params or {}
    data = "Give every rank the same amount of data, as ring_plugins.keras.shard does, or pass steps_per_epoch."
    epochs = "Pass the same epochs to fit() on all ranks."
    for key, what, remedy in (("steps", "steps per epoch", data), ("epochs", "epochs", epochs)):
        _check_equal(given.get(key), communicator, f"ranks would take different numbers of {what}", remedy)


def check_equal_validation(data: Any, frequency: Any, communicator: Communicator) -> None:
    """Check that all ranks validate in the same epochs, if their metrics are computed together. Collective.

    Args:
        data, frequency: arguments of `fit`.
        communicator: communicator of all ranks.

    Raises:
        MismatchError: some ranks have no data, or other epochs.
    """
    own = "no validation_data" if data is None else f"validation_data, with validation_freq={frequency!r}"
    _check_equal(
        own,
        communicator,
        "MetricAverageCallback computes metrics from all ranks' data, but the ranks would validate in other epochs",
        "Pass validation_data, as ring_plugins.keras.shard divides it, and validation_freq to fit() on all ranks.",
    )


def all_equal(values: Sequence[Any]) -> bool:
    """Whether values are equal, with NaN equal to itself."""
    return all(value == values[0] or repr(value) == repr(values[0]) for value in values)


def check_equal_epochs(epoch: int, communicator: Communicator) -> None:
    """Check that all ranks begin with the same epoch. Collective.

    Raises:
        MismatchError: the epochs differ.
    """
    _check_equal(
        epoch,
        communicator,
        "ranks begin with different epochs",
        "Pass the same initial_epoch on all ranks; every rank must see the checkpoint that determines it.",
    )


def updating_optimizers(optimizer: Any) -> list[Any]:
    """The optimizers that update: those of a `MultiOptimizer`, or the one inside any LossScaleOptimizer."""
    while (inner := getattr(optimizer, "inner_optimizer", None)) is not None:
        optimizer = inner
    return list(getattr(optimizer, "optimizers", [optimizer]))


def check_equal_learning_rates(optimizer: Any, communicator: Communicator) -> None:
    """Check that the learning rate, or each of several, is the same on all ranks. Collective.

    Raises:
        MismatchError: the rates differ.
    """
    own = [float(keras.ops.convert_to_numpy(one.learning_rate)) for one in updating_optimizers(optimizer)]
    rates = communicator.all_gather_object(own[0] if len(own) == 1 else tuple(own), "learning rates")
    if not all_equal(rates):
        raise MismatchError(
            f"learning rates differ among ranks: {rates}, in rank order. A callback such as ReduceLROnPlateau used "
            "metrics of its own rank; add MetricAverageCallback()."
        )


def check_equal_optimizers(optimizer: Any, communicator: Communicator) -> None:
    """Check that the optimizer and its options, such as the learning rate, are the same on all ranks. Collective.

    Does nothing where a rank cannot know them: in a step that JAX traces, the rate is a value without a number.

    Raises:
        MismatchError: they differ.
    """
    if found := differing_options([optimizer], communicator):
        raise MismatchError(f"{found}, so their weights would drift apart. Make the same optimizer on all ranks.")


def differing_options(optimizers: Sequence[Any], communicator: Communicator[Any]) -> str:
    """The first option that differs among ranks, as the beginning of a sentence; "" if none is known to. Collective."""
    return next(filter(None, (_differing(of_one, communicator) for of_one in map(options_of, optimizers))), "")


def _differing(own: dict[str, str] | None, communicator: Communicator[Any]) -> str:
    by_rank = communicator.all_gather_object(own, "optimizers")
    if None in by_rank or all(options == by_rank[0] for options in by_rank):
        return ""
    names = dict.fromkeys(name for options in by_rank for name in options)
    name = next(name for name in names if len({options.get(name) for options in by_rank}) > 1)
    values = ", ".join(
        f"rank {rank}: {options.get(name, 'none')}" for rank, options in zip(communicator.ranks, by_rank, strict=True)
    )
    return f"the optimizer's {name} differs among ranks ({values})"


def options_of(optimizer: Any) -> dict[str, str] | None:
    """The class and the options of an optimizer by name, those inside options too; None if they are not known now."""
    try:
        with backend().at_once():
            parts = getattr(optimizer, "optimizers", None)  # of a `MultiOptimizer`
            if parts is None:
                options = optimizer.get_config()
            else:
                options = {f"optimizers.{i}": options_of(part) for i, part in enumerate(parts)}
    except Exception:  # of any framework: a value that is traced has no number, a rate may be any function
        return None
    return {"class": type(optimizer).__name__, **_flattened(options, "")}


def _flattened(options: dict[str, Any], prefix: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in options.items():
        if isinstance(value, dict):
            found |= _flattened(value, f"{prefix}{name}.")
        elif name not in ("name", "registered_name"):  # which may count the optimizers of a process
            found[prefix + name] = re.sub(" at 0x[0-9a-f]+", "", repr(value))  # of a function
    return found


class SynchronizedStop:
    """Stops all ranks after the same step, and detects epochs of different lengths.

    After every step and every epoch the ranks exchange whether any of them wants to stop, in a reduction of 40 bytes.
    It also tells whether a rank is to leave, or others wait to join. It costs little, because the averaging has just
    synchronized the ranks.

    Between two steps a rank may also ask the others, which come to the next exchange, to take part in something.

    Args:
        communicator: must have no other use.
        take_part: called on the ranks that a request reaches, with its number.
        tell: lets ranks that wait for this one in whatever `fit` calls raise this error.
    """

    _STEP, _EPOCH = 0, 1

    def __init__(
        self,
        communicator: Communicator,
        take_part: Callable[[int], None] | None = None,
        tell: Callable[[MismatchError], None] | None = None,
    ) -> None:
        self._communicator, self._take_part, self._tell = communicator, take_part, tell
        self._steps = 0
        #: The text of the error that this raised, "" if none. The error itself would keep the frames of `fit` alive.
        self.mismatch = ""

    def after_step(self, model: Any, batch: int) -> bool:
        """Set `model.stop_training` on all ranks if any rank has set it. Collective.

        Returns:
            Whether any rank was told to leave, or sees others that wait to join.

        Raises:
            MismatchError: another rank has ended its epoch.
        """
        self._steps = batch + 1
        return self._exchange(model, self._STEP)

    def after_epoch(self, model: Any) -> bool:
        """Do the same at the end of an epoch. Collective.

        Raises:
            MismatchError: another rank has not ended its epoch.
        """
        wants_change = self._exchange(model, self._EPOCH)
        self._steps = 0
        return wants_change

    def request(self, number: int) -> None:
        """Make all other ranks take part in what has this number, counted from 1. Collective, as the others' exchange.

        Returns when they are about to. If ranks ask for different things at once, all take part in each.
        """
        while (found := self._reduced([0, self._STEP, -self._STEP, 0, number])[4]) != number:
            self._serve(found)

    def _serve(self, number: int) -> None:
        assert self._take_part is not None
        self._take_part(number)

    def _reduced(self, flags: list[int]) -> list[int]:
        array = np.array(flags, np.int64)
        with purpose("comparison of steps"):
            self._communicator.all_reduce(HostMemory(array, "int64"), Op.MAX)
        found: list[int] = array.tolist()
        return found

    def _exchange(self, model: Any, point: int) -> bool:
        # max(-point) is -min(point), so one reduction shows whether all ranks are at the same point.
        flags = [int(model.stop_training), point, -point, int(current().elastic.wants_change), 0]
        where = f"has {'ended its epoch after' if point == self._EPOCH else 'taken'} {self._steps} steps"
        with self._same_step(where):
            while (found := self._reduced(flags))[4]:
                self._serve(found[4])
            stop, largest, negated_smallest, wants_change, _ = found
            if largest != -negated_smallest:
                raise self._unequal(where)
        if stop:
            model.stop_training = True
        return bool(wants_change)

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
            # Another rank may have found it first, told this one, or be gone.
            if not _is_between_steps(str(error)) and _UNEQUAL not in str(error):
                raise
            raise self._unequal(where) from error

    def _unequal(self, where: str) -> MismatchError:
        self.mismatch = (
            f"{_UNEQUAL}: this rank {where}, and another rank is elsewhere. Probably they have unequal numbers of "
            "batches: give every rank the same amount of data, as ring_plugins.keras.shard does, or pass "
            "steps_per_epoch to fit(). Otherwise a condition in the training step is true on some ranks only."
        )
        error = MismatchError(self.mismatch)
        if self._tell is not None:
            self._tell(error)
        return error


#: Names of communicators of which all operations stand between steps, and the beginnings of those in steps.
STOP, FIT = "stop", "fit"
_IN_STEPS = ("gradients", "sharded updates", "batch normalization")
_UNEQUAL = "epochs differ in length among ranks"


def _is_between_steps(deadlock: str) -> bool:
    """Whether a rank waits for others that have ended their step or epoch, or the reverse, in operations of ours."""
    names = re.findall(r"waits for rank \d+ in ([^:]+):", deadlock)
    between = [name for name in names if name in (STOP, FIT)]
    return bool(between) and all(name in between or name.startswith(_IN_STEPS) for name in names)


@functools.lru_cache(maxsize=1)
def warn_of_gpu_copies(rank: int, is_compressed: bool = False) -> None:
    """Warn once, on rank 0, if gradients leave the GPU to be averaged.

    On torch, NCCL reduces them on the GPU. On TensorFlow and JAX it does so only on request, since these paths have
    never run on a GPU (`backends/tensorflow_device.py`, `backends/jax_device.py`), and without compression.
    """
    backend_name = keras.backend.backend()
    switch = {"tensorflow": config.TENSORFLOW_NCCL, "jax": config.JAX_NCCL}.get(backend_name)
    if switch is None or (switch.get() and not is_compressed) or rank != 0 or not _computes_on_gpus(backend_name):
        return
    warning = (
        f"ring_plugins averages gradients of the {backend_name} backend in CPU memory: each step copies all of them "
        "from the GPU and back (twice over PCIe: 10 ms or more per step for 100 MB of gradients at 20 GB/s). "
        f"KERAS_BACKEND=torch averages them on the GPUs. {switch.name}=1 does so on this backend too, without "
        "compression, but has not been tried on a GPU yet."
    )
    if backend_name == "jax":
        warning += " On one host with several GPUs, keras.distribution.DataParallel keeps them there as well."
    warnings.warn(warning, stacklevel=2)


def _computes_on_gpus(backend_name: str) -> bool:
    if backend_name == "jax":
        import jax

        return str(jax.default_backend()) == "gpu"
    import tensorflow as tf

    return bool(tf.config.list_physical_devices("GPU"))  # logical devices would initialize TensorFlow here


def all_use_nccl(is_here: bool, framework: str, variable: str, communicator: Communicator) -> bool:
    """Whether NCCL averages a framework's gradients on all ranks. Collective.

    Args:
        is_here: whether this rank requests that and has a GPU.
        framework, variable: their names, for the error.
        communicator: communicator of all ranks.

    Raises:
        MismatchError: some ranks do, and others do not.
    """
    where = communicator.all_gather_object(is_here, "choice of NCCL")
    if len(set(where)) > 1:
        lacking = [rank for rank, is_there in zip(communicator.ranks, where, strict=True) if not is_there]
        raise MismatchError(
            f"{name_ranks(lacking)}: no GPU for {framework}, or no {variable}=1, unlike other ranks. Set the variable "
            "on all ranks or on none, and give each rank a GPU."
        )
    return all(where)


def _check_equal(value: Any, communicator: Communicator, problem: str, remedy: str) -> None:
    """Raise MismatchError with every rank's value if they differ. Collective."""
    values = communicator.all_gather_object(value, "arguments")
    if not all_equal(values):
        by_rank = ", ".join(f"rank {rank}: {value}" for rank, value in zip(communicator.ranks, values, strict=True))
        raise MismatchError(f"{problem} ({by_rank}). {remedy}")
