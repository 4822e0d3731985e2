"""Which part of each variable a rank updates, and the gathering of everyone's parts in host memory."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from ring_plugins.core.arrays.dtypes import STORAGE
from ring_plugins.core.arrays.memory import HostMemory
from ring_plugins.core.base.errors import ArgumentError, MismatchError
from ring_plugins.core.base.types import Array
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.gradients.fusion import FusionPlan
from ring_plugins.core.gradients.slices import ROUND_SIZES, Piece, plan_rounds
from ring_plugins.keras.buckets import describe_gradient

#: A variable with so many rows per rank is cut between rows, which leaves the ranks within a few percent of each other.
_ROWS = 16


class SliceLayout:
    """Which range of each variable every rank updates; arithmetic on shapes, the same on all ranks.

    Args:
        variables: that the optimizer updates.
        rank, size: of the job.
        between_rows: whether to cut between rows where there are many, for gradients that have only some rows.

    Attributes:
        rounds: variables that are gathered by one collective.
        ranges: by variable, this rank's first element and the one behind its last.
    """

    def __init__(self, variables: Sequence[Any], rank: int, size: int, between_rows: bool = False) -> None:
        self._shapes = [tuple(int(length) for length in variable.shape) for variable in variables]
        self.plan = FusionPlan([describe_gradient(i, variable) for i, variable in enumerate(variables)], ROUND_SIZES)
        grains = [_grain(shape, size) for shape in self._shapes] if between_rows else None
        self._is_cut_between_rows = between_rows
        self.rounds = plan_rounds(self.plan, size, grains=grains)
        self.rank = rank
        self._pieces: list[list[Piece | None]] = [[None] * size for _ in variables]
        for one in self.rounds:
            for owner, pieces in enumerate(one.pieces):
                for piece in pieces:
                    self._pieces[piece.entry][owner] = piece
        mine = [by_rank[rank] for by_rank in self._pieces]
        self.ranges = [(0, 0) if piece is None else (piece.start, piece.stop) for piece in mine]

    def is_whole(self, i: int) -> bool:
        """Whether this rank updates all of a variable."""
        return self.ranges[i] == (0, self.plan.entries[i].count)

    def is_empty(self, i: int) -> bool:
        """Whether this rank updates nothing of a variable."""
        start, stop = self.ranges[i]
        return start == stop

    def rows(self, i: int) -> tuple[int, int] | None:
        """The range of rows that this rank updates; None if it begins or ends inside a row."""
        start, stop = self.ranges[i]
        shape = self._shapes[i]
        row = math.prod(shape[1:]) if shape else 1
        return (start // row, stop // row) if row and start % row == stop % row == 0 else None

    def shape(self, i: int) -> tuple[int, ...]:
        """The shape of this rank's part: that of the variable, or its rows, or 1-d if a row is cut."""
        start, stop = self.ranges[i]
        if self.is_whole(i):
            return self._shapes[i]
        rows = self.rows(i) if self._is_cut_between_rows else None
        return (stop - start,) if rows is None else (rows[1] - rows[0], *self._shapes[i][1:])

    def counts(self, i: int) -> list[int]:
        """By rank, how many elements of a variable it updates; they lie in rank order."""
        return [0 if piece is None else piece.stop - piece.start for piece in self._pieces[i]]

    def cut(self, i: int, whole: Array) -> Array:
        """This rank's part of an array with the shape of a variable."""
        start, stop = self.ranges[i]
        return whole.reshape(-1)[start:stop].reshape(self.shape(i))


def new_part(variable: Any, shape: tuple[int, ...]) -> Any:
    """A variable for this rank's part of another, which optimizers treat as that one."""
    with keras.device("cpu"):
        part = keras.Variable("zeros", shape, variable.dtype, trainable=False, autocast=False, name=variable.name)
    part._path = variable.path  # names of slot variables begin with it
    part.overwrite_with_gradient = getattr(variable, "overwrite_with_gradient", False)
    return part


