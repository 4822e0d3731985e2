"""What a rank does in a step of a sharded optimizer, and where the state of its slice is; see `sharded_optimizer`."""

from __future__ import annotations

import contextlib
import itertools
import weakref
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from ring_plugins.core.base.errors import ArgumentError, MismatchError, RingError
from ring_plugins.core.collectives.validation import on_all_or_none
from ring_plugins.core.gpu.communicator import DeviceCommunicator
from ring_plugins.core.gradients.slices import Piece, UpdateComparison
from ring_plugins.core.groups import Group
from ring_plugins.core.world import constructed_by_all, current
from ring_plugins.observe.consistency import differing_weights
from ring_plugins.torch.bucket_sets import communicator_for
from ring_plugins.torch.consistency import parameter_checksums
from ring_plugins.torch.device import KIND
from ring_plugins.torch.parameter_slices import ParameterSlices

#: Name under which a wrapped optimizer refers to what shards it.
UPDATES = "_ring_updates"
#: What a copy keeps of a piece: rank and number of ranks, parameter, start, stop, state.
CopiedState = tuple[int, int, torch.Tensor, int, int, dict[str, Any]]


class SlicedUpdates:
    """Updates and gathers the slices of one optimizer; see `ShardedOptimizer`.

    Args:
        optimizer: the wrapped one.
        names: of its parameters, for errors.
        whole_tensors: whether a tensor is updated by one rank as a whole.
        group: whose ranks share it, by default all.
    """

    def __init__(
        self, optimizer: Optimizer, names: dict[torch.Tensor, str], whole_tensors: bool, group: Group | None = None
    ) -> None:
        self._optimizer, self._names, self._whole_tensors = optimizer, names, whole_tensors
        #: One for the groups of the construction, one for each later change.
        self._slices: list[ParameterSlices] = []
        with constructed_by_all("sharding an optimizer", None if group is None else group.communicator):
            current().refuse_to_recover("a sharded optimizer, whose state is lost with a rank,")
            communicator = communicator_for(self._new_parameters(), "sharded updates", group)
        #: Gathers slices where the parameters are; and what ranks tell each other goes through memory of the host.
        self._communicator = communicator
        self._host = communicator.executor.host if isinstance(communicator, DeviceCommunicator) else communicator
        #: Of this rank's slice, by its tensors.
        self._state: dict[torch.Tensor, dict[str, Any]] = defaultdict(dict)
        self._known: list[int] = []  # ids of the groups' parameters
        self._tensors: dict[torch.Tensor, list[torch.Tensor]] = {}  # by parameter, this rank's
        self._is_inside = False
        self._has_compared_weights = False
        self._adopted = 0  # describes the state that was loaded
        self._options: tuple[list[Any], int] = [], 0
        self._comparison = UpdateComparison(
            self._host, "All ranks must update the same parameters with the same options."
        )
        self._finalizer = weakref.finalize(self, communicator.discard)
        self._finalizer.atexit = False  # type: ignore[misc, unused-ignore]
        try:
            with on_all_or_none(communicator, "sharding an optimizer"):
                self.take_parameters()
        except BaseException:
            communicator.close()
            raise
        setattr(optimizer, UPDATES, self)
        self._hooks = [
            optimizer.register_step_pre_hook(self._reject_bypass),
            optimizer.register_state_dict_pre_hook(self._reject_bypass),
            optimizer.register_load_state_dict_post_hook(self._take_loaded_state),
        ]

    def _take_loaded_state(self, optimizer: Optimizer) -> None:
        self._state.clear()
        self._adopted = zlib.crc32(b"loaded", self._adopted)  # an empty state, too
        self._options = [], 0
        self.adopt_state()
        self._has_compared_weights = False  # the script may have loaded weights, too

    def _reject_bypass(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._is_inside:
            raise RingError(
                f"this {type(optimizer).__name__} is sharded among the ranks and has no state of its own; call the "
                "optimizer that wraps it, or shard it again if that one was closed."
            )

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def _named(self) -> list[tuple[str, torch.Tensor]]:
        return [pair for slices in self._slices for pair in zip(slices.names, slices.parameters, strict=True)]

    def _new_parameters(self) -> list[tuple[str, torch.Tensor]]:
        """The (name, parameter) pairs of the groups that have no slices yet."""
        sliced = {id(parameter) for slices in self._slices for parameter in slices.parameters}
        numbers: dict[torch.Tensor, int] = {}  # a parameter may be listed twice
        for number, parameter in enumerate(self._parameters()):
            numbers.setdefault(parameter, number)
        return [(self._names.get(p, f"parameter {number}"), p) for p, number in numbers.items() if id(p) not in sliced]

    def take_parameters(self) -> None:
        """Make slices of parameters that the groups have and that have none; collective if there are any."""
        parameters = self._parameters()
        ids = list(map(id, parameters))
        if ids == self._known:
            return
        new = self._new_parameters()
        gpu = self._communicator.device if isinstance(self._communicator, DeviceCommunicator) else None
        for name, parameter in new:
            if parameter.device != torch.device(*("cpu",) if gpu is None else (KIND, gpu)):
                raise ArgumentError(
                    f"{name} is on {parameter.device}, and others of this sharded optimizer's parameters are on "
                    f"{'the CPU' if gpu is None else f'GPU {gpu}'}. Move it there first."
                )
        _reject_shared_memory([*self._named(), *new])
        if new:
            slices = ParameterSlices(new, self._communicator, self._whole_tensors)
            self._slices.append(slices)
            for _, tensor, parameter in slices.parts():
                self._tensors.setdefault(parameter, []).append(tensor)
        self._known = ids
        self.adopt_state()

    @contextlib.contextmanager
    def _in_slices(self) -> Iterator[None]:
        """Let the wrapped optimizer see this rank's slice instead of parameters, and the state of the slice."""
        optimizer = self._optimizer
        groups, state = optimizer.param_groups, optimizer.state
        whole = [group["params"] for group in groups]
        self._is_inside = True
        try:
            for group in groups:
                group["params"] = [t for parameter in group["params"] for t in self._tensors.get(parameter, ())]
            optimizer.state = self._state  # type: ignore[assignment, unused-ignore]
            yield
        finally:
            for group, parameters in zip(groups, whole, strict=True):
                group["params"] = parameters
            optimizer.state = state
            self._is_inside = False

    @torch.no_grad()
    def step(self) -> None:
        has_begun = False
        try:
            self.take_parameters()
            gradients = [slices.gradients() for slices in self._slices]
            have_moved = [slices.follow_parameters() for slices in self._slices]
            if any(have_moved):
                _reject_shared_memory(self._named())
            self._compare(gradients)
            has_begun = True
            for slices, some in zip(self._slices, gradients, strict=True):
                slices.take_gradients(some)
            with self._in_slices():
                self._optimizer.step()
            for slices, some in zip(self._slices, gradients, strict=True):
                slices.drop_gradients()
                slices.gather(some)
        except BaseException as error:
            if has_begun or not isinstance(error, MismatchError):  # which all ranks raise before anything has changed
                self._communicator.interrupt("a sharded update", error)
            raise

    def _compare(self, gradients: Sequence[Sequence[torch.Tensor | None]]) -> None:
        """Compare among the ranks what is about to be updated, and how.

        Raises:
            MismatchError: on all ranks.
        """
        present = bytes(gradient is not None for some in gradients for gradient in some)
        sparse = any(g is not None and g.is_sparse for some in gradients for g in some) and not self._whole_tensors
        # A number that is equal for equal options; tensors are left out, since they may be on a GPU.
        plain = [value for group in self._optimizer.param_groups for value in _comparable(group).values()]
        if plain != self._options[0] or not self._options[1]:
            self._options = plain, zlib.crc32(repr(plain).encode(), self._adopted)
        description = zlib.crc32(present, self._options[1]) << 1 | sparse
        if self._comparison.differs(description) or sparse:
            raise self._difference(gradients)
        if not self._has_compared_weights:  # on all ranks, since all have loaded a state equally often
            named: Any = self._named()
            found = differing_weights(lambda: parameter_checksums(named), "before the first step", self._host)
            if found:
                raise MismatchError(
                    f"{found} A sharded optimizer would mix the ranks' weights. Call "
                    "ring_plugins.torch.broadcast_parameters(model) before the first step."
                )
            self._has_compared_weights = True

    def _difference(self, gradients: Sequence[Sequence[torch.Tensor | None]]) -> MismatchError:
        """The error for ranks that are about to make different updates, or one that cannot be divided. Collective."""
        own: dict[str, str] = {}
        for number, group in enumerate(self._optimizer.param_groups):
            options = _comparable(group).items()
            own.update({f"option {key} of parameter group {number}": repr(value) for key, value in options})
        for slices, some in zip(self._slices, gradients, strict=True):
            for name, gradient in zip(slices.names, some, strict=True):
                is_sparse = gradient is not None and gradient.is_sparse and not self._whole_tensors
                own[f"the gradient of {name}"] = "None" if gradient is None else "sparse" if is_sparse else "there"
        own["the loaded state"] = f"number {self._adopted}"
        if found := self._comparison.explain(own):
            return found
        key = next((key for key, kind in own.items() if kind == "sparse"), None)
        if key is None:
            return MismatchError("a sharded update differs among the ranks.")
        return MismatchError(
            f"{key} is sparse and cannot be cut into slices; use shard='tensors', or make gradients dense with "
            "sparse='densify'."
        )

    def _parts(self) -> Iterator[tuple[Piece, torch.Tensor, torch.Tensor]]:
        return itertools.chain.from_iterable(slices.parts() for slices in self._slices)

    def state_by_parameter(self) -> dict[torch.Tensor, dict[str, Any]]:
        return {parameter: self._state[tensor] for _, tensor, parameter in self._parts() if tensor in self._state}

    def adopt_state(self) -> None:
        """Cut what the wrapped optimizer has as state to this rank's slice."""
        whole = self._optimizer.state
        if not whole:
            return
        for piece, tensor, parameter in self._parts():
            if parameter in whole:
                self._state[tensor] = {key: _cut(value, parameter, piece) for key, value in whole[parameter].items()}
        have = bytes(parameter in whole for parameter in self._parameters())
        self._adopted = zlib.crc32(have, self._adopted)
        self._options = [], 0
        whole.clear()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state_dict)  # calls `_take_loaded_state`

    def state_dict(self, to: int | None) -> dict[str, Any]:
        rank = self._communicator.ranks[self._communicator.rank]
        if to is not None and to not in self._communicator.ranks:
            raise ArgumentError(f"to={to!r} is not a rank of this job of {self._communicator.size}.")
        whole: dict[torch.Tensor, dict[str, Any]] = {}
        try:
            for slices in self._slices:
                for mine in slices.state_by_round(self._state):
                    parts = self._host.start(
                        "state_dict() of a sharded optimizer, which all ranks have to call",
                        lambda mine=mine: self._host.all_gather_object(mine, "state_dict"),  # type: ignore[misc]
                    ).wait()
                    if to is None or to == rank:
                        whole.update(_join(slices, parts))
        except BaseException as error:
            self._communicator.interrupt("state_dict() of a sharded optimizer", error)
            raise
        if to is not None and to != rank:
            return {}
        optimizer, empty = self._optimizer, self._optimizer.state
        self._is_inside = True
        try:
            optimizer.state = defaultdict(dict, {p: whole[p] for p in self._parameters() if p in whole})
            return optimizer.state_dict()
        finally:
            optimizer.state, self._is_inside = empty, False

    def copied_state(self) -> list[CopiedState]:
        rank, size = self._communicator.rank, self._communicator.size
        return [
            (rank, size, parameter, piece.start, piece.stop, self._state[tensor])
            for piece, tensor, parameter in self._parts()
            if tensor in self._state
        ]

    def adopt_copy(self, copied: Sequence[CopiedState]) -> None:
        """Continue with the state of a copy, which must have been made by the same rank of as many.

        Raises:
            ArgumentError: it was not.
        """
        place = {(id(parameter), piece.start, piece.stop): tensor for piece, tensor, parameter in self._parts()}
        for rank, size, parameter, start, stop, state in copied:
            tensor = place.get((id(parameter), start, stop))
            if tensor is None or (rank, size) != (self._communicator.rank, self._communicator.size):
                raise ArgumentError(
                    f"this copy of a sharded optimizer holds the state of rank {rank} of {size} and cannot be used on "
                    f"rank {self._communicator.rank} of {self._communicator.size}; save and load state_dict() instead."
                )
            self._state[tensor] = state

    def close(self) -> None:
        self._finalizer.detach()
        self._communicator.close()

    def release(self) -> None:
        """Close, and let the optimizer be used again."""
        self.close()
        for hook in self._hooks:
            hook.remove()


