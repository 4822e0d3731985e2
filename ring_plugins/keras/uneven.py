"""A `fit` of ranks with different numbers of batches, or batches of different sizes.

**Problem.** A rank that has run out of data ends its epoch, and the others wait for its gradients. And the mean of the
ranks' gradients weighs a sample of a small batch more than one of a large batch.

**Here** a rank that has run out takes part in the steps of the others, to the end of the longest. It runs the step on
its last batch again, with a loss that is multiplied by zero, and nothing of that counts: metrics and the moving
statistics of BatchNormalization are what they were before. So each rank runs the same collectives in the same order,
whatever a step calls (synchronized normalization, sharded optimizers), and makes each update itself: schedules,
callbacks and checkpoints see the same steps on all ranks.

Whether a rank has another batch travels with the exchange behind each step (`SynchronizedStop`), and the number of
samples of each batch with its gradients. The loss is multiplied by the batch's part of a full batch, in `scale_loss`,
which Keras's steps call behind their metrics; the averages are divided by the samples that came (`HostBuckets`, and on
torch the averager's `checks.weight`). Where all batches are full, nothing is multiplied.

Considered and rejected: to wait and take over the weights at the end, as `ring_plugins.torch.join` does. Compiled steps
with collectives in their forward pass would wait for the rank all the same, and callbacks would see fewer steps there.
Sample weights of zero: metrics count batches whatever their weights.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

from ring_plugins.core.base.errors import MismatchError, name_ranks
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.world import current
from ring_plugins.keras.averaging import GradientAveraging, make_train_function
from ring_plugins.keras.backends import BatchShare, backend
from ring_plugins.keras.batch_norm import synchronizes, uncounted
from ring_plugins.keras.consistency import all_equal, by_rank
from ring_plugins.keras.patches import Patch, replaced
from ring_plugins.keras.running_fit import argument_of_fit, enclosing_list
from ring_plugins.keras.shard import has_equal_parts, is_empty, order_of
from ring_plugins.keras.state import optimizers_of, value_of

_EQUAL = "Give every rank the same amount of data, as ring_plugins.keras.shard does, or pass steps_per_epoch."


class UnevenData:
    """What a `fit` does where ranks have different numbers of batches. Construction is collective.

    Args:
        callback: the `BroadcastCallback` whose `on_train_begin` is running.
        communicator: of the ranks.
        left: how many batches this rank has in an epoch that goes on in its middle, None if it begins with its first.

    Attributes:
        others_have: whether any rank has, as of the last exchange.
        is_filling: whether the step of now does not count on this rank.

    Raises:
        MismatchError: the numbers differ, and ranks cannot be joined.
    """

    def __init__(self, callback: Any, communicator: Communicator[Any], left: int | None = None) -> None:
        self._model, self.is_filling, self.others_have = callback._model, False, False
        self._iterator, self._done = argument_of_fit("epoch_iterator"), 0
        self._patches, self._ahead = list[Patch](), _Ahead(iter(()))
        self._filler: Any = None
        self._limit = float("inf")  # of steps in this epoch
        self._params = callback.params
        own, size, count, hindrance = (callback.params or {}).get("steps"), None, None, _why_even(callback)
        self._data, self._has_had_all = argument_of_fit("x"), left == 0
        self._is_empty = is_empty(self._data)
        if self._iterator is None:
            hindrance = hindrance or "a CallbackList of the script's own keeps fit() from being found"
        else:
            adapter = self._iterator.data_adapter
            size, count = batch_size_of(adapter, self._data), _number_of_batches(adapter)
            own, count = (0, 0) if self._is_empty else (own, count)
        last = None if self._iterator is None else _last_size(self._iterator.data_adapter, self._data)
        is_known = own is not None or self._iterator is None or has_equal_parts(self._data)
        told = communicator.all_gather_object((own, size, count, hindrance, left, last, is_known), "steps per epoch")
        steps, sizes, counts, why, rests, lasts, known = zip(*told, strict=True)
        differ = not all_equal(steps) or not all_equal(rests)
        self._is_uneven = not any(why) and (differ or not all_equal(counts) or None in counts)
        if differ and any(why):
            numbers, of = (steps, "per epoch") if all_equal(rests) else (rests, "in the rest of the epoch")
            raise MismatchError(
                f"ranks would take different numbers of steps {of} ({by_rank(numbers, communicator.ranks)}), and "
                f"{next(filter(None, why))}. {_EQUAL}"
            )
        if any(why) and callback.uneven == "join" and callback.average_gradients:
            _check_even(next(filter(None, why)), known, lasts, communicator.ranks)
        self.full = None if any(why) else 1 if None in sizes else max(sizes)
        self._counts_samples, self._some_are_empty = None not in sizes, 0 in steps
        if self._is_uneven:
            self._keras_steps = self._iterator._enumerate_iterator
            self._patches.append(Patch(self._iterator, _enumerate_iterator=self._steps))
        if self._is_uneven and None not in steps:
            callback.params["steps"] = max(steps)
            callbacks = enclosing_list(callback)
            for one in [] if callbacks is None else callbacks.callbacks:
                one.set_params(callback.params)

    def may_go_on(self, batch: int, others_have: bool) -> bool:
        """Whether this epoch has steps behind this one, on any rank."""
        steps = (self._params or {}).get("steps")
        return others_have if self._is_uneven else steps is None or batch + 1 < steps

    def share_logs(self, logs: dict[str, Any] | None, communicator: Communicator[Any]) -> None:
        """Give ranks that had no samples in an epoch another's logs of it, instead of zeros. Collective."""
        if not self._some_are_empty or logs is None:
            return
        own = {name: _plain(value) for name, value in logs.items() if not name.startswith("val_")}
        told = communicator.all_gather_object(None if self._is_empty else own, "logs")
        if self._is_empty:
            found: dict[str, Any] = next(filter(None, told), {})
            logs.update({name: found[name] for name in own if name in found})

    @property
    def has_more(self) -> bool:
        """Whether this rank has another batch in this epoch."""
        return self._is_uneven and not self.is_filling and self._done < self._limit and self._ahead.has_next()

    # Weights ------------------------------------------------------------------------------------------

    def install(self, averagings: Sequence[GradientAveraging]) -> None:
        """Let batches count by their samples, and steps go on until no rank has any."""
        if self.full is None:
            return
        model, step = self._model, self._model.train_step
        shares = [BatchShare(self.full, self._samples) for _ in averagings]
        for averaging, share in zip(averagings, shares, strict=True):
            scale = functools.partial(_scaled_loss, averaging, share, averaging.optimizer.scale_loss)
            self._patches.append(Patch(averaging.optimizer, scale_loss=scale))
            averaging.share = share

        @backend().opaque
        def take(data: Any) -> None:
            for share in shares:
                share.take(data)

        def step_of() -> Callable[..., Any]:
            def weighed(*arguments: Any) -> Any:
                take(arguments[-1])
                return step(*arguments)

            return weighed

        # Two functions, since JAX knows what it has compiled by the function.
        self._step_of_filler = step_of()
        self._patches.append(Patch(model, train_step=step_of()))
        normal = [one for one in model._flatten_layers() if isinstance(one, keras.layers.BatchNormalization)]
        own = [layer for layer in normal if not synchronizes(layer)]  # others' statistics are those of all ranks
        self._kept = [variable for layer in own for variable in layer.non_trainable_variables]

    def _samples(self, data: Any) -> Any:
        """How many samples count in a batch: a number, or while TensorFlow traces a tensor."""
        if self.is_filling or not self._counts_samples:
            return int(not self.is_filling)
        first = _first_array(data)
        return self.full if first is None else backend().batch_size(first)

    def remove(self, averagings: Sequence[GradientAveraging]) -> None:
        """Undo everything."""
        for patch in reversed(self._patches):
            patch.restore()
        self._patches = []
        for averaging in averagings:
            averaging.share = None

    # Steps --------------------------------------------------------------------------------------------

    def _steps(self) -> Iterator[tuple[int, int, Any]]:
        """The steps of an epoch on this rank, and behind them those of ranks that have more batches."""
        iterator, self._done = self._iterator, 0
        self._limit = iterator.steps_per_epoch or iterator._num_batches or float("inf")
        self._is_empty = self._has_had_all or is_empty(self._data)
        self._has_had_all = False
        if self._is_empty:  # what it has instead does not count
            self._limit = 0
        for step, end, source in self._keras_steps():
            if self._ahead.source is not source:
                self._ahead = _Ahead(source)
            if not self._ahead.has_next():
                if iterator.steps_per_epoch:
                    iterator._interrupted_warning()
                iterator._current_iterator = None
                iterator.data_adapter.on_epoch_end()
                break
            if self._is_empty:
                self._ahead.last = next(self._ahead)
                continue
            self._done += 1
            yield step, end, self._ahead
        step = self._done
        while (self._done and self.others_have) or (self._is_empty and (step == 0 or self.others_have)):
            self.is_filling = True
            try:
                yield step, step, iter([self._ahead.last])
                step += 1
            finally:
                self.is_filling = False

    def stepping(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """A train function that runs this one for batches that count, and else one of its own."""
        if not self._is_uneven or self.full is None:
            return step
        logs: Any = None

        @functools.wraps(step)
        def run(*arguments: Any) -> Any:
            nonlocal logs
            is_stateful = len(arguments) == 1  # on JAX a step gets the state and returns it
            if not self.is_filling:
                result = step(*arguments)
                logs = result if is_stateful else result[0]
                return result
            with replaced(self._model, train_step=self._step_of_filler), uncounted():
                if self._filler is None:
                    with replaced(self._model, train_function=None):
                        make_train_function(self._model)
                        self._filler = self._model.train_function
                if is_stateful:
                    with self._uncounted():
                        result = self._filler(*arguments)
                    return result if logs is None else logs
                return self._with_counted(logs, *arguments)

        return run

    @contextlib.contextmanager
    def _uncounted(self) -> Iterator[None]:
        variables = [*self._model.metrics_variables, *self._kept]
        values = [value_of(variable) for variable in variables]
        yield
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)

    def _with_counted(self, logs: Any, state: Any, iterator: Any) -> tuple[Any, Any]:
        """Logs and state after a step on JAX, with the metrics and moving statistics that they had before."""
        kept = set(map(id, self._kept))
        is_kept = [id(variable) in kept for variable in self._model.non_trainable_variables]
        copies = [np.array(value) for value in state[1]], [np.array(value) for value in state[3]]  # JAX reuses theirs
        own, (trainable, others, optimizer, _) = self._filler(state, iterator)
        others = [
            keras.ops.convert_to_tensor(before) if keeps else after
            for keeps, before, after in zip(is_kept, copies[0], others, strict=True)
        ]
        metrics = [keras.ops.convert_to_tensor(value) for value in copies[1]]
        return own if logs is None else logs, (trainable, others, optimizer, metrics)


