"""A `fit` whose ranks have different numbers of batches goes on to the end of the longest.

**Problem.** A rank that runs out of batches leaves the epoch, and with it every collective of the others: averages of
gradients, synchronized batch norm and metrics, steps of sharded optimizers, and whatever the script calls in its steps.

**Idea.** It stays in the loop and runs its last batch again, as often as the others have batches, and nothing of that
counts: its loss is multiplied by zero, its metrics and buffers are put back, what it logs weighs nothing. So every
collective finds its partners, and Lightning counts the same steps on all ranks. Where batches begin, the ranks tell
each other where they are anyway (`same_loop`); there they also tell who has a batch, who has another one behind it, and
of how many samples.

**Weights.** With a DataLoader that has a `batch_size`, the step's gradients weigh all samples alike: a rank's loss, the
mean over its batch, is multiplied by its batch's share of the samples, times the number of ranks. How many samples a
batch has follows from the loader's length: a tensor's first dimension may be another one, such as time. Only where
there is no length, tensors are looked at. With other loaders nobody knows, and ranks that have a batch weigh alike.
Where all batches are equal, nothing is multiplied.

`torch.distributed.algorithms.Join` follows the collectives of its own classes instead, and so rejects synchronized
batch norm and whatever it does not know.

Lightning 2.6.6 has no hook for this: methods of its loops are replaced in the Trainer's own objects, as in `same_loop`.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

import ring_plugins.core.functions as ring
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.groups import Group, communicator_of
from ring_plugins.lightning.process_group import broadcast_object
from ring_plugins.lightning.same_loop import SameLoop
from ring_plugins.torch.sync_batch_norm import uncounted


class Told(NamedTuple):
    """What a rank tells of the batch that it is about to begin.

    Attributes:
        has_batch: whether it has one.
        is_last: whether it has none behind it.
        needs_one: whether it has never had a batch that it could run again.
        samples: in its batch; 0 if that is not known.
    """

    has_batch: bool
    is_last: bool
    needs_one: bool
    samples: int

    def packed(self) -> int:
        """As a number below 2 ** 31."""
        return self.has_batch | self.is_last << 1 | self.needs_one << 2 | self.samples << 3

    @classmethod
    def unpacked(cls, number: int) -> Told:
        """What `packed` returned."""
        return cls(bool(number & 1), bool(number & 2), bool(number & 4), number >> 3)


def weights_of(told: Sequence[Told]) -> list[float]:
    """By rank the factor of its loss, so that the ranks' mean is that of all samples; 1 for all where nothing differs.

    Args:
        told: by rank.
    """
    if all(one.has_batch and one.samples == told[0].samples for one in told):
        return [1.0] * len(told)
    shares = [one.samples if one.has_batch else 0 for one in told]
    if any(one.has_batch and not one.samples for one in told):
        shares = [int(one.has_batch) for one in told]
    return [len(told) * share / sum(shares) for share in shares]


class UnevenData:
    """Lets the ranks of a `fit` go on to the end of the longest.

    Args:
        strategy: its strategy.
        trainer: the Trainer, in ``Strategy.setup``.
        loop: by which ranks tell each other where they are.
        group: the ranks that do, all by default.

    Attributes:
        weight: the factor of this rank's loss in this batch.
        ran_out: whether this rank runs a batch again, which does not count.
        is_logging: whether a value that is being reduced is a batch's.
    """

    rest: int | None = None  # samples that this rank draws in this epoch, if it goes on in its middle

    def __init__(self, strategy: Any, trainer: Any, loop: SameLoop, group: Group | None = None) -> None:
        self._strategy, self._trainer, self._same_loop, self._group = strategy, trainer, loop, group
        self.weight, self.ran_out, self.is_logging = 1.0, False, False
        self._full = 0  # samples of a full batch, if they are known
        self._drawn: int | None = None  # samples of an epoch, if they are known
        self._differ, self._backwards = False, 0  # whether weights of ranks do, and the step's calls of `weighed`
        self._spare: Any = None  # a batch to run again
        self._results: Any = None
        self._setup_data, self._run = trainer.fit_loop.setup_data, trainer.fit_loop.epoch_loop.run
        trainer.fit_loop.setup_data = self._set_up_data
        trainer.fit_loop.epoch_loop.run = self._run_epoch

    def close(self) -> None:
        """Leave the Trainer as it was."""
        vars(self._trainer.fit_loop).pop("setup_data", None)
        vars(self._trainer.fit_loop.epoch_loop).pop("run", None)
        self._follow_logs(False)
        self._spare = None

    # Batches ------------------------------------------------------------------------------------------

    def _set_up_data(self) -> None:
        """Let all ranks count on as many batches as the longest has."""
        loop, trainer = self._trainer.fit_loop, self._trainer
        before, module = loop._combined_loader, trainer.lightning_module
        allowed = module.allow_zero_length_dataloader_with_multiple_devices
        module.allow_zero_length_dataloader_with_multiple_devices = True
        too_short: ValueError | None = None
        try:
            self._setup_data()
        except ValueError as error:  # of an interval that is longer than this rank's epoch, when all else is done
            if not _is_interval_too_long(trainer, loop.max_batches):
                raise
            too_short = error
        finally:
            module.allow_zero_length_dataloader_with_multiple_devices = allowed
        if loop._combined_loader is before or loop._combined_loader is None:
            return
        loaders = loop._combined_loader.flattened
        sizes = [getattr(loader, "batch_size", None) for loader in loaders if isinstance(loader, DataLoader)]
        self._full = (sizes[0] or 0) if len(sizes) == len(loaders) == 1 else 0
        # One that knows where it is goes on in the middle of an epoch by itself.
        has_length = self._full and loaders[0].batch_sampler is not None and not hasattr(loaders[0], "state_dict")
        self._drawn = len(loaders[0].sampler) if has_length and hasattr(loaders[0].sampler, "__len__") else None
        by_rank = ring.all_gather_object(loop.max_batches, group=self._group)
        longest = max(by_rank)
        if too_short is not None and _is_interval_too_long(trainer, longest):
            raise too_short
        if min(by_rank) == longest:
            return
        loop.max_batches, loop._last_train_dl_reload_epoch = longest, trainer.current_epoch
        if isinstance(trainer.val_check_interval, int):
            trainer.val_check_batch = trainer.val_check_interval
        if isinstance(trainer.val_check_interval, float) and longest < float("inf"):
            trainer.val_check_batch = max(1, int(longest * trainer.val_check_interval))
        elif isinstance(trainer.val_check_interval, float):
            trainer.val_check_batch = longest

    def _run_epoch(self, fetcher: Any) -> None:
        # A script that takes batches from an iterator itself is not followed.
        follows = not type(fetcher).__name__.startswith("_DataLoaderIter")
        try:
            self._run(_Fetcher(fetcher, self._next) if follows else fetcher)
        finally:
            self.weight, self.ran_out, self.rest = 1.0, False, None
            self._follow_logs(False)

    def _next(self, fetcher: Any) -> tuple[Any, bool]:
        """The next item of Lightning's, and whether it is the last on all ranks."""
        try:
            item = next(fetcher)
        except StopIteration:
            item = None
        has_batch = item is not None
        samples = self._samples_of(*item[:2]) if has_batch else 0
        own = Told(has_batch, not has_batch or fetcher.done, not has_batch and self._spare is None, samples)
        told = [Told.unpacked(one) for one in self._same_loop.begin_batch(own.packed())]
        if not any(one.has_batch for one in told):
            raise StopIteration
        is_last = all(one.is_last for one in told)
        if any(one.needs_one for one in told):
            source = next(rank for rank, one in enumerate(told) if one.has_batch)
            batch = broadcast_object(item[0] if has_batch else None, source, self._group)
            self._spare = batch if own.needs_one else self._spare
        if has_batch and own.is_last and not is_last:
            self._spare = copy.deepcopy(item[0])  # as it is before the script changes it
        self.ran_out = not has_batch
        weights = weights_of(told)
        self.weight = weights[communicator_of(self._group).rank] if len(told) > 1 else 1.0
        self._differ = weights != [1.0] * len(told)
        self._follow_logs(self.ran_out or self.weight != 1.0)
        if item is None:
            item = copy.deepcopy(self._spare), 0, 0
        return item, is_last

    def _samples_of(self, batch: Any, number: int) -> int:
        """How many samples the batch of this number in its epoch has; 0 if that is not known."""
        drawn = self._drawn if self.rest is None else self.rest
        if drawn is not None:
            return max(0, min(self._full, drawn - number * self._full))
        tensors = [one for one in tree_leaves(batch) if isinstance(one, Tensor)] if self._full else []
        lengths = {len(one) if one.dim() else 0 for one in tensors}
        length = lengths.pop() if len(lengths) == 1 else 0
        return length if length <= self._full else 0

    # What does not count ------------------------------------------------------------------------------

    @contextmanager
    def step(self) -> Iterator[None]:
        """The script's `training_step`; one that does not count leaves metrics, buffers and attributes as they were.

        Raises:
            ArgumentError: on all ranks, the script has called backward itself where losses have weights.
        """
        averager, self._backwards = self._strategy._averager, 0
        passes = averager.steps
        with ExitStack() as stack:
            if self.ran_out:
                stack.enter_context(uncounted())
                stack.enter_context(kept(self._trainer.lightning_module))
            yield
        if self._differ and averager.steps - passes > self._backwards:
            raise ArgumentError(
                "the ranks' batches have different sizes, or some have none, so their losses need weights, but "
                "training_step calls loss.backward(). Call self.manual_backward(loss), or give all ranks equally many "
                "batches of equal size."
            )

    def weighed(self, loss: Tensor) -> Tensor:
        """The loss of which the gradients are computed, for this rank's."""
        self._backwards += 1
        return loss if self.weight == 1 else loss * self.weight

    def _follow_logs(self, follows: bool) -> None:
        """Let what a batch logs weigh as its loss does, from now on or no longer."""
        if self._results is not None:
            vars(self._results).pop("update_metrics", None)
            self._results = None
        if follows:
            self._results = self._trainer.fit_loop.epoch_loop._results
            weigh_logs(self._results, self)


