"""What a new process needs to go on with a training that other ranks have begun, and where it may join them.

With `on_failure="replace"`, a new process takes the place of a lost rank (core/joining/join.py). It runs the script
from its first line, comes to the training loop, and needs the weights, the optimizer's state, the schedule, and the
place in the data. Only the script knows all that, so it lists them once, before the loop, in a `TrainingState`. When a
rank is lost, the other ranks lose nothing and never go back. So they need not save or restore anything, as Horovod's
elastic states and torchrun's snapshots do. At the end of a step they say that their state is whole; new processes may
join there.

Those by which the job grows (`max_ranks`) join where an epoch begins, since all ranks need other samples from then on.

**Trained parts** are what `state_dict` leaves out (`TrainedParts`). A joiner runs the script only up to the place at
which it waits. The others may have frozen or unfrozen parameters since then, or given an optimizer further groups, as
Lightning's `BackboneFinetuning` does. So these are told by name, and taken over before the optimizers' state is loaded,
which needs the same groups. A module's mode belongs to them: what scripts freeze, they often switch to evaluation, too,
and Lightning has batch normalization no longer track its statistics. So do the buffers that `state_dict()` lacks
(`persistent=False`), such as a count of steps or a mask that `forward` makes.
"""

from __future__ import annotations

import copy
import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from ring_plugins.core.base.errors import MismatchError
from ring_plugins.core.base.log import logger
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.collectives.fingerprint import purpose
from ring_plugins.core.joining.join import if_different
from ring_plugins.core.joining.state_transfer import fails_alone, transfer_state
from ring_plugins.core.joining.training_state import ListedState
from ring_plugins.core.world import current
from ring_plugins.observe.consistency import common_place
from ring_plugins.torch.broadcast import Placeholder
from ring_plugins.torch.device import is_on_gpu
from ring_plugins.torch.gradients import GradientAverager
from ring_plugins.torch.loaders import batches_from, divide_anew, samplers_of
from ring_plugins.torch.order import length_of, position_of, resumed
from ring_plugins.torch.tensor_memory import dense_memory, is_dense

T = TypeVar("T")
#: What `state_dict` has beside the script's own values, whose names do not begin so.
_POSITION = "_position"