class _Ahead:
    """An iterator that knows whether there is more.

    Attributes:
        source: as given.
        last: what was last taken.
    """

    def __init__(self, source: Any) -> None:
        self.source, self.last, self._items, self._next = source, None, iter(source), list[Any]()

    def __getattr__(self, name: str) -> Any:  # TensorFlow's iterators say what their elements are like
        return getattr(self.source, name)

    def has_next(self) -> bool:
        if not self._next:
            try:
                self._next.append(next(self._items))
            except StopIteration:
                return False
        return True

    def __iter__(self) -> _Ahead:
        return self

    def __next__(self) -> Any:
        if not self.has_next():
            raise StopIteration
        self.last = self._next.pop()
        return self.last


def _scaled_loss(averaging: GradientAveraging, share: BatchShare, scale: Callable[[Any], Any], loss: Any) -> Any:
    """Replaces an optimizer's `scale_loss`."""
    if averaging.exchange is not None and share.samples is not None:
        share.is_used = True
        loss = share.of(loss)
        averaging.exchange.weigh(share)
        share.data = None
    return scale(loss)


def _plain(value: Any) -> Any:
    array = np.asarray(keras.ops.convert_to_numpy(value))
    return array if array.ndim else array.item()


def _first_array(data: Any) -> Any:
    """The first array of a batch of any structure that has a dimension, None if none has."""
    return next((leaf for leaf in keras.tree.flatten(data) if _has_rows(leaf)), None)


