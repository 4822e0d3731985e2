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
torch the averager's `checks.weight`). Where all batches are full, nothing is multiplied. An optimizer that accumulates
averages the sum of several batches, of which each has its own number of samples, and what NCCL has averaged stays on
the GPU: there the ranks sum these numbers before each step, and multiply the loss by what is the batch's weight in the
mean over ranks.

Considered and rejected: to wait and take over the weights at the end, as `ring_plugins.torch.join` does. Compiled steps
with collectives in their forward pass would wait for the rank all the same, and callbacks would see fewer steps there.
Sample weights of zero: metrics count batches whatever their weights.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.arrays.memory import HostMemory
from ring_plugins.core.base.errors import MismatchError, name_ranks
from ring_plugins.core.base.types import Array
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.collectives.fingerprint import purpose
from ring_plugins.core.world import current
from ring_plugins.keras.averaging import GradientAveraging, make_train_function
from ring_plugins.keras.backends import BatchShare, backend
from ring_plugins.keras.batch_norm import synchronizes, uncounted
from ring_plugins.keras.consistency import all_equal, by_rank
from ring_plugins.keras.job import members
from ring_plugins.keras.patches import Patch, replaced
from ring_plugins.keras.running_fit import argument_of_fit, enclosing_list
from ring_plugins.keras.shard import has_equal_parts, is_empty, order_of
from ring_plugins.keras.state import accumulation_steps, optimizers_of, value_of


class _Told(NamedTuple):
    """What a rank tells the others of its data.

    Attributes:
        steps: of an epoch, None if nobody knows how many there are.
        size: samples of a full batch, None if that is not known.
        batches: before the data ends, None if that is not known.
        why: why all ranks must have equally many batches, "" if they need not.
        left: batches that are left of the first epoch, None if it begins with its first.
        last: samples of the last batch, None if it is a full one, or that is not known.
        is_known: whether it is known before the first step that ranks have equally many, or how many they have.
        knows_last: whether it is known how many samples the last batch has.
    """

    steps: int | None
    size: int | None
    batches: float | None
    why: str
    left: int | None
    last: int | None
    is_known: bool
    knows_last: bool


_EQUAL = "Give every rank the same amount of data, as ring_plugins.keras.shard does, or pass steps_per_epoch."