def _is_interval_too_long(trainer: Any, batches: float) -> bool:
    """Whether Lightning rejects an epoch of so many batches; pytorch/loops/fit_loop.py:293."""
    interval, is_within_epochs = trainer.val_check_interval, trainer.check_val_every_n_epoch is not None
    return isinstance(interval, int) and interval > batches and is_within_epochs and trainer.limit_val_batches > 0


def _neutral(meta: Any, value: Tensor) -> Tensor:
    """What does not change a reduction of such values."""
    neutral = float("-inf") if meta.is_max_reduction else float("inf") if meta.is_min_reduction else 0.0
    return torch.full_like(value if value.is_floating_point() else value.float(), neutral)


def weigh_logs(results: Any, by: Any) -> None:
    """Let what a batch logs weigh as the batch does, until `update_metrics` is taken from the results' own attributes.

    Args:
        results: Lightning's.
        by: has `ran_out`, whether this rank's batch does not count, and gets `is_logging` while values are reduced.
    """
    update = results.update_metrics

    def log(key: str, value: Any, batch_size: int) -> None:
        metric = results[key]
        if not metric.is_tensor or "epoch" in metric.meta.fx:
            update(key, value, batch_size)
            return
        if by.ran_out:
            value, batch_size = _neutral(metric.meta, value), 0
        by.is_logging = True
        try:
            update(key, value, batch_size)
        finally:
            by.is_logging = False

    results.update_metrics = log


