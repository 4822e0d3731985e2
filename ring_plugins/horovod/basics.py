"""What all of Horovod's modules share: the job, reductions, names of operations, compression and process sets."""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, ParamSpec, TypeVar, cast

import numpy as np

import ring_plugins as ring
from ring_plugins.core.arrays.codec import CodecName
from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.base.arguments import wrong_call
from ring_plugins.core.base.errors import ArgumentError, DeviceError, MismatchError, MissingDependency
from ring_plugins.core.functions import all_or_none
from ring_plugins.core.gpu import load_nccl
from ring_plugins.core.groups import Group, communicator_of
from ring_plugins.core.world import current
from ring_plugins.horovod import named, part, settings
from ring_plugins.horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from ring_plugins.horovod.common.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    group_of,
    remove_process_set,
)

P = ParamSpec("P")
T = TypeVar("T")

#: What every module of Horovod has.
__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather_object",
    "barrier",
    "broadcast_object",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
]

Average, Sum, Min, Max, Product = Op.AVERAGE, Op.SUM, Op.MIN, Op.MAX, Op.PRODUCT


class _Adasum:
    """Scripts may name it, as in `op=hvd.Adasum if args.use_adasum else hvd.Average`; what gets it says what to use."""

    def __repr__(self) -> str:
        return "hvd.Adasum"


Adasum = _Adasum()

shutdown, is_initialized = ring.shutdown, ring.is_initialized
rank, local_rank, local_size = ring.rank, ring.local_rank, ring.local_size
cross_rank, cross_size = ring.node_rank, ring.num_nodes


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Join the job.

    Args:
        comm: ranks of the launcher, or a communicator of mpi4py, which become a job: see `part.become_part`.
        process_sets: to be added, in a list; "dynamic" has no effect, since sets can always be added.

    Raises:
        ArgumentError, MismatchError: as for `part.become_part` and `add_process_set`.
    """
    is_new = not is_initialized()
    settings.init()
    if comm is not None and comm != []:
        part.become_part(comm, is_new)
        settings.tell_place()
    for process_set in () if isinstance(process_sets, str) else process_sets or ():
        add_process_set(process_set)


def size(process_set: Any = None) -> int:
    """Number of processes in the job, or in a process set."""
    # Not ring.size(), after which the warm-up warns of a rate that is multiplied twice: here the script has to do it.
    group = group_of(process_set)
    return current().topology.size if group is None else group.size


def is_homogeneous() -> bool:
    """Whether every host runs the same number of processes."""
    return len(set(current().communicator.all_gather_object(local_size(), "is_homogeneous"))) == 1


def _true() -> bool:
    """True: this package brings it along."""
    return True


def _false() -> bool:
    """False: this package does not use it."""
    return False


gloo_built = gloo_enabled = mpi_threads_supported = mpi_built = mpi_enabled = _true
ddl_built = ccl_built = cuda_built = rocm_built = _false


@lru_cache
def nccl_built() -> int:
    """The version of the NCCL library that is found, such as 22707 for 2.27.7; 0 if there is none."""
    try:
        return load_nccl().version
    except (DeviceError, MissingDependency):
        return 0


def barrier(process_set: Any = None) -> None:
    """Return when all ranks have called it, or those of a process set."""
    ring.barrier(group=group_of(process_set))


@all_or_none
def join(device: Any = -1) -> int:
    """Wait until all ranks have called it, as one that runs out of data before others.

    Meanwhile sums and averages of `allreduce` count this rank as zeros: named ones always, others on one host.

    Args:
        device: has no effect.

    Returns:
        The rank that came last.

    Raises:
        MismatchError: another rank is in an operation without a name, between hosts or on GPUs.
    """
    world = current()
    calls, ranks, communicator = world.named_calls, world.world_ranks, world.communicator
    named.leave_gpus()
    if calls is None:
        came = communicator.all_gather_object(time.time(), named.JOIN)
        return max(range(len(came)), key=lambda rank: (came[rank], rank))
    calls.join(ranks)
    while True:
        try:
            communicator.all_gather_object(None, named.JOIN)
            break
        except MismatchError:  # what another rank has called; it calls that again as a named operation
            communicator.check()
    last = ranks.index(calls.wait_for_all_joined(ranks))
    named.all_have_joined()
    return last


def told(function: Callable[P, T], by_name: bool = False) -> Callable[P, T]:
    """`all_or_none`, among the processes of the call's `process_set`; or among those that wait for its name.

    Args:
        function: to wrap.
        by_name: whether operations that have a name are matched by it.
    """
    names, among_all = list(inspect.signature(function).parameters), all_or_none(function)

    @wraps(function)
    def telling(*args: P.args, **options: P.kwargs) -> T:
        given = dict(zip(names, args, strict=False)) | options
        process_set, name = given.get("process_set"), given.get("name") if by_name else None
        if (process_set is None or process_set is global_process_set) and name is None:
            return among_all(*args, **options)
        communicator = communicator_of(group_of(process_set))  # raises outside, which concerns nobody else
        try:
            return function(*args, **options)
        except Exception as error:
            wrong = wrong_call(function, args, options, error)
            calls = current().named_calls
            if isinstance(name, str) and calls is not None:
                calls.refuse(communicator.ranks, name, wrong or error)
            else:
                communicator.reject(function.__name__, wrong or error)
            if wrong is not None:
                raise wrong  # noqa: B904 - it says what it comes from
            raise

    telling.checks_calls = True  # type: ignore[attr-defined]  # as what all_or_none returns
    return telling


class Compressor:
    """How tensors are sent. Subclasses of a script's own may be given to functions that take `compression`."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """What is sent instead of a tensor, and what `decompress` needs to know of it."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """What the script gets, from what has been made of all ranks' tensors."""
        return tensor


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    codec = None


class FP16Compressor(Compressor):
    """Sends floats in 16 bits."""

    codec = "fp16"

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """The tensor in 16 bits, if it holds floats, and its dtype."""
        return cast_to(tensor, "float16") if _holds_floats(tensor) else tensor, tensor.dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """The tensor in its dtype before."""
        return cast_to(tensor, ctx) if _holds_floats(tensor) else tensor


class Int8Compressor(Compressor):
    """Sends an optimizer's gradients in 8 bits between hosts; single operations send tensors as they are."""

    codec = "int8"