def on_gpu(name: str) -> ArgumentError:
    """The error for a variable that is on a GPU."""
    return ArgumentError(
        f"{name} is on a GPU; sharded optimizers update variables in the memory of CPUs. Leave out shard_optimizer."
    )


def _grain(shape: Sequence[int], size: int) -> int:
    return max(1, math.prod(shape[1:])) if len(shape) > 1 and shape[0] >= _ROWS * size else 1


class SliceGather:
    """Gathers the parts of all ranks, and compares beforehand what the ranks have updated with.

    Args:
        layout: the parts.
        communicator: must have no other use.
        loaded: describes the checkpoints that this rank has loaded.
    """

    def __init__(self, layout: SliceLayout, communicator: Communicator, loaded: int) -> None:
        self._layout, self._communicator, self.loaded = layout, communicator, loaded
        self._buffers: dict[np.dtype[Any], Array] = {}
        self._descriptions = HostMemory(np.zeros(communicator.size, np.int64), "int64")
        self._own_description = HostMemory(np.zeros(1, np.int64), "int64")

    def compare(self, options: Mapping[str, object]) -> None:
        """Compare among the ranks what an update depends on besides gradients. Collective.

        Raises:
            MismatchError: on all ranks, if something differs.
        """
        options = {**options, "the loaded checkpoint": self.loaded}
        description = zlib.crc32(repr(list(options.values())).encode())
        self._own_description.array[0] = description
        self._communicator.all_gather(self._own_description, self._descriptions, [1] * self._communicator.size)
        if (self._descriptions.array == description).all():
            return
        by_rank = self._communicator.all_gather_object(options, "options of optimizer")
        for key in options:
            values = [theirs.get(key) for theirs in by_rank]
            if len(set(map(repr, values))) > 1:
                raise MismatchError(
                    f"a sharded update differs among the ranks: {key} is {values}, in rank order. Each rank updates a "
                    "part of the weights, so all must update in the same way: set the same options and load the same "
                    "checkpoint on all ranks."
                )
        raise MismatchError("a sharded update differs among the ranks.")

    def run(self, number: int, present: Sequence[int], wholes: Mapping[int, Array], own: Mapping[int, Array]) -> None:
        """Gather the variables of a round. Collective.

        Args:
            number: of the round.
            present: its variables that were updated, the same on all ranks; none of them is empty.
            wholes: by variable, memory for all of it: 1-d, and of the type in which numpy stores its dtype.
            own: by variable, this rank's part, in the same form; may be the part of `wholes` where it belongs.
        """
        one, layout, communicator = self._layout.rounds[number], self._layout, self._communicator
        dtype = layout.plan.entries[one.entries[0]].dtype
        first = sum(one.counts[: communicator.rank])
        stop = first + one.counts[communicator.rank]
        if one.is_direct:
            (i,) = present
            mine = own[i] if i in own else wholes[i][first:stop]
            communicator.all_gather(HostMemory(mine, dtype), HostMemory(wholes[i], dtype), one.counts)
            return
        packed = self._buffer(number)
        for piece in one.pieces[communicator.rank]:
            if piece.entry in own:
                packed[piece.offset : piece.offset + piece.stop - piece.start] = own[piece.entry]
        communicator.all_gather(HostMemory(packed[first:stop], dtype), HostMemory(packed, dtype), one.counts)
        wanted = set(present)
        for pieces in one.pieces:
            for piece in pieces:
                if piece.entry in wanted:
                    part = packed[piece.offset : piece.offset + piece.stop - piece.start]
                    wholes[piece.entry][piece.start : piece.stop] = part

    def _buffer(self, number: int) -> Array:
        """Memory through which small variables are gathered."""
        dtype = STORAGE[self._layout.plan.entries[self._layout.rounds[number].entries[0]].dtype]
        if dtype not in self._buffers:
            counts = [
                one.count
                for one in self._layout.rounds
                if not one.is_direct and STORAGE[self._layout.plan.entries[one.entries[0]].dtype] == dtype
            ]
            self._buffers[dtype] = np.empty(max(counts), dtype)
        return self._buffers[dtype][: self._layout.rounds[number].count]