def _has_rows(leaf: Any) -> bool:
    shape = getattr(leaf, "shape", None)
    if shape is None or getattr(shape, "rank", 0) is None:  # TensorFlow may not know yet how many dimensions there are
        return shape is not None
    return len(shape) > 0


def batch_size_of(adapter: Any, data: Any) -> int | None:
    """Samples of a full batch, None if that is not known."""
    size = adapter.batch_size
    # Keras 3.15.1, data_adapters: what these have read, or read, to know the shapes of batches.
    known = getattr(adapter, "_first_batches", None) or ([data[0]] if isinstance(data, keras.utils.PyDataset) else [])
    if size is None and known and (first := _first_array(known[0])) is not None:
        size = first.shape[0]
    pending = [data]
    while size is None and pending:  # TensorFlow 2.21, data/ops/batch_op.py
        part = pending.pop()
        pending.extend(part._inputs() if hasattr(part, "_inputs") else ())
        size = getattr(part, "_batch_size", None)
    return None if size is None else int(size)


def _why_even(callback: Any) -> str:
    """Why all ranks must have equally many batches; "" if they need not."""
    if callback.uneven == "error":
        return 'uneven="error" was passed to BroadcastCallback'
    if not callback.average_gradients:
        return "average_gradients=False leaves each rank to itself"
    if current().replaces:
        return 'with on_failure="replace" a process may join, which does not know how many the others have'
    for one in optimizers_of(callback._model):
        if (passes := int(getattr(one, "gradient_accumulation_steps", None) or 1)) > 1:
            return f"gradient_accumulation_steps={passes} updates after as many batches of equal size on all ranks"
    if (steps := callback._model.steps_per_execution) > 1:
        return f"steps_per_execution={steps} makes steps in which no rank can run out of data"
    switch = backend().nccl
    if switch is not None and switch.get() and backend().has_gpus():
        return f"{switch.name}=1 averages on GPUs"
    return ""


