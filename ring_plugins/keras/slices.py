"""Which part of each variable a rank updates, and this rank's parts as variables."""

from __future__ import annotations

import abc
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from ring_plugins.core.arrays.dtypes import STORAGE
from ring_plugins.core.arrays.memory import HostMemory, host_array
from ring_plugins.core.base.errors import ArgumentError, MismatchError
from ring_plugins.core.base.types import Array
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.gradients.fusion import Entry, FusionPlan
from ring_plugins.core.gradients.slices import ROUND_SIZES, Piece, SliceGather, UpdateComparison, plan_rounds

#: A variable with so many rows per rank is cut between rows, which leaves the ranks within a few percent of each other.
_ROWS = 16


def describe_gradient(index: int, variable: Any) -> Entry:
    """Describe a variable's gradient, without its path: automatic layer names have a counter per process."""
    dtype = keras.backend.standardize_dtype(variable.dtype)
    if dtype not in STORAGE:
        raise ArgumentError(f"variable {variable.path} has dtype={dtype}, whose gradients cannot be averaged.")
    count = math.prod(int(length) for length in variable.shape)
    return Entry(f"variable {index} ({variable.name})", dtype, count, f"shape {tuple(variable.shape)}")


class SliceLayout:
    """Which range of each variable every rank updates; arithmetic on shapes, the same on all ranks.

    Args:
        variables: that the optimizer updates.
        rank, size: among those that share the work.
        between_rows: whether to cut between rows where there are many, for gradients that have only some rows.

    Attributes:
        rounds: variables that are gathered by one collective.
        ranges: by variable, this rank's first element and the one behind its last.
    """

    def __init__(self, variables: Sequence[Any], rank: int, size: int, between_rows: bool = False) -> None:
        self._shapes = [tuple(int(length) for length in variable.shape) for variable in variables]
        self.plan = FusionPlan([describe_gradient(i, variable) for i, variable in enumerate(variables)], ROUND_SIZES)
        grains = None
        if between_rows:
            are_cut = [len(shape) > 1 and shape[0] >= _ROWS * size for shape in self._shapes]
            grains = [
                max(1, math.prod(shape[1:])) if is_cut else 1
                for shape, is_cut in zip(self._shapes, are_cut, strict=True)
            ]
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


class Slices(abc.ABC):
    """This rank's parts of an optimizer's variables, as variables of their own that the optimizer can update.

    Args:
        variables: all variables that the optimizer updates.
        rank, size: among those that share the work.

    Attributes:
        layout: which parts are whose.
        variables: by variable this rank's part: the variable itself if it is this rank's as a whole, maybe empty.
            Only between `load` and `gather` they have values.

    Raises:
        ArgumentError: a variable is on a GPU, on TensorFlow and JAX; or variables are on several devices.
    """

    #: Whether gradients may have only some rows.
    between_rows = False
    #: Whether parts are views of the variables' memory.
    in_place = False
    #: Whether they may be in the memory of a GPU.
    on_gpus = False

    def __init__(self, variables: Sequence[Any], rank: int, size: int) -> None:
        for variable in variables:
            if not self.on_gpus and self._is_on_gpu(variable):
                raise ArgumentError(
                    f"{variable.path} is on a GPU, where sharded optimizers update variables of torch only, since "
                    f"{keras.backend.backend()} gives no access to their memory in a step. Leave out shard_optimizer, "
                    "or set KERAS_BACKEND=torch."
                )
        self._wholes = list(variables)
        self.layout = SliceLayout(variables, rank, size, self.between_rows)
        self._parts = [i for i in range(len(variables)) if not self.layout.is_whole(i)]
        self.variables = list(variables)
        for i in self._parts:
            whole = variables[i]
            with keras.device("cpu"):
                part = keras.Variable(
                    "zeros", self.layout.shape(i), whole.dtype, trainable=False, autocast=False, name=whole.name
                )
            # Optimizers treat it as the whole: names of slot variables begin with its path.
            part._path = whole.path
            part.overwrite_with_gradient = getattr(whole, "overwrite_with_gradient", False)
            self.variables[i] = part

    @abc.abstractmethod
    def _is_on_gpu(self, variable: Any) -> bool: ...

    def connect(self, communicator: Communicator[Any], loaded: int) -> None:
        """Use this communicator from now on. `loaded` describes the checkpoints that this rank has loaded."""
        self.loaded = loaded
        self._comparison = UpdateComparison(
            communicator,
            "Each rank updates a part of the weights, so all must update in the same way: set the same options and "
            "load the same checkpoint on all ranks.",
        )
        self._gather = self._gathering(communicator)

    def _gathering(self, communicator: Communicator[Any]) -> SliceGather:
        return SliceGather(self.layout.plan, self.layout.rounds, communicator, self.in_place)

    def disconnect(self) -> None:
        """Close what `connect` has made besides the communicator; it may have been closed before."""
        return

    def compare(self, options: dict[str, object]) -> None:
        """Compare among the ranks what an update depends on besides gradients. Collective.

        Raises:
            MismatchError: on all ranks, if something differs.
        """
        options = {**options, "the loaded checkpoint": self.loaded}
        if self._comparison.differs(zlib.crc32(repr(list(options.values())).encode())):
            raise self._comparison.explain(options) or MismatchError("a sharded update differs among the ranks.")

    @abc.abstractmethod
    def load(self, i: int) -> None:
        """Give a part, which is not whole, the value of its variable."""

    @abc.abstractmethod
    def cut(self, i: int, gradient: Any) -> Any:
        """The part of a variable's gradient that belongs to this rank's part, which is not whole."""

    def rounds(self, indices: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
        """By number, those with variables that were updated and are not empty, and these variables."""
        entries = self.layout.plan.entries
        for number, one in enumerate(self.layout.rounds):
            if present := [i for i in one.entries if i in indices and entries[i].count]:
                yield number, present

    @abc.abstractmethod
    def gather(self, indices: Sequence[int], options: dict[str, Any]) -> None:
        """Give these variables the values of all ranks' parts. Collective; called in a step, traced or eagerly.

        Args:
            indices: of the variables that were updated, the same on all ranks.
            options: scalars that must be equal on all ranks, by what to call them in an error.
        """


class CutStore:
    """A store of variables, of which slots are cut to this rank's part."""

    def __init__(self, store: Any, slots: Mapping[str, Any], cut: Callable[[Any, Any], Array]) -> None:
        self._store, self._slots, self._cut = store, slots, cut

    def keys(self) -> Any:
        return self._store.keys()

    def __getitem__(self, key: str) -> Any:
        value = self._store[key]
        return self._cut(self._slots[key], value) if key in self._slots else value


def gather_slot(slot: Any, variable: Any, counts: Sequence[int], communicator: Communicator[Any]) -> Array:
    """All of a slot variable. Collective."""
    mine = np.array(keras.ops.convert_to_numpy(slot), order="C")
    whole = np.empty(tuple(variable.shape), mine.dtype)
    (part, dtype), (out, _) = host_array(mine), host_array(whole)
    source, target = HostMemory(part.reshape(-1), dtype), HostMemory(out.reshape(-1), dtype)
    communicator.start(
        "saving a sharded optimizer, in which all ranks take part,",
        lambda: communicator.all_gather(source, target, counts),
    ).wait()
    return whole
