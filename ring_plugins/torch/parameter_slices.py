"""This rank's slice of some parameters, as tensors that an optimizer can update, and the gathering of all slices.

Nothing is copied to make a slice: its tensors are views of the parameters' memory, and their gradients are views of the
averaged gradients. The optimizer updates the views, and so the parameters. Then each round (`core.gradients.slices`) is
gathered: a large parameter where it lies, small ones through a buffer.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ring_plugins.core.arrays.memory import Memory
from ring_plugins.core.base.errors import ArgumentError, RingError
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.gradients.fusion import Entry, FusionPlan
from ring_plugins.core.gradients.slices import ROUND_SIZES, HostArrays, Piece, SliceGather, plan_rounds
from ring_plugins.torch.device import array_of, is_on_gpu, memory_of
from ring_plugins.torch.tensor_memory import is_dense

_address, _gradient_of = operator.methodcaller("data_ptr"), operator.attrgetter("grad")


class ParameterSlices:
    """The slices of some parameters: this rank's as tensors to update, and the gathering of everyone's.

    Args:
        named: (name, parameter) pairs, equal on all ranks.
        communicator: gathers the slices, where the parameters are; used by nobody else while this does.
        whole_tensors: whether a parameter is updated by one rank as a whole.

    Attributes:
        names, parameters: of all parameters.
        pieces: this rank's slice.
        tensors: the same as tensors: views of the parameters, 1-d unless they are the whole parameter.

    Raises:
        ArgumentError: a parameter's elements do not fill a stretch of memory.
        MismatchError: the parameters differ among ranks.
    """

    def __init__(
        self, named: Sequence[tuple[str, torch.Tensor]], communicator: Communicator[Any], whole_tensors: bool
    ) -> None:
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self._communicator = communicator
        self._layouts = [_layout(parameter) for parameter in self.parameters]
        plan = FusionPlan(list(map(_entry, self.names, self.parameters)), ROUND_SIZES)
        plan.check_equal(communicator)
        rank = communicator.rank
        self._rounds = plan_rounds(plan, communicator.size, whole_tensors)
        self.pieces = [piece for one in self._rounds for piece in one.pieces[rank]]
        self._addresses = list(map(_address, self.parameters))
        self.tensors = [self._view(piece) for piece in self.pieces]
        on_gpu = self.parameters[0] if is_on_gpu(self.parameters[0]) else None
        arrays = HostArrays() if on_gpu is None else DeviceArrays(on_gpu.device)
        self._gather = SliceGather(plan, self._rounds, communicator, in_place=True, arrays=arrays)
        self._map_memory()

    def _view(self, piece: Piece) -> torch.Tensor:
        parameter = self.parameters[piece.entry].detach()
        if self.is_whole(piece):
            return parameter
        return parameter.as_strided((piece.stop - piece.start,), (1,), parameter.storage_offset() + piece.start)

    def parts(self) -> Iterator[tuple[Piece, torch.Tensor, torch.Tensor]]:
        """This rank's slice: each piece, its tensor, and the parameter that it is a piece of."""
        for piece, tensor in zip(self.pieces, self.tensors, strict=True):
            yield piece, tensor, self.parameters[piece.entry]

    def is_whole(self, piece: Piece) -> bool:
        """Whether a piece is the whole parameter, whose shape its tensor then has."""
        return piece.stop - piece.start == self.parameters[piece.entry].numel()

    def _map_memory(self) -> None:
        self._flats = [p.detach().as_strided((p.numel(),), (1,), p.storage_offset()) for p in self.parameters]
        arrays: Any = self._flats if is_on_gpu(self._flats[0]) else map(array_of, self._flats)
        self._wholes: dict[int, Any] = dict(enumerate(arrays))
        self._own = {piece.entry: self._wholes[piece.entry][piece.start : piece.stop] for piece in self.pieces}

    def follow_parameters(self) -> bool:
        """Make the tensors views of the parameters' memory as it is now: a script may have replaced `p.data`.

        Returns:
            Whether it had.

        Raises:
            RingError: a parameter's dtype or shape has changed.
        """
        addresses = list(map(_address, self.parameters))
        if addresses == self._addresses:
            return False
        for name, parameter, layout in zip(self.names, self.parameters, self._layouts, strict=True):
            if _layout(parameter) != layout:
                raise RingError(
                    f"{name} was {_describe(layout)} and is {_describe(_layout(parameter))}; a sharded optimizer "
                    "needs the parameters as they were when it was made. Make a new one after such a change."
                )
        for piece, tensor, _ in self.parts():
            tensor.data = self._view(piece)
        self._map_memory()
        self._addresses = addresses
        return True

    def gradients(self) -> list[torch.Tensor | None]:
        """The gradients of all parameters."""
        return list(map(_gradient_of, self.parameters))

    def take_gradients(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Give this rank's tensors their part of the gradients, without a copy if those are laid out as parameters."""
        for piece, tensor, parameter in self.parts():
            gradient = gradients[piece.entry]
            if gradient is not None and not self.is_whole(piece):
                if gradient.stride() != parameter.stride():
                    gradient = torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)
                start = gradient.storage_offset() + piece.start
                gradient = gradient.as_strided((piece.stop - piece.start,), (1,), start)
            if gradient is not None and gradient.dtype != tensor.dtype:  # as the parameter's `grad_dtype` says
                tensor.grad_dtype = gradient.dtype
            tensor.grad = gradient

    def drop_gradients(self) -> None:
        """Let go of the gradients' memory."""
        for tensor in self.tensors:
            tensor.grad = None

    def gather(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Fetch the slices of other ranks; collective.

        Args:
            gradients: a parameter without one was not updated. The same are None on all ranks.
        """
        for number, one in enumerate(self._rounds if self._communicator.size > 1 else ()):
            if any(gradients[entry] is not None for entry in one.entries):
                self._gather.run(number, self._wholes, self._wholes, self._own)
                # Autograd then notices a backward that comes too late.
                torch.autograd.graph.increment_version([self._flats[entry] for entry in one.entries])

    def state_by_round(self, state: dict[torch.Tensor, dict[str, Any]]) -> list[dict[int, tuple[int, int, Any]]]:
        """Per round, this rank's state: by entry start, stop, and the state of that piece, in memory of the host."""
        by_piece = dict(zip(self.pieces, self.tensors, strict=True))
        return [
            {
                piece.entry: (piece.start, piece.stop, _on_host(state[by_piece[piece]]))
                for piece in one.pieces[self._communicator.rank]
                if by_piece[piece] in state
            }
            for one in self._rounds
        ]


def _on_host(state: Any) -> Any:
    """A state whose tensors any rank can unpickle, whatever GPUs it has."""
    if isinstance(state, torch.Tensor):
        return state.cpu()
    if isinstance(state, dict):
        return {key: _on_host(value) for key, value in state.items()}
    return [_on_host(value) for value in state] if type(state) is list else state


class DeviceArrays:
    """Tensors of one GPU; see `core.gradients.slices.Arrays`. Nothing here waits for the GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def empty(self, count: int, dtype: str) -> torch.Tensor:
        return torch.empty(count, dtype=getattr(torch, dtype), device=self._device)

    def memory(self, array: torch.Tensor, dtype: str) -> Memory:
        return memory_of(array)

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        if targets:
            torch._foreach_copy_(list(targets), list(sources))


_Layout = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], torch.device]


def _layout(parameter: torch.Tensor) -> _Layout:
    return parameter.dtype, tuple(parameter.shape), tuple(parameter.stride()), parameter.device


def _describe(layout: _Layout) -> str:
    dtype, shape, strides, device = layout
    return f"{dtype} of shape {shape} and strides {strides} on {device}"


def _entry(name: str, parameter: torch.Tensor) -> Entry:
    if parameter.numel() and not is_dense(parameter):
        raise ArgumentError(
            f"parameter {name} of shape {tuple(parameter.shape)} and strides {tuple(parameter.stride())} has gaps in "
            "its memory, so it has no slices; make it contiguous, or leave the optimizer unsharded."
        )
    dtype = str(parameter.dtype).removeprefix("torch.")
    return Entry(name, dtype, parameter.numel(), f"shape {tuple(parameter.shape)}, strides {tuple(parameter.stride())}")