def _check_even(why: str, known: Sequence[bool], lasts: Sequence[int | None], ranks: Sequence[int]) -> None:
    """Check that ranks have equally many batches of equal sizes, as far as that can be known before the first step.

    Raises:
        MismatchError: it is not known, or not so.
    """
    if unknown := [rank for rank, is_known in zip(ranks, known, strict=True) if not is_known]:
        raise MismatchError(
            f"{name_ranks(unknown)}: how many batches x has is not known before the end of an epoch, and {why}. Pass "
            "steps_per_epoch to fit(), for which every rank has enough batches."
        )
    if not all_equal(lasts):
        raise MismatchError(
            f"the last batches of an epoch differ in size among ranks ({by_rank(lasts, ranks)}; None is a full one), "
            f"so samples would not count alike, and {why}. Give every rank the same amount of data, as "
            "ring_plugins.keras.shard does."
        )


def _last_size(adapter: Any, data: Any) -> int | None:
    """Samples of the last batch, None if it is a full one, or that is not known."""
    if (order := order_of(data)) is not None:
        return order.last_size
    with contextlib.suppress(NotImplementedError, TypeError, AttributeError):  # of samplers without a length
        found: int | None = adapter.partial_batch_size
        return found or None
    return None


def _number_of_batches(adapter: Any) -> float | None:
    """How many there are before the data ends, None if that is not known."""
    if adapter.num_batches is None and hasattr(adapter, "_dataset") and hasattr(adapter._dataset, "cardinality"):
        return float("inf") if int(adapter._dataset.cardinality()) == -1 else None  # TensorFlow's number for infinite
    found: float | None = adapter.num_batches
    return found