class Compression:
    """How gradients are sent: as they are (`none`), in 16 bits (`fp16`), or in 8, which Horovod has not (`int8`)."""

    none, fp16, int8 = NoneCompressor, FP16Compressor, Int8Compressor


def compressor_of(compression: Any) -> Compressor:
    """The `compression` of a function that reduces tensors.

    Raises:
        ArgumentError: it has no `compress` and `decompress`.
    """
    if callable(getattr(compression, "compress", None)) and callable(getattr(compression, "decompress", None)):
        return cast("Compressor", compression)
    raise ArgumentError(
        f"compression={compression!r:.60} must be hvd.Compression.none, hvd.Compression.fp16 or a class with their "
        "methods compress and decompress."
    )


def check_compression(compression: Any) -> CodecName | None:
    """What an optimizer's `compression` is called here.

    Raises:
        ArgumentError: it is none of `Compression`'s: buckets hold many gradients, and are not a script's tensors.
    """
    if "codec" in getattr(compression, "__dict__", ()):  # not that of a base
        return cast("CodecName | None", compression.codec)
    raise ArgumentError(
        f"compression={compression!r:.60} of an optimizer must be hvd.Compression.none, .fp16 or .int8. A "
        "compressor of your own works in hvd.allreduce(tensor, compression=...) and hvd.reducescatter."
    )


def cast_to(x: Any, dtype: Any) -> Any:
    """An array of numpy, or a tensor of torch or TensorFlow, in another dtype of its library; floats by their name."""
    names = [base.__module__.partition(".")[0] for base in type(x).__mro__]  # a class of the script's own comes first
    library = next(sys.modules[name] for name in names if name in ("torch", "tensorflow", "numpy"))
    if isinstance(dtype, str):
        dtype = getattr(library, dtype)
    if hasattr(x, "astype"):
        return x.astype(dtype)
    return x.to(dtype) if hasattr(x, "to") else library.cast(x, dtype)


def _holds_floats(tensor: Any) -> bool:
    dtype = tensor.dtype
    found = getattr(dtype, "is_floating_point", getattr(dtype, "is_floating", None))  # torch's, TensorFlow's
    return dtype.kind == "f" if found is None else bool(found)