class UnevenData:
    """What a `fit` does where ranks have different numbers of batches. Construction is collective.

    Args:
        callback: the `BroadcastCallback` whose `on_train_begin` is running.
        communicator: of the ranks.
        left: how many batches this rank has in an epoch that goes on in its middle, None if it begins with its first.

    Attributes:
        others_have: how many batches the rank with the most has for the next call of the train function, as of the last
            exchange.
        is_filling: whether the step of now does not count on this rank.

    Raises:
        MismatchError: the numbers differ, and ranks cannot be joined.
    """

    def __init__(self, callback: Any, communicator: Communicator[Any], left: int | None = None) -> None:
        self._callback, self._model, self._communicator = callback, callback._model, communicator
        self.is_filling, self.others_have = False, 0
        self._iterator, self._done = argument_of_fit("epoch_iterator"), 0
        self._patches, self._ahead = list[Patch](), _Ahead(iter(()))
        self._filler: Any = None
        self._limit = float("inf")  # of steps in this epoch
        self._own = self._missing = 0  # batches of this rank, and of others beyond these, in this call
        self._data, self._has_had_all = argument_of_fit("x"), left == 0
        self._is_empty = is_empty(self._data)
        #: Whether batches are weighed before the step, since averages are sums of several, or NCCL's.
        self._weighs_before = _uses_nccl() or _accumulates(self._model)
        self._weights_of: Communicator[Any] | None = None
        self._shares: list[BatchShare] = []
        steps, why = (callback.params or {}).get("steps"), _why_even(callback)
        size: int | None = None
        count: float | None = None
        last, knows_last = None, False
        if self._iterator is None:
            why = why or "a CallbackList of the script's own keeps fit() from being found"
        else:
            adapter = self._iterator.data_adapter
            size, count = batch_size_of(adapter, self._data), _number_of_batches(adapter)
            steps, count = (0, 0) if self._is_empty else (steps, count)
            last, knows_last = _last_size(adapter, self._data), _knows_last_size(adapter, self._data)
        is_known = steps is not None or self._iterator is None or has_equal_parts(self._data)
        self._told = _Told(steps, size, count, why, left, last, is_known, knows_last)
        self.full: int | None = None
        self._is_uneven, self._replaces, self._has_agreed = False, current().replaces and not why, False
        self.agree()
        if self._is_uneven or self._replaces:
            self._keras_steps = self._iterator._enumerate_iterator
            self._patches.append(Patch(self._iterator, _enumerate_iterator=self._steps))

    def agree(self) -> None:
        """Find out what data the ranks have, when a `fit` begins, and when a process has joined. Collective.

        Raises:
            MismatchError: see the class.
        """
        own = self._told, self._is_uneven, self.full if self._has_agreed else None
        told, were_uneven, fulls = zip(*self._communicator.all_gather_object(own, "steps per epoch"), strict=True)
        steps, sizes, counts, why, rests, lasts, known, knows_last = zip(*told, strict=True)
        callback, ranks = self._callback, self._communicator.ranks
        differ = not all_equal(steps) or not all_equal(rests)
        self._is_uneven = any(were_uneven) or (not any(why) and (differ or not all_equal(counts) or None in counts))
        if differ and any(why):
            numbers, of = (steps, "per epoch") if all_equal(rests) else (rests, "in the rest of the epoch")
            raise MismatchError(
                f"ranks would take different numbers of steps {of} ({by_rank(numbers, ranks)}), and "
                f"{next(filter(None, why))}. {_EQUAL}"
            )
        if any(why) and callback.uneven == "join" and callback.average_gradients:
            _check_even(next(filter(None, why)), known, sizes, lasts, ranks)
        are_even = not self._is_uneven and all(knows_last) and all_equal(lasts) and all_equal(sizes)
        if not any(why) and not (self._weighs_before and are_even and not self._replaces):
            # Whoever joins weighs as the others have begun to.
            self.full = next(filter(None, fulls), 1 if None in sizes else max(sizes))
        self._has_agreed = not current().is_joining  # who joins has been alone until then
        self._counts_samples, self._some_are_empty = None not in sizes, 0 in steps
        for share in self._shares:
            share.full = self.full or 1
        if self._is_uneven and None not in steps:
            callback.params["steps"] = max(steps)
            callbacks = enclosing_list(callback)
            for one in [] if callbacks is None else callbacks.callbacks:
                one.set_params(callback.params)

    def may_go_on(self, batch: int) -> bool:
        """Whether this epoch has steps behind this one, on any rank."""
        steps = (self._callback.params or {}).get("steps")
        return bool(self.others_have) if self._is_uneven else steps is None or batch + 1 < steps

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
    def full_of_single_steps(self) -> int | None:
        """Samples of a full batch, None if batches do not count by them, or several belong to one call or update."""
        return None if self._weighs_before or self._model.steps_per_execution > 1 else self.full

    @property
    def more(self) -> int:
        """How many batches this rank has for the next call of the train function in this epoch."""
        if not self._is_uneven:
            return 0
        return self._ahead.count(int(min(self._iterator.steps_per_execution, self._limit - self._done)))

    # Weights ------------------------------------------------------------------------------------------

    def install(self, averagings: Sequence[GradientAveraging]) -> None:
        """Let batches count by their samples, and steps go on until no rank has any."""
        if self.full is None:
            return
        model, step = self._model, self._model.train_step
        self._shares = [BatchShare(self.full, self._samples) for _ in averagings]
        for averaging, share in zip(averagings, self._shares, strict=True):
            scale = functools.partial(_scaled_loss, averaging, share, averaging.optimizer.scale_loss)
            self._patches.append(Patch(averaging.optimizer, scale_loss=scale))
            averaging.share = share
        pairs = zip(averagings, self._shares, strict=True)
        early = [share for one, share in pairs if one.accumulation_steps > 1 or _uses_nccl()]
        if early:
            self._weights_of = members(averagings[0].settings.group).new_communicator("gradients' weights")
        for share in early:
            share.weigh = self._weight

        @backend().opaque
        def take(data: Any) -> None:
            for share in self._shares:
                share.take(data)
            if early:
                weight = 1.0 if early[0].is_weighed_later else self._weight(early[0].samples)
                for share in early:
                    share.weight = weight

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

    def _weight(self, samples: Any) -> Any:
        """By how much a rank's mean gradient of a batch is to count in the mean over ranks. Collective, in a step."""
        communicator = self._weights_of
        assert communicator is not None

        def exchange(own: Array, _: Array) -> tuple[Array, Array]:
            total = np.array([own], np.float64)
            with purpose("samples of a step"):
                communicator.all_reduce(HostMemory(total, "float64"), Op.SUM)
            weight = float(own) * communicator.size / (total[0] or 1.0)
            return np.array(weight, own.dtype), np.zeros((), own.dtype)

        own = keras.ops.cast(samples, "float32")
        return backend().host_call_with_gradient(exchange, lambda own, *_: own, own, own)

    def remove(self, averagings: Sequence[GradientAveraging]) -> None:
        """Undo everything."""
        for patch in reversed(self._patches):
            patch.restore()
        self._patches, self._shares = [], []
        for averaging in averagings:
            averaging.share = None
        if self._weights_of is not None:
            self._weights_of.close()
            self._weights_of = None

    # Steps --------------------------------------------------------------------------------------------

    def _steps(self) -> Iterator[tuple[int, int, Any]]:
        """The steps of an epoch on this rank, and behind them those of ranks that have more batches.

        With `steps_per_execution`, several belong to a call, which a rank may begin with batches and end without.
        """
        if not self._is_uneven:
            yield from self._keras_steps()
            return
        iterator, self._done = self._iterator, 0
        size, limit = iterator.steps_per_execution, iterator.steps_per_epoch or iterator._num_batches
        self._limit = math.ceil(limit / size) * size if limit else float("inf")
        self._is_empty = self._has_had_all or is_empty(self._data)
        self._has_had_all = False
        if self._is_empty:  # what it has instead does not count
            self._limit = 0
        step = 0
        for _, _, source in self._keras_steps():
            if self._ahead.source is not source:
                self._ahead = _Ahead(source)
            if not self._ahead.count(1):
                if iterator.steps_per_epoch:
                    iterator._interrupted_warning()
                iterator._current_iterator = None
                iterator.data_adapter.on_epoch_end()
                break
            if self._is_empty:
                self._ahead.last = next(self._ahead)
                continue
            self._own = self.more
            self._missing = (self._most() if step == 0 else self.others_have) - self._own
            self._done += self._own
            yield step, step + size - 1, self._ahead
            step += size
        self._own = 0
        while step or self._is_empty:
            self._missing = self._most() if step == 0 else self.others_have
            if not self._missing:
                break
            yield step, step + size - 1, iter([self._ahead.last] * self._missing)
            step += size

    def _most(self) -> int:
        """How many batches the rank with the most has for the first call of an epoch. Collective if that may be more
        than one."""
        if self._iterator.steps_per_execution == 1:
            return 1
        most = np.array([self._own], np.int64)
        with purpose("comparison of steps"):
            self._communicator.all_reduce(HostMemory(most, "int64"), Op.MAX)
        return int(most[0])

    def stepping(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """A train function that runs this one for batches that count, and else one of its own."""
        if self.full is None or not (self._is_uneven or self._replaces):
            return step
        logs: Any = None

        @functools.wraps(step)
        def run(*arguments: Any) -> Any:
            nonlocal logs
            *state, _ = arguments  # on JAX a step gets the state and returns it
            result: Any = None
            if self._own or not self._is_uneven:
                result = step(*arguments)
                logs = result if not state else result[0]
                if not self._is_uneven or not self._missing:
                    return result
                # Behind its own batches, the function has ended with their iterator.
                state = [] if not state else [result[1]]
                arguments = *state, iter([self._ahead.last] * self._missing)
            self.is_filling = True
            try:
                return self._fill(logs, *arguments)
            finally:
                self.is_filling = False

        return run

    def _fill(self, logs: Any, *arguments: Any) -> Any:
        """Take part in steps of others; returns what a train function does, with these logs."""
        with replaced(self._model, train_step=self._step_of_filler), uncounted():
            if self._filler is None:
                with replaced(self._model, train_function=None):
                    make_train_function(self._model)
                    self._filler = self._model.train_function
            if len(arguments) > 1:
                return self._with_counted(logs, *arguments)
            with self._uncounted():
                result = self._filler(*arguments)
            return result if logs is None else logs

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
        self.source, self.last, self._items, self._next = source, None, iter(source), deque[Any]()

    def __getattr__(self, name: str) -> Any:  # TensorFlow's iterators say what their elements are like
        return getattr(self.source, name)

    def count(self, most: int) -> int:
        """How many there are, up to so many, which it reads."""
        while len(self._next) < most:
            try:
                self._next.append(next(self._items))
            except StopIteration:
                break
        return min(len(self._next), most)

    def __iter__(self) -> _Ahead:
        return self

    def __next__(self) -> Any:
        if not self.count(1):
            raise StopIteration
        self.last = self._next.popleft()
        return self.last


def _scaled_loss(averaging: GradientAveraging, share: BatchShare, scale: Callable[[Any], Any], loss: Any) -> Any:
    """Replaces an optimizer's `scale_loss`."""
    exchange = averaging.exchange
    if share.samples is not None and (share.weight is not None or exchange is not None):
        share.is_used = True
        loss = share.of(loss)
        if share.weight is None and exchange is not None:
            exchange.weigh(share)
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
    if current().recovers and _accumulates(callback._model):  # the sums of those that are left were weighed beside its
        return "a rank may be lost between the steps whose gradients are accumulated (on_failure)"
    return ""


def _accumulates(model: Any) -> bool:
    return any(accumulation_steps(one) > 1 for one in optimizers_of(model))


def _uses_nccl() -> bool:
    switch = backend().nccl
    return switch is not None and switch.get()


def _check_even(
    why: str,
    known: Sequence[bool],
    sizes: Sequence[int | None],
    lasts: Sequence[int | None],
    ranks: Sequence[int],
) -> None:
    """Check that ranks have equally many batches of equal sizes, as far as that can be known before the first step.

    Raises:
        MismatchError: it is not known, or not so.
    """
    if unknown := [rank for rank, is_known in zip(ranks, known, strict=True) if not is_known]:
        raise MismatchError(
            f"{name_ranks(unknown)}: how many batches x has is not known before the end of an epoch, and {why}. Pass "
            "steps_per_epoch to fit(), for which every rank has enough batches."
        )
    differing = [("batches", sizes, "unknown")] if len(set(sizes) - {None}) > 1 else []
    if not all_equal(lasts):
        differing.append(("the last batches of an epoch", lasts, "a full one"))
    for what, samples, none in differing:
        raise MismatchError(
            f"{what} differ in size among ranks ({by_rank(samples, ranks)}; None is {none}), "
            f"so samples would not count alike, and {why}. Give every rank the same amount of data, as "
            "ring_plugins.keras.shard does."
        )


def _last_size(adapter: Any, data: Any) -> int | None:
    """Samples of the last batch, None if it is a full one, or that is not known."""
    if (order := order_of(data)) is not None:
        return order.last_size
    with contextlib.suppress(NotImplementedError, TypeError, AttributeError):  # of samplers without a length
        found: int | None = adapter.partial_batch_size
        if (loader := getattr(adapter, "_dataloader", None)) is not None:  # Keras forgets the sampler, and drop_last
            found = 0 if loader.drop_last else len(loader.sampler) % loader.batch_size
        return found or None
    return None


def _knows_last_size(adapter: Any, data: Any) -> bool:
    """Whether None from `_last_size` means that the last batch is a full one."""
    # Keras 3.15.1, data_adapters: what those of arrays, of a DataLoader with a length and of a tf.data.Dataset have.
    if order_of(data) is not None or getattr(adapter, "_partial_batch_size", None) is not None:
        return True
    first = _first_array(getattr(getattr(adapter, "_dataset", None), "element_spec", ()))
    return first is not None and first.shape[0] is not None  # of batch(drop_remainder=True)


def _number_of_batches(adapter: Any) -> float | None:
    """How many there are before the data ends, None if that is not known."""
    if adapter.num_batches is None and hasattr(adapter, "_dataset") and hasattr(adapter._dataset, "cardinality"):
        return float("inf") if int(adapter._dataset.cardinality()) == -1 else None  # TensorFlow's number for infinite
    found: float | None = adapter.num_batches
    return found