def _comparable(group: dict[str, Any]) -> dict[str, Any]:
    """The options of a group whose texts are equal on all ranks where they are; not those of a set, or of an object."""
    kinds = bool, int, float, complex, str, tuple, list, type(None)
    return {key: value for key, value in group.items() if key != "params" and isinstance(value, kinds)}


def _reject_shared_memory(named: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Raise `ArgumentError` if two parameters lie in the same memory: slices of both would overwrite each other."""
    ranges = sorted((p.data_ptr(), p.data_ptr() + p.numel() * p.element_size(), name) for name, p in named if p.numel())
    for (_, end, name), (start, _, following) in itertools.pairwise(ranges):
        if start < end:
            raise ArgumentError(
                f"{name} and {following} lie in the same memory, so a sharded optimizer would update one in the other. "
                "Tie weights by assigning the parameter itself, not its data, or leave out shard."
            )


def _cut(value: Any, parameter: torch.Tensor, piece: Piece) -> Any:
    """The piece of a state tensor that is shaped as its parameter; anything else unchanged."""
    is_whole = piece.stop - piece.start == parameter.numel()
    if is_whole or not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
        return value
    if value.stride() != parameter.stride():
        value = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
    return value.as_strided((piece.stop - piece.start,), (1,), value.storage_offset() + piece.start).clone()


def _join(
    slices: ParameterSlices, parts: Sequence[dict[int, tuple[int, int, Any]]]
) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
    """The whole state of the parameters of a round, in memory of the host, from the parts of all ranks.

    Raises:
        RingError: a rank lacks its part.
    """
    for entry in sorted(set(itertools.chain(*parts))):
        parameter, name = slices.parameters[entry], slices.names[entry]
        pieces = [part[entry] for part in parts if entry in part]
        if pieces[0][1] - pieces[0][0] == parameter.numel():
            yield parameter, pieces[0][2]
            continue
        if sum(stop - start for start, stop, _ in pieces) != parameter.numel() or any(
            state.keys() != pieces[0][2].keys() for _, _, state in pieces
        ):
            raise RingError(f"some ranks have no state for their slice of {name}, or another one than other ranks.")
        joined = {}
        for key, first in pieces[0][2].items():
            if not isinstance(first, torch.Tensor) or first.dim() == 0:
                joined[key] = first
                continue
            joined[key] = torch.empty_like(parameter, dtype=first.dtype, device="cpu", requires_grad=False)
            flat = joined[key].as_strided((parameter.numel(),), (1,))
            for start, stop, state in pieces:
                if state[key].shape != (stop - start,):
                    raise RingError(
                        f"the state {key} of {name} has shape {tuple(state[key].shape)} for a slice of {stop - start} "
                        "elements, so it cannot be joined: this optimizer needs shard='tensors'."
                    )
                flat[start:stop] = state[key]
        yield parameter, joined