def scaled(x: Any, factor: float, is_whole: bool) -> Any:
    """Multiply an array or tensor in its dtype, as Horovod does.

    Integers are multiplied in float64, and lose what is behind the point; floats of 16 bits are multiplied in float32,
    on GPUs by a factor that is rounded to float16.

    Args:
        x: of numpy, torch or TensorFlow.
        factor: `prescale_factor` or `postscale_factor`.
        is_whole: whether it holds integers.
    """
    if factor == 1.0:
        return x
    bytes_each = getattr(x.dtype, "itemsize", None) or x.dtype.size  # TensorFlow's word
    wide = "float64" if is_whole else "float32" if bytes_each == 2 else None
    if getattr(x, "is_cuda", False) and "float16" in str(x.dtype) and "bfloat16" not in str(x.dtype):
        factor = float(np.float16(factor))
    return x * factor if wide is None else cast_to(cast_to(x, wide) * factor, x.dtype)


def reduction_of(op: Op, postscale_factor: float, size: int, is_whole: bool) -> tuple[Op, float]:
    """The reduction to call for Horovod's, and the factor after it: averages of integers are scaled sums."""
    return (Sum, postscale_factor / size) if is_whole and op is Average else (op, postscale_factor)


def op_of(average: bool | None, op: Any) -> Op:
    """The reduction that Horovod's two arguments for it mean.

    Args:
        average: its older argument.
        op: its newer argument, which wins in no case: Horovod rejects both together.
    """
    if average is not None and op is not None:
        raise ArgumentError(f"average={average!r} and op={op!r} say the same thing; pass only op.")
    if not isinstance(average, bool | None):
        raise ArgumentError(
            f"average={average!r:.60} is neither True nor False; better pass op=hvd.Average or hvd.Sum."
        )
    if op is None:
        return Sum if average is False else Average
    if op is Adasum:
        raise ArgumentError(
            "op=hvd.Adasum is not built here. Pass op=hvd.Average, with the learning rate of one rank times hvd.size() "
            "after some epochs of warm-up."
        )
    if not isinstance(op, Op):
        raise ArgumentError(f"op={op!r} must be hvd.Average, hvd.Sum, hvd.Min, hvd.Max or hvd.Product.")
    return op


def gradient_factor(op: Any, gradient_predivide_factor: float, size: int) -> int:
    """What averages of gradients are multiplied by for the op of an optimizer: 1 for averages, `size` for sums.

    Args:
        op: of the optimizer.
        gradient_predivide_factor: only moves a part of the division before the sum, which is exact here either way.
        size: number of ranks.

    Raises:
        ArgumentError: `op` is neither Average nor Sum, or the factor is not positive, or there is one with Sum.
    """
    if op_of(None, op) not in (Average, Sum):
        raise ArgumentError(f"op={op!r} is not supported for gradients; pass hvd.Average or hvd.Sum.")
    if gradient_predivide_factor <= 0:
        raise ArgumentError(f"gradient_predivide_factor={gradient_predivide_factor!r} is not a positive number.")
    if op is Sum and gradient_predivide_factor != 1.0:
        raise ArgumentError("gradient_predivide_factor is a part of an average; leave it out with op=hvd.Sum.")
    return size if op is Sum else 1


def check_name(kind: str, name: str | None, group: Group | None = None) -> None:
    """Compare the name of an operation among the ranks, or those of a group; collective unless it is None.

    Horovod matches operations by name, whatever their order. Here they match by order, so that two operations of equal
    shapes which ranks call in different orders would be mixed up in silence.

    Raises:
        MismatchError: ranks are in operations of different names.
    """
    communicator = communicator_of(group)
    if name is None or communicator.size == 1:
        return
    named = communicator.all_gather_object((kind, name), "comparison of names")
    if len(set(named)) > 1:
        ranks = communicator.ranks
        texts = ", ".join(f"rank {rank}: name={name!r}" for rank, (_, name) in zip(ranks, named, strict=True))
        raise MismatchError(
            f"the ranks are in {kind} operations of different names ({texts}). Call named operations in the same order "
            "on all ranks: here they match by order, not by name."
        )


def begin(kind: str, name: str | None, process_set: Any) -> Group | None:
    """Check what every operation takes: its process set, and its name, which ranks compare if it has one.

    Returns:
        The ranks that take part, None for all.
    """
    group = group_of(process_set)
    check_name(kind, name, group)
    return group


@told
def allgather_object(obj: Any, name: str | None = None, process_set: Any = None) -> list[Any]:
    """The objects of all ranks, in rank order."""
    return ring.all_gather_object(obj, group=begin("allgather_object", name, process_set))


@told
def broadcast_object(obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: Any = None) -> Any:
    """The root's object, on every rank; the root is a rank of the job."""
    return ring.broadcast_object(obj, root_rank, group=begin("broadcast_object", name, process_set))
