"""The functions of `import ring_plugins`: this process's place in the job, and collectives on arrays and tensors.

Each collective turns the caller's array into host memory (`core.arrays.memory`), finds or makes memory for the
result, and calls the communicator of all ranks, or of a group. Tensors on GPUs go to the functions that a framework's
plugin has registered in `gpu_functions`. `core.collectives.validation` has the checks for both.

The file is longer than others: half of it are the docstrings of public functions, which the documentation shows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from math import prod
from typing import Any, Protocol, TypeVar, cast

import numpy as np

from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.arrays.memory import HostMemory, OnDevice, host_array, host_memory
from ring_plugins.core.arrays.result_memory import SMALLEST, kept_results
from ring_plugins.core.base.arguments import wrong_call
from ring_plugins.core.base.errors import ArgumentError, MembersLost
from ring_plugins.core.base.places import called_here
from ring_plugins.core.base.types import Array
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.collectives.recovery import repeated
from ring_plugins.core.collectives.validation import check_splits, exchange_rows, rows_of, scatter_rows
from ring_plugins.core.groups import Group, communicator_of, root_in
from ring_plugins.core.members.changes import MembershipChange
from ring_plugins.core.world import current

C = TypeVar("C", bound=Callable[[MembershipChange], object])
F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

_was_size_asked = False


def rank() -> int:
    """Rank of this process in the job, from 0."""
    return current().topology.rank


def size() -> int:
    """Number of processes in the job."""
    global _was_size_asked
    _was_size_asked = True
    return current().topology.size


def was_size_asked() -> bool:
    """Whether the script has called `size`, as a script does to multiply its learning rate by it."""
    return _was_size_asked


def local_rank() -> int:
    """Rank among the processes of this host, from 0."""
    return current().topology.local_rank


def local_size() -> int:
    """Number of processes on this host."""
    return current().topology.local_size


def node_rank() -> int:
    """Number of this host in the job, from 0."""
    return current().topology.node_rank


def num_nodes() -> int:
    """Number of hosts in the job."""
    return current().topology.num_nodes


def on_membership_change(callback: C) -> C:
    """Call a function whenever ranks die or leave and the others go on, or join; needs `init(on_failure="continue")`.

    All remaining ranks call their functions at the same place, so these may use collectives: after the collective that
    noticed the loss, or at the end of backward, before the optimizer's step. For example:

        @ring.on_membership_change
        def fewer_samples(change):
            for group in optimizer.param_groups:
                group["lr"] *= change.size / change.size_before

    Args:
        callback: called with a `MembershipChange`, which has the attributes `lost`, `left`, `joined`, `rank_before`,
            `size_before`, `rank` and `size`. That collective or backward raises the callback's exceptions.

    Returns:
        The callback.

    Raises:
        ArgumentError: `callback` is not callable.
        NotInitialized: `init()` has not been called.
    """
    if not callable(callback):
        raise ArgumentError(f"callback={callback!r} is not a function of one argument.")
    current().elastic.add_change_callback(callback)
    return callback


def preempted() -> bool:
    """Whether the job was told to end, so that the script saves a checkpoint and leaves; equal on all ranks.

    Schedulers, Kubernetes and spot instances send SIGTERM some time before they kill a process, and SLURM sends SIGUSR1
    for `sbatch --signal=USR1@120`. From the first call on, both are only noted. It is enough if one rank gets one: the
    averages of the next backward carry the note to all of them. Call it on all ranks at the end of each step:

        for batch in batches:
            ...
            optimizer.step()
            if ring.preempted():
                save()              # on rank 0, as ever
                ring.barrier()      # nobody leaves while rank 0 writes
                sys.exit(143)

    With `on_failure="continue"` or `"replace"`, a rank that alone gets SIGTERM leaves, while the others go on and get
    False. They get True if too few would be left, or all were told.

    If no gradients were averaged on CPUs since the last call, it exchanges one number with the other ranks. A script
    that has handlers of its own for these signals keeps them.

    Raises:
        SystemExit: this rank leaves, and the others go on.
        PeerFailed: another rank failed meanwhile.
        NotInitialized: `init()` has not been called.
    """
    return current().elastic.is_preempted()


#: Called with the arguments of each collective, while somebody wants to know what the script exchanges.
argument_observers: list[Callable[[Iterable[Any]], object]] = []
#: A process that has yet to join the others may call these; they do nothing then.
_BEFORE_JOINING = ("barrier", "broadcast_parameters", "broadcast_optimizer_state")


def all_or_none(collective: F) -> F:
    """Let `collective` tell the other ranks if this one rejects it or is interrupted in it."""

    @wraps(collective)
    def telling(*args: Any, **options: Any) -> Any:
        world = current()
        if world.is_joining and collective.__name__ not in _BEFORE_JOINING:
            raise ArgumentError(
                f"{collective.__name__}() was called in a process that takes the place of a lost rank, before it has "
                "joined the others, which are training. Have each rank compute what it needs by itself, or put it into "
                "the TrainingState."
            )
        group = options.get("group")
        communicator = world.communicator if group is None else communicator_of(group)  # which raises outside of it
        before = communicator.statistics.operations
        world.elastic.end_if_all_are_told()
        for observe in argument_observers:
            observe([*args, *options.values()])
        try:
            result = collective(*args, **options)
        except Exception as error:
            world.elastic.end_if_all_are_told()  # another rank has done so already
            wrong = wrong_call(collective, args, options, error)
            communicator.reject(collective.__name__, wrong or error)
            if wrong is not None:
                raise wrong  # noqa: B904 - it says what it comes from
            raise
        except BaseException as error:
            if communicator.statistics.operations != before:  # some collectives exchange counts first
                communicator.interrupt(collective.__name__, error)
            raise
        if world.elastic.changes.untold:
            world.elastic.tell_changes()
        return result

    telling.checks_calls = True  # type: ignore[attr-defined]  # what base/arguments.py does, it does itself
    return cast("F", telling)


@all_or_none
def all_reduce(x: Any, op: Op = Op.AVERAGE, *, out: Any = None, wait: bool = True, group: Group | None = None) -> Any:
    """Combine `x` of all ranks; every rank gets the same bits.

    Args:
        x: numpy array, torch tensor on CPU or GPU, or number, of equal shape and dtype on all ranks. AVERAGE takes
            floats and complex numbers, MIN and MAX no complex numbers; 16-bit floats are summed in float32. All
            collectives reject a tensor that requires a gradient, unless gradients are disabled.
        op: AVERAGE, SUM, MIN, MAX or PRODUCT.
        out: where to put the result, `x` itself to reduce in place; a new array or tensor by default.
        wait: False returns a `Work` at once; its `wait()` returns the result. Do not touch `x` and `out` before that.
        group: whose ranks take part, by default all; only these call. "All ranks" then means its own.

    Returns:
        The result, of the same type as `x` (numpy for numbers).

    Raises:
        ArgumentError: the dtype or op is not supported, memory is read-only or on an unknown device, or this rank is
            not in the group.
        MismatchError: ranks gave different shapes, dtypes or ops.
        PeerFailed: another rank is gone.
    """
    if getattr(x, "requires_grad", False):
        _reject_gradient(x, "all_reduce")
    if wait is not True:
        _check_wait(wait)
    communicator = current().communicator if group is None else group.communicator
    try:
        return _in_place(communicator, "all_reduce", x, out, wait, communicator.all_reduce, op, reads_source=True)
    except OnDevice as error:
        return _on_gpu(x, error).all_reduce(x, op, out, wait, group)


@all_or_none
def broadcast(x: Any, root: int = 0, *, out: Any = None, wait: bool = True, group: Group | None = None) -> Any:
    """Return the root's `x` on every rank.

    Args:
        x: array, tensor or number, of equal shape and dtype on all ranks; only the root's values are used.
        root: a rank of the job, also with `group`.
        out: where to put the result, `x` itself to overwrite it; new by default.
        wait: False returns a `Work`.
        group: as in `all_reduce`.

    Raises:
        ArgumentError: `root` is not a rank; memory as in `all_reduce`.
        MismatchError: ranks gave different shapes, dtypes or roots.
    """
    _reject_gradient(x, "broadcast")
    if wait is not True:
        _check_wait(wait)
    communicator = current().communicator if group is None else group.communicator
    root = root_in(root, communicator, current())
    try:
        return _in_place(communicator, "broadcast", x, out, wait, communicator.broadcast, root)
    except OnDevice as error:
        return _on_gpu(x, error).broadcast(x, root, out, wait, group)


@all_or_none
def all_gather(x: Any, *, wait: bool = True, group: Group | None = None) -> Any:
    """Concatenate `x` of all ranks along the first dimension.

    Args:
        x: array, tensor or number. All dimensions but the first, and the dtype, must be equal on all ranks; a 0-d `x`
            counts as one row.
        wait: False returns a `Work`.
        group: as in `all_reduce`.

    Returns:
        Array or tensor of shape (sum of first dimensions, ...).

    Raises:
        MismatchError: dtypes or trailing dimensions differ.
    """
    _reject_gradient(x, "all_gather")
    if wait is not True:
        _check_wait(wait)
    communicator = current().communicator if group is None else group.communicator
    try:
        array, dtype = host_array(x)
    except OnDevice as error:
        return _on_gpu(x, error).all_gather(x, wait, group)

    def run() -> Any:
        source = np.atleast_1d(np.ascontiguousarray(array))
        trailing = source.shape[1:]
        lengths = [rows for (rows,) in exchange_rows(communicator, source.shape[:1], trailing, dtype, "all_gather")]
        result = _empty(x, source.dtype, (sum(lengths), *trailing))
        each = prod(trailing)
        communicator.all_gather(
            HostMemory(source.reshape(-1), dtype), host_memory(result), [rows * each for rows in lengths]
        )
        return result

    return _run(communicator, "all_gather", lambda: repeated(run), wait)


@all_or_none
def reduce_scatter(x: Any, op: Op = Op.AVERAGE, *, wait: bool = True, group: Group | None = None) -> Any:
    """Combine `x` of all ranks and give each rank one part of the result.

    Args:
        x: array or tensor of at least one dimension, of equal shape and dtype on all ranks. Its first dimension is cut
            into one part per rank; if it does not divide evenly, the first parts are one row longer.
        op: as in `all_reduce`; between hosts with several ranks each, 16-bit floats are rounded once for each host.
        wait: False returns a `Work`.
        group: as in `all_reduce`.

    Returns:
        This rank's part.

    Raises:
        ArgumentError: `x` is 0-d; dtype, op and memory as in `all_reduce`.
        MismatchError: ranks gave different shapes, dtypes or ops.
    """
    _reject_gradient(x, "reduce_scatter")
    if wait is not True:
        _check_wait(wait)
    communicator = current().communicator if group is None else group.communicator
    try:
        array, dtype = host_array(x)
    except OnDevice as error:
        return _on_gpu(x, error).reduce_scatter(x, op, wait, group)
    lengths = scatter_rows(rows_of(array.shape, "reduce_scatter"), communicator.size)

    def run() -> Any:
        source = np.ascontiguousarray(array)
        trailing = source.shape[1:]
        result = _empty(x, source.dtype, (lengths[communicator.rank], *trailing))
        each = prod(trailing)
        communicator.reduce_scatter(
            HostMemory(source.reshape(-1), dtype, None, _compared(source)),
            host_memory(result),
            [rows * each for rows in lengths],
            op,
        )
        return result

    return _run(communicator, "reduce_scatter", run, wait)


@all_or_none
def all_to_all(x: Any, splits: Sequence[int] | None = None, *, wait: bool = True, group: Group | None = None) -> Any:
    """Send part i of `x` to rank i, and receive a part from every rank.

    Args:
        x: array or tensor of at least one dimension; dtype and trailing dimensions equal on all ranks.
        splits: how many rows of `x` go to each rank; they add up to its first dimension. Equal parts by default.
        wait: False returns a `Work`.
        group: as in `all_reduce`.

    Returns:
        The received parts in rank order along the first dimension.

    Raises:
        ArgumentError: `x` is 0-d, `splits` do not add up, or `x` cannot be cut equally.
        MismatchError: dtypes or trailing dimensions differ.
    """
    _reject_gradient(x, "all_to_all")
    if wait is not True:
        _check_wait(wait)
    communicator = current().communicator if group is None else group.communicator
    try:
        array, dtype = host_array(x)
    except OnDevice as error:
        return _on_gpu(x, error).all_to_all(x, splits, wait, group)
    sent = check_splits(splits, rows_of(array.shape, "all_to_all"), communicator.size)

    def run() -> Any:
        source = np.ascontiguousarray(array)
        trailing = source.shape[1:]
        rows_by_rank = exchange_rows(communicator, sent, trailing, dtype, "all_to_all")
        if len(rows_by_rank) != len(sent):
            raise MembersLost(
                f"all_to_all: x has parts for {len(sent)} ranks, of which {len(rows_by_rank)} are left; it has not "
                "happened. Call it again, with a part for each of these.",
                -1,
            )
        received = [theirs[communicator.rank] for theirs in rows_by_rank]
        result = _empty(x, source.dtype, (sum(received), *trailing))
        each = prod(trailing)
        communicator.all_to_all(
            HostMemory(source.reshape(-1), dtype),
            [rows * each for rows in sent],
            host_memory(result),
            [rows * each for rows in received],
        )
        return result

    return _run(communicator, "all_to_all", run, wait)


@all_or_none
def barrier(*, group: Group | None = None) -> None:
    """Return when all ranks have called it, or those of a group."""
    (current() if group is None else group).communicator.barrier()


@all_or_none
def broadcast_object(item: Any, root: int = 0, *, group: Group | None = None) -> Any:
    """Return the root's object on every rank.

    Args:
        item: a picklable object; only the root's is used.
        root: a rank of the job.
        group: as in `all_reduce`.

    Raises:
        ArgumentError: `root` is not a rank, or not in the group.
    """
    communicator = current().communicator if group is None else group.communicator
    return communicator.broadcast_object(item, root_in(root, communicator, current()))


@all_or_none
def all_gather_object(item: Any, *, group: Group | None = None) -> list[Any]:
    """Return the objects of all ranks, in rank order.

    Args:
        item: this rank's object, which must be picklable.
        group: as in `all_reduce`.
    """
    return (current() if group is None else group).communicator.all_gather_object(item)


def _check_wait(wait: Any) -> None:
    """Reject a text such as "no", which counts as true, and other objects.

    Raises:
        ArgumentError: it is neither True nor False.
    """
    if not isinstance(wait, (bool, int, np.bool_)):
        raise ArgumentError(f"wait={wait!r:.60} must be True or False.")


def _reject_gradient(x: Any, function: str) -> None:
    """Reject a tensor that needs a gradient: the result would have none, and the loss would lack a term.

    Raises:
        ArgumentError: `x` requires a gradient, and its framework records gradients now.
    """
    if getattr(x, "requires_grad", False) is not True:
        return
    for base in type(x).__mro__:  # a user's own tensor class comes before the framework's
        framework = base.__module__.partition(".")[0]
        records = getattr(sys.modules.get(framework), "is_grad_enabled", None)
        if records is not None and records():
            raise ArgumentError(
                f"x requires a gradient, which ring_plugins.{function} does not pass on. Pass x.detach(), for example "
                f"to log a value, or call ring_plugins.{framework}.{function}, which passes gradients between ranks."
            )


def _in_place(
    communicator: Communicator,
    name: str,
    x: Any,
    out: Any,
    wait: bool,
    operate: Callable[[HostMemory, T], None],
    argument: T,
    reads_source: bool = False,
) -> Any:
    """Run an in-place operation on `out`, or on new memory, that holds a copy of `x`.

    Args:
        communicator: of the operation.
        name: of the operation.
        x, out, wait: as the caller gave them.
        operate: the operation, in place, called with the memory and `argument`.
        argument: its op or root.
        reads_source: whether `operate` reads `HostMemory.source`, which saves the copy.

    Returns:
        The result, or its `Work` if `wait` is False.
    """
    source, dtype = host_array(x)
    flags = source.flags
    if out is x and wait and flags.c_contiguous and flags.writeable:
        operate(HostMemory(_flat(source), dtype, None, _compared(source)), argument)
        return x
    if out is None and wait and reads_source and flags.c_contiguous:
        if type(x) is np.ndarray and x.dtype is source.dtype and source.nbytes < SMALLEST:
            result = np.empty(source.shape, source.dtype)  # as below, in fewer calls: small messages are called often
            if source.ndim == 1:
                operate(tuple.__new__(HostMemory, (result, dtype, source, ())), argument)
            else:
                operate(HostMemory(result.reshape(-1), dtype, source.reshape(-1), _compared(source)), argument)
            return result
        result = _empty(x, source.dtype, source.shape)
        operate(HostMemory(_flat(host_array(result)[0]), dtype, _flat(source), _compared(source)), argument)
        return result
    result = _empty(x, source.dtype, source.shape) if out is None else out
    memory, store = _writable(result, "out")
    if memory.dtype != dtype or memory.array.size != source.size:
        raise ArgumentError(
            f"out has {memory.array.size} elements of {memory.dtype}, but x has {source.size} of {dtype}."
        )
    shape = tuple(getattr(result, "shape", ()))
    if shape != source.shape and max(len(shape), source.ndim) > 1:
        raise ArgumentError(f"out has shape {shape}, but x has {source.shape}; pass out.reshape({source.shape}).")
    read = None
    if reads_source and flags.c_contiguous and not np.may_share_memory(source, memory.array):
        read = _flat(source)
    memory = HostMemory(memory.array, dtype, read, _compared(source))

    def run() -> Any:
        if out is not x and memory.source is None:
            np.copyto(memory.array.reshape(source.shape), source)
        operate(memory, argument)
        store()
        return result

    return _run(communicator, name, run, wait)


def _compared(array: Array) -> tuple[int, ...]:
    """The shape for a `HostMemory`; of one dimension or none, the number of elements says enough."""
    return array.shape if array.ndim > 1 else ()


def _flat(array: Array) -> Array:
    """A contiguous array in one dimension. Most have one, and small messages save the time of `reshape`."""
    return array if array.ndim == 1 else array.reshape(-1)


def _run(communicator: Communicator, name: str, function: Callable[[], Any], wait: bool) -> Any:
    """The result of `function`, or its `Work` if `wait` is False."""
    return function() if wait else communicator.start(name, called_here(function))


def _empty(x: Any, storage: np.dtype[Any], shape: tuple[int, ...]) -> Any:
    """New memory of the type of `x` in some shape; of dtype `storage` if `x` has none."""
    is_tensor = hasattr(x, "new_empty")
    # torch's own function, for tensors of torch's own class; others know best how to make one of theirs
    over: Any = getattr(sys.modules.get(type(x).__module__), "from_numpy", None) if is_tensor else None
    kept = kept_results.new(prod(shape) * storage.itemsize) if over is not None or not is_tensor else None
    dtype = x.dtype if isinstance(x, np.ndarray) else storage
    if kept is None:
        return x.new_empty(shape) if is_tensor else np.empty(shape, dtype)
    array = kept.view(dtype).reshape(shape)
    if not is_tensor:
        return array
    result = over(array)
    result = result if result.dtype is x.dtype else result.view(x.dtype)  # bfloat16, which numpy has not
    return result if type(result) is type(x) else x.new_empty(shape)


def _writable(result: Any, name: str) -> tuple[HostMemory, Callable[[], None]]:
    """Contiguous memory for a result, and a function to call once it holds the result."""
    array, dtype = host_array(result, name)
    if not array.flags.writeable:
        raise ArgumentError(
            f"{name} is read-only memory and cannot take the result; leave it out and use what is returned, or pass a "
            "writable copy, such as a numpy array."
        )
    if array.flags.c_contiguous:
        return HostMemory(_flat(array), dtype), lambda: None
    staged = np.ascontiguousarray(array)
    return HostMemory(staged.reshape(-1), dtype), lambda: np.copyto(array, staged)


class GpuFunctions(Protocol):
    """The collectives for one framework's tensors on GPUs; arguments as above, but `root` is a place in the group."""

    def all_reduce(self, x: Any, op: Op, out: Any, wait: bool, group: Group | None) -> Any: ...

    def broadcast(self, x: Any, root: int, out: Any, wait: bool, group: Group | None) -> Any: ...

    def all_gather(self, x: Any, wait: bool, group: Group | None) -> Any: ...

    def reduce_scatter(self, x: Any, op: Op, wait: bool, group: Group | None) -> Any: ...

    def all_to_all(self, x: Any, splits: Sequence[int] | None, wait: bool, group: Group | None) -> Any: ...


#: By the name of a framework's package, the functions for its tensors on GPUs. The framework's plugin registers them.
gpu_functions: dict[str, GpuFunctions] = {}


def _on_gpu(x: Any, error: OnDevice) -> GpuFunctions:
    framework = type(x).__module__.partition(".")[0]
    if framework == "torch" and framework not in gpu_functions:
        raise ArgumentError(f"{error} For tensors on GPUs, `import ring_plugins.{framework}`.") from error
    if framework not in gpu_functions:
        raise ArgumentError(f"{error} On GPUs, only tensors of torch are supported.") from error
    return gpu_functions[framework]