@runtime_checkable
class Stateful(Protocol):
    """What torch's modules, optimizers, schedulers and scalers have in common."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


class TrainingState(ListedState):
    """The state of a training; a process that replaces a lost rank gets it from the other ranks.

        state = TrainingState(model=model, optimizer=optimizer, scheduler=scheduler, epoch=0)
        for state.epoch in range(state.epoch, 10):
            sampler.set_epoch(state.epoch)
            for batch in state.batches(loader):
                ...
                optimizer.step()
                state.commit()
            scheduler.step()

    Make only one, since a process joins with the values of one. Create it on all ranks, before the loop and after
    everything that averages or broadcasts. In a replacement, the constructor waits until the other ranks call
    `commit`, and then sets everything to their values.

    It works with any `on_failure`; processes join only with "replace".

    Args:
        state: keyword arguments. Objects with `state_dict` and `load_state_dict` are loaded; anything else must be
            picklable, such as numbers, and becomes an attribute that the script reads and sets.

    Raises:
        ArgumentError: a name is taken by a method or begins with an underscore, or a value cannot be pickled.
        MismatchError: in a replacement, the script has made other optimizers than on the other ranks.
    """

    def __init__(self, **state: Any) -> None:
        super().__init__(state, [name for name, value in state.items() if not isinstance(value, Stateful)])
        self._names = list(state)
        #: Batches of this epoch that are done, and how many it has; 0 and None outside of `batches`.
        self._batch = 0
        self._batches: int | None = None
        #: Where this epoch has gone on, or the next call of `batches` is to go on; and what had been consumed there.
        self._position: dict[str, Any] | None = None
        self._begun = 0
        self._resumes = False
        #: Whether `batches` runs, and over which data; and that of the last one in which `commit` was called.
        self._is_in_epoch, self._data = False, None
        self._loader: Any = None
        self._trained_on: Any = None
        #: Whether there is such data, and the number of shards in the last epoch; a joiner gets the others'.
        self._commits_within, self._shards = False, current().members.shards
        #: Calls of `commit` since a process has last joined.
        self._commits = 0
        if current().is_joining:
            self._join("average gradients and call TrainingState.commit()")
            self._resumes = True

    def state_dict(self) -> dict[str, Any]:
        """All of the state, for a checkpoint, which one rank writes; within `batches` also where in the data ranks are.

        Call it at the end of a step, on all ranks if an optimizer is sharded.
        """
        state = {name: getattr(self, name) for name in self._names}
        found = {name: v.state_dict() if isinstance(v, Stateful) else v for name, v in state.items()}
        if self._loader is not None:
            inner, calls = _inside(self._loader)
            found[_POSITION] = position_of(inner, self._batch, current().shard[1], self._begun)
            if calls is not None:
                found[_POSITION]["calls"] = calls - 1
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a checkpoint, with any number of ranks; the next call of `batches` goes on where it was made.

        Args:
            state_dict: what `state_dict` returned. Values of other names stay as they are.
        """
        for name, value in state_dict.items():
            if name in self._names:
                mine = getattr(self, name)
                mine.load_state_dict(value) if isinstance(mine, Stateful) else setattr(self, name, value)
        self._position = state_dict.get(_POSITION)

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Iterate over a loader; a process that joined in the middle of an epoch begins with the next batch.

        Behind `load_state_dict`, the first call goes on in the middle of the epoch in which the checkpoint was made.
        With another number of ranks, they divide what is left, if a `DistributedSampler` or an `ElasticSampler` chooses
        the samples.

        Args:
            loader: must have the same number of batches on all ranks, even after a loss: make its sampler once, with
                `ring.size()` and `ring.rank()` as they are at the start. If the job grows, a `DistributedSampler` gets
                the new number of ranks here, and an `ElasticSampler` follows.

        Raises:
            MismatchError: in a process that has joined, `loader` has another number of batches than on the other ranks;
                or on all ranks, if the numbers differ since the job has grown.
        """
        data: Any = getattr(loader, "dataset", loader)
        if self._resumes and self._commits_within:
            self._trained_on = data
        elif data is self._trained_on:
            self._let_join(added=True)
        divide_anew(loader)
        length = length_of(loader)
        if self._shards != current().members.shards:
            self._shards = current().members.shards
            if told := if_different(length):
                raise MismatchError(
                    f"ranks have different numbers of batches since the job has grown: {told}. Divide data by a "
                    "DistributedSampler or an ElasticSampler, which batches() divides anew, or by ring.rank() and "
                    "ring.size() where each epoch begins."
                )
        skipped = 0
        if self._resumes:
            self._resumes, skipped = False, self._batch
            with fails_alone():
                if self._batches not in (None, length):
                    raise MismatchError(
                        f"this loader has {length} batches, and had {self._batches} on the ranks that this process has "
                        "joined. Make samplers once, with ring.size() and ring.rank() as they are when the script "
                        "starts."
                    )
        source = batches_from(loader, skipped)
        if self._position is not None:
            source = itertools.islice(self._gone_on(loader, self._position), skipped, None)
        self._batch, self._batches, self._is_in_epoch, self._data, self._loader = skipped, length, True, data, loader
        try:
            for batch in source:
                self._batch += 1
                yield batch
        finally:
            self._batch, self._batches, self._is_in_epoch, self._data, self._loader = 0, None, False, None, None
            self._position, self._begun = None, 0

    def _gone_on(self, loader: Any, position: dict[str, Any]) -> Iterator[Any]:
        """The batches of a loader behind a position."""
        inner, calls = _inside(loader)
        if calls is not None:
            loader._num_iter_calls = position.get("calls", calls)
            for sampler in (*samplers_of(inner), inner.batch_sampler):
                if callable(getattr(sampler, "set_epoch", None)):
                    sampler.set_epoch(loader._num_iter_calls)
        found = resumed(inner, position, current().shard[1])
        if found.problem and current().communicator.rank == 0:
            logger.warning(f"TrainingState goes on in the middle of an epoch, but {found.problem}")
        self._begun = found.begun
        if inner is loader:
            return iter(found.loader)
        outer = copy.copy(loader)
        vars(outer)["_dataloader"] = found.loader
        loader._num_iter_calls += 1
        return iter(outer)

    def commit(self) -> None:
        """Let waiting processes join here; call it on all ranks at the end of each step or the beginning of each epoch.

        The state must be whole here. Once a process has joined, the integers of all ranks' states are compared: a
        checksum of them travels with the gradients of the next backward, which raises the `MismatchError` then. If no
        gradients are averaged between two calls, the second one compares them itself.

        Raises:
            MismatchError: after a process has joined, an integer of the state differs among ranks.
        """
        if self._is_in_epoch:  # in a process that has joined, behind the place at which the others let it join
            self._trained_on, self._commits_within = self._data, True
        elif self._is_where_it_joined():  # at that place, or where the epoch began
            return
        communicator = current().communicator
        if communicator.recovers:
            self._follow_changes()
        if not self._let_join(added=not self._is_in_epoch) and self._has_joined:
            # Ranks are to be at the same place: a joiner that does not use `batches` is in another step. The next pass
            # of gradients compares that, if there is one until the next call.
            self._commits += 1
            was_compared = common_place.is_compared
            common_place.take(self._integers())
            if not was_compared and communicator.size > 1 and not current().elastic.exchanges:
                common_place.say(communicator)

    def _described(self) -> str:
        averaged = averaged_orders({name: getattr(self, name) for name in self._names})
        return f"{', '.join(self._names) or 'nothing'}{averaged}"

    def _state(self) -> dict[str, Any]:
        """All that a joiner needs; apart from tensors, it shares nothing with the live objects."""
        state = {name: getattr(self, name) for name in self._names}
        found = {name: v.state_dict() if isinstance(v, Stateful) else v for name, v in state.items()}
        own = ("_batch", "_batches", "_commits_within", "_shards", "_position")
        return {**found, **{name: getattr(self, name) for name in own}, "_trained": trained_parts(state)}

    def _load(self, state: dict[str, Any]) -> None:
        take_trained_parts({name: getattr(self, name) for name in self._names}, state.pop("_trained"))
        for name, value in state.items():
            mine = getattr(self, name)
            mine.load_state_dict(value) if isinstance(mine, Stateful) else setattr(self, name, value)

    def _share(self, joined: tuple[int, ...]) -> None:
        received = share_state(self._state, joined)
        if received is not None:
            self._load(received)
        self._has_joined, self._commits = True, 0
        common_place.take(self._integers())

    def _integers(self) -> dict[str, int]:
        """What says where this rank is; calls are counted, so that passes compare the same one on all ranks."""
        return {**self._integers_of(self._names), "batches": self._batch, "calls of commit": self._commits}


def _inside(loader: Any) -> tuple[Any, int | None]:
    """A loader without what Fabric 2.6.6 has put around it, and how often that was iterated over."""
    inner = vars(loader).get("_dataloader") if hasattr(loader, "__dict__") else None
    return (loader, None) if inner is None else (inner, loader._num_iter_calls)


def share_state(state: Callable[[], dict[str, Any]], joined: Sequence[int]) -> dict[str, Any] | None:
    """Give those that have joined the state of an earlier rank; if that is lost meanwhile, of the next one. Collective.

    Args:
        state: returns this rank's: what can be pickled, and tensors in dicts, lists and tuples. Those on a GPU go
            through host memory.
        joined: world ranks of those that have joined.

    Returns:
        The state in a process that has joined, None on the other ranks; see `transfer_state`.

    Raises:
        PeerFailed, ArgumentError: as for `transfer_state`.
    """
    tensors: list[torch.Tensor] = []

    def described() -> tuple[list[Placeholder], Any]:
        nonlocal tensors
        own = state()
        tensors = [leaf.detach() for leaf in tree_leaves(own) if isinstance(leaf, torch.Tensor)]
        return [Placeholder(tensor) for tensor in tensors], tree_map_only(torch.Tensor, Placeholder, own)

    def send(placeholders: list[Placeholder], root: Callable[[], int]) -> None:
        nonlocal tensors
        communicator: Communicator[Any] = current().communicator
        if communicator.rank != root():
            tensors = [placeholder.empty() for placeholder in placeholders]
        for tensor in tensors:
            if tensor.numel():  # the giver's may be a view with gaps, which a new one lacks; otherwise both lie alike
                dense = tensor if is_dense(tensor) else tensor.contiguous()
                on_host = dense.cpu() if is_on_gpu(dense) else dense
                with purpose("TrainingState"):
                    communicator.broadcast(dense_memory(on_host), root())
                if on_host is not dense:
                    tensor.copy_(on_host)

    found = transfer_state(described, joined, send)
    received = iter(tensors)
    return None if found is None else tree_map_only(Placeholder, lambda _: next(received), found)


# Trained parts --------------------------------------------------------------------------------------

#: A parameter: the name of its module among the parts, and its own name in it.
_Name = tuple[str, str]

#: Parameters of an averager that an error lists.
_LISTED = 4


class TrainedParts(NamedTuple):
    """What to take over.

    Attributes:
        requires_grad: of each parameter.
        modes: of each module, whether it trains, and whether it tracks statistics (None if it never does).
        groups: by optimizer, the parameters of each of its groups; None for those that are in none of the modules.
        buffers: by module, those that `state_dict()` lacks, by name; None for one that is yet to be made.
    """

    requires_grad: dict[_Name, bool]
    modes: dict[_Name, tuple[bool, bool | None]]
    groups: dict[str, list[list[_Name | None]]]
    buffers: dict[_Name, dict[str, torch.Tensor | None]]


def trained_parts(parts: Mapping[str, Any]) -> TrainedParts:
    """Which parts are trained now.

    Args:
        parts: modules, optimizers and anything else, by name.
    """
    names = {parameter: name for name, parameter in _parameters(parts).items()}
    saved = {(of, name) for of, part in parts.items() if isinstance(part, nn.Module) for name in part.state_dict()}
    return TrainedParts(
        {name: parameter.requires_grad for name, parameter in _parameters(parts).items()},
        {
            name: (module.training, getattr(module, "track_running_stats", None))
            for name, module in _modules(parts).items()
        },
        {
            name: [[names.get(parameter) for parameter in group["params"]] for group in part.param_groups]
            for name, part in parts.items()
            if isinstance(part, Optimizer)
        },
        {
            (of, path): {
                own: one for own, one in module._buffers.items() if (of, f"{path}.{own}".lstrip(".")) not in saved
            }
            for (of, path), module in _modules(parts).items()
        },
    )


def take_trained_parts(parts: Mapping[str, Any], told: TrainedParts) -> None:
    """Train the same parts from now on as the process that told of them; call it before state is loaded.

    Args:
        parts: of this process, as in `trained_parts`.

    Raises:
        MismatchError: an optimizer has other groups there, with parameters that are in none of the modules.
    """
    parameters = _parameters(parts)
    for name, parameter in parameters.items():
        if told.requires_grad.get(name, parameter.requires_grad) != parameter.requires_grad:
            parameter.requires_grad_(not parameter.requires_grad)
    for name, module in _modules(parts).items():
        if name in told.modes:
            trains, tracks = told.modes[name]
            module.training = trains
            if tracks not in (None, getattr(module, "track_running_stats", None)):  # a scripted one cannot be set
                setattr(module, "track_running_stats", tracks)  # noqa: B010 - of the modules that have it
        for buffer, value in told.buffers.get(name, {}).items():
            _take_buffer(module, buffer, value)
    own = trained_parts(parts).groups
    for optimizer, groups in told.groups.items():
        if groups == own.get(optimizer):
            continue
        found = [[parameters.get(one) if one else None for one in group] for group in groups]
        if optimizer not in own or any(parameter is None for group in found for parameter in group):
            raise MismatchError(
                f"the optimizer {optimizer!r} has {len(groups)} parameter groups on the other ranks, which differ from "
                f"the {len(own.get(optimizer, ()))} of this process, and some of whose parameters are in no module of "
                "the state. Add that module to the TrainingState, or give the optimizer all its groups before the "
                "training begins."
            )
        parts[optimizer].param_groups[:] = [{"params": group} for group in found]  # the state has their options


def _take_buffer(module: nn.Module, name: str, value: torch.Tensor | None) -> None:
    """Give a module a buffer that another process has. `forward`, which has not run here, may make or enlarge it."""
    own = module._buffers.get(name)
    if own is not None and value is not None and (own.shape, own.dtype) == (value.shape, value.dtype) and is_dense(own):
        own.detach().copy_(value)  # others may share it
    elif name in module._buffers:
        module._buffers[name] = value
    else:
        module.register_buffer(name, value, persistent=False)


def averaged_orders(parts: Mapping[str, Any]) -> str:
    """Which parameters optimizers average that were wrapped without names, in which order; equal where these are.

    Ranks average gradients by their order. Where names are given, these are compared. Numbers are the same in any
    order, so a process with another one would give gradients of equal shapes the averages of other parameters.
    """
    names, told = {parameter: name for name, parameter in _parameters(parts).items()}, ""
    for of, part in parts.items():
        averager = getattr(part, "averager", None)
        named = averager.named_parameters if isinstance(averager, GradientAverager) else ()
        if any(parameter in names and names[parameter][1] != name for name, parameter in named):
            order = [".".join(names.get(parameter, (name,))) for name, parameter in named]
            first, more = ", ".join(order[:_LISTED]), len(order) - _LISTED
            told += f"; {of} averages {first}{f' and {more} more' if more > 0 else ''}"
            told += f" in the order {zlib.crc32(repr(order).encode()):08x}"
    return told


def _parameters(parts: Mapping[str, Any]) -> dict[_Name, nn.Parameter]:
    """A parameter that several modules share, once."""
    found: dict[nn.Parameter, _Name] = {}
    for of, part in parts.items():
        if isinstance(part, nn.Module):
            for name, parameter in part.named_parameters():
                found.setdefault(parameter, (of, name))
    return {name: parameter for parameter, name in found.items()}


def _modules(parts: Mapping[str, Any]) -> dict[_Name, nn.Module]:
    return {
        (of, name): module
        for of, part in parts.items()
        if isinstance(part, nn.Module)
        for name, module in part.named_modules()
    }