class _Fetcher:
    """Lightning's fetcher of batches, with those that a rank runs again; everything else is the fetcher's own."""

    def __init__(self, fetcher: Any, following: Callable[[Any], tuple[Any, bool]]) -> None:
        vars(self).update(_fetcher=fetcher, _following=following, done=False)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_fetcher"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["_fetcher"], name, value)

    def __iter__(self) -> _Fetcher:
        iter(vars(self)["_fetcher"])
        return self

    def __next__(self) -> Any:
        item, vars(self)["done"] = vars(self)["_following"](vars(self)["_fetcher"])
        return item


@contextmanager
def kept(module: nn.Module) -> Iterator[None]:
    """Put back what `as_it_is` does."""
    back = as_it_is(module)
    try:
        yield
    finally:
        back()


def as_it_is(module: nn.Module) -> Callable[[], None]:
    """What puts back the metrics, buffers and plain attributes of a module; but not statistics that all ranks compute.

    No tensor is overwritten, since backward may need what the forward has seen.
    """
    metrics, buffers, attributes, known = list[Any](), list[Any](), list[Any](), dict[int, Callable[[], Any]]()
    one: Any
    for one in module.modules():
        if hasattr(one, "_copy_state_dict"):  # of torchmetrics
            metrics.append((one, one._copy_state_dict(), one._update_count))
            continue
        if "SyncBatchNorm" not in type(one).__name__ and "forward" not in vars(one):
            named = [(name, own) for name, own in one._buffers.items() if own is not None]
            buffers += [(one._buffers, name, known.setdefault(id(own), _as_it_is(own))) for name, own in named]
        attributes += [(vars(one), name, _as_it_is(own)) for name, own in vars(one).items() if name not in _OF_TORCH]

    def back() -> None:
        for metric, state, count in metrics:
            for name, value in state.items():
                setattr(metric, name, value)
            metric._update_count, metric._computed = count, None
        for owner, name, before in (*buffers, *attributes):
            owner[name] = before()

    return back


#: Attributes of every module, which have nothing of a script.
_OF_TORCH = frozenset(vars(nn.Module()))
_CHANGEABLE = (Tensor, dict, list, deque, set)


def _as_it_is(value: Any, depth: int = 4) -> Callable[[], Any]:
    """What returns a value as it is now: a container is the same object, with its contents of now."""
    if isinstance(value, Tensor) and not value.requires_grad:
        with torch.inference_mode(False), torch.no_grad():
            clone = value.clone()
        return lambda: value if torch.equal(value, clone) else clone
    if not isinstance(value, (dict, list, deque, set)) or not depth:
        return lambda: value
    now: Any = dict(value) if isinstance(value, dict) else set(value) if isinstance(value, set) else list(value)
    inner: dict[Any, Callable[[], Any]] = {}
    if isinstance(value, dict):
        inner = {key: _as_it_is(one, depth - 1) for key, one in value.items() if isinstance(one, _CHANGEABLE)}
    elif not isinstance(value, set):  # tensors in lists are outputs of steps, which nobody changes
        changeable = [(i, one) for i, one in enumerate(value) if isinstance(one, _CHANGEABLE[1:])]
        inner = {i: _as_it_is(one, depth - 1) for i, one in changeable}

    def before() -> Any:
        for key, one in inner.items():
            now[key] = one()
        value.clear()
        (value.extend if isinstance(value, (list, deque)) else value.update)(now)
        return value

    return before
