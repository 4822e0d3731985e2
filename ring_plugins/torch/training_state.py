"""What a new process needs to go on with a training that other ranks have begun, and where it may join them.

With `on_failure="replace"`, a new process takes the place of a lost rank (core/joining/join.py). It runs the script
from its first line, comes to the training loop, and needs the weights, the optimizer's state, the schedule, and the
place in the data. Only the script knows all that, so it lists them once, before the loop, in a `TrainingState`. When a
rank is lost, the other ranks lose nothing and never go back. So they need not save or restore anything, as Horovod's
elastic states and torchrun's snapshots do. At the end of a step they say that their state is whole; new processes may
join there.

Those by which the job grows (`max_ranks`) join where an epoch begins, since all ranks need other samples from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from ring_plugins.core.base.errors import MismatchError
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.collectives.fingerprint import purpose
from ring_plugins.core.joining.join import if_different
from ring_plugins.core.joining.state_transfer import fails_alone, transfer_state
from ring_plugins.core.joining.training_state import ListedState
from ring_plugins.core.world import current
from ring_plugins.observe.consistency import common_place
from ring_plugins.torch.broadcast import Placeholder
from ring_plugins.torch.loaders import batches_from, divide_anew
from ring_plugins.torch.tensor_memory import dense_memory, is_dense
from ring_plugins.torch.trained_parts import averaged_orders, take_trained_parts, trained_parts

T = TypeVar("T")


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
        self._resumes = False
        #: Whether `batches` runs, and over which data; and that of the last one in which `commit` was called.
        self._is_in_epoch, self._data = False, None
        self._trained_on: Any = None
        #: Whether there is such data, and the number of shards in the last epoch; a joiner gets the others'.
        self._commits_within, self._shards = False, current().members.shards
        #: Calls of `commit` since a process has last joined.
        self._commits = 0
        if current().is_joining:
            self._join("average gradients and call TrainingState.commit()")
            self._resumes = True

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Iterate over a loader; a process that joined in the middle of an epoch begins with the next batch.

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
        length = len(loader) if isinstance(loader, Sized) else None
        if self._shards != current().members.shards:
            self._shards = current().members.shards
            self._compare_lengths(length)
        skipped = 0
        if self._resumes:
            self._resumes, skipped = False, self._batch
            with fails_alone():
                self._check_length(length)
        self._batch, self._batches, self._is_in_epoch, self._data = skipped, length, True, data
        try:
            for batch in batches_from(loader, skipped):
                self._batch += 1
                yield batch
        finally:
            self._batch, self._batches, self._is_in_epoch, self._data = 0, None, False, None

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
        if not self._let_join(added=not self._is_in_epoch) and self._has_joined:
            self._commits += 1
            self._compare()

    def _described(self) -> str:
        averaged = averaged_orders({name: getattr(self, name) for name in self._names})
        return f"{', '.join(self._names) or 'nothing'}{averaged}"

    def _state(self) -> dict[str, Any]:
        """All that a joiner needs; apart from tensors, it shares nothing with the live objects."""
        state = {name: getattr(self, name) for name in self._names}
        found = {name: v.state_dict() if isinstance(v, Stateful) else v for name, v in state.items()}
        own = ("_batch", "_batches", "_commits_within", "_shards")
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

    def _check_length(self, length: int | None) -> None:
        """Check that in this epoch, in whose middle this process has joined, it has as many batches as the others."""
        if self._batches not in (None, length):
            raise MismatchError(
                f"this loader has {length} batches, and had {self._batches} on the ranks that this process has joined. "
                "Make samplers once, with ring.size() and ring.rank() as they are when the script starts."
            )

    def _compare_lengths(self, length: int | None) -> None:
        """Check that all ranks have equally many batches since the job has grown."""
        if told := if_different(length):
            raise MismatchError(
                f"ranks have different numbers of batches since the job has grown: {told}. Divide data by a "
                "DistributedSampler or an ElasticSampler, which batches() divides anew, or by ring.rank() and "
                "ring.size() where each epoch begins."
            )

    def _integers(self) -> dict[str, int]:
        """What says where this rank is; calls are counted, so that passes compare the same one on all ranks."""
        return {**self._integers_of(self._names), "batches": self._batch, "calls of commit": self._commits}

    def _compare(self) -> None:
        """Check that ranks are at the same place: a joiner that does not use `batches` is in another step.

        The next pass of gradients does, if there is one until the next call.
        """
        was_compared = common_place.is_compared
        common_place.take(self._integers())
        communicator = current().communicator
        if not was_compared and communicator.size > 1:
            common_place.say(communicator)


def share_state(state: Callable[[], dict[str, Any]], joined: Sequence[int]) -> dict[str, Any] | None:
    """Give those that have joined the state of an earlier rank; if that is lost meanwhile, of the next one. Collective.

    Args:
        state: returns this rank's: what can be pickled, and tensors on the CPU in dicts, lists and tuples.
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
                with purpose("TrainingState"):
                    communicator.broadcast(dense_memory(dense), root())

    found = transfer_state(described, joined, send)
    received = iter(tensors)
    return None if found is None else tree_map_only(Placeholder, lambda _: next(received), found)
