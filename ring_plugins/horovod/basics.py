"""What all of Horovod's modules share: the job, reductions, names of operations, compression and process sets."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Concatenate, Literal, NoReturn, ParamSpec, TypeVar, cast

import ring_plugins as ring
from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.base.errors import ArgumentError, MismatchError
from ring_plugins.core.functions import all_or_none
from ring_plugins.core.gpu.library import nccl_candidates
from ring_plugins.core.world import current
from ring_plugins.horovod import settings

P = ParamSpec("P")
T = TypeVar("T")
Result = TypeVar("Result")
Results = TypeVar("Results")

#: What every module of Horovod has.
__all__ = [
    "Average",
    "Compression",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
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
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "rocm_built",
    "shutdown",
    "size",
]

Average, Sum, Min, Max, Product = Op.AVERAGE, Op.SUM, Op.MIN, Op.MAX, Op.PRODUCT

shutdown, is_initialized = ring.shutdown, ring.is_initialized
rank, local_rank, local_size = ring.rank, ring.local_rank, ring.local_size
cross_rank, cross_size = ring.node_rank, ring.num_nodes
barrier = ring.barrier


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Join the job. Horovod's `comm` and `process_sets` have to stay away: all processes take part."""
    if comm:
        raise ArgumentError(f"comm={comm!r} is not supported: all processes that were started take part in the job.")
    if process_sets:
        raise _no_process_sets("process_sets", process_sets)
    settings.init()


def size() -> int:
    """Number of processes in the job."""
    # Not ring.size(), after which the warm-up warns of a rate that is multiplied twice: here the script has to do it.
    return current().topology.size


def is_homogeneous() -> bool:
    """Whether every host runs the same number of processes."""
    topology = current().topology
    return len(set(current().communicator.all_gather_object(topology.local_size, "is_homogeneous"))) == 1


def _true() -> bool:
    """True: this package brings it along."""
    return True


def _false() -> bool:
    """False: this package does not use it."""
    return False


gloo_built = gloo_enabled = mpi_threads_supported = mpi_built = mpi_enabled = _true
ddl_built = ccl_built = cuda_built = rocm_built = _false


def nccl_built() -> bool:
    """Whether an NCCL library is found."""
    return bool(nccl_candidates())


class ProcessSet:
    """The set of all processes, the only one: `hvd.global_process_set`."""

    process_set_id = 0

    def __init__(self, ranks: Any = None) -> None:
        raise _no_process_sets("ranks", ranks)

    def included(self) -> bool:
        """True: this process is among all."""
        return True

    def rank(self) -> int:
        """This process's rank."""
        return rank()

    def size(self) -> int:
        """Number of processes."""
        return size()

    @property
    def ranks(self) -> list[int]:
        """All ranks."""
        return list(range(size()))


global_process_set = ProcessSet.__new__(ProcessSet)  # scripts cannot make any


def check_process_set(process_set: Any) -> None:
    """Reject a set of some processes."""
    if process_set is not None and process_set is not global_process_set:
        raise _no_process_sets("process_set", process_set)


def _no_process_sets(argument: str, value: Any) -> ArgumentError:
    return ArgumentError(
        f"{argument}={value!r} is not supported: collectives here are among all ranks. With PyTorch, "
        'torch.distributed.init_process_group("ring") and new_group(ranks) make groups of some ranks.'
    )


class Compression:
    """How gradients are sent: `Compression.none`, or in 16 bits with `Compression.fp16`."""

    none: None = None
    fp16: Literal["fp16"] = "fp16"


def check_compression(compression: Any) -> Literal["fp16"] | None:
    """Return it if it is one of `Compression`'s, else reject it."""
    if compression not in (None, "fp16"):
        raise ArgumentError(f"compression={compression!r} must be hvd.Compression.none or hvd.Compression.fp16.")
    return "fp16" if compression == "fp16" else None


def op_of(average: bool | None, op: Op | None) -> Op:
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
    if not isinstance(op, Op):
        raise ArgumentError(f"op={op!r} must be hvd.Average, hvd.Sum, hvd.Min, hvd.Max or hvd.Product.")
    return op


def check_averages(op: Op, gradient_predivide_factor: float) -> None:
    """Reject other reductions of gradients than their average.

    Args:
        op: of the optimizer.
        gradient_predivide_factor: only moves a part of the division before the sum, which is exact here either way.
    """
    if op_of(None, op) is not Average:
        raise ArgumentError(
            f"op={op!r} is not supported for gradients, which are averaged here; multiply the learning rate by "
            "hvd.size() instead of using hvd.Sum."
        )
    if gradient_predivide_factor <= 0:
        raise ArgumentError(f"gradient_predivide_factor={gradient_predivide_factor!r} is not a positive number.")


def check_name(kind: str, name: str | None) -> None:
    """Compare the name of an operation among the ranks; collective unless it is None.

    Horovod matches operations by name, whatever their order. Here they match by order, so that two operations of equal
    shapes which ranks call in different orders would be mixed up in silence.

    Raises:
        MismatchError: ranks are in operations of different names.
    """
    if name is None or size() == 1:
        return
    named = current().communicator.all_gather_object((kind, name), "comparison of names")
    if len(set(named)) > 1:
        texts = ", ".join(f"rank {rank}: name={name!r}" for rank, (_, name) in enumerate(named))
        raise MismatchError(
            f"the ranks are in {kind} operations of different names ({texts}). Call named operations in the same order "
            "on all ranks: here they match by order, not by name."
        )


def begin(kind: str, name: str | None, process_set: Any) -> None:
    """Check what every operation on tensors takes: its process set, and its name, which ranks compare if it has one."""
    check_process_set(process_set)
    check_name(kind, name)


def grouped(
    single: Callable[Concatenate[T, P], Result], gather: Callable[[list[Result]], Results], compares_names: bool = True
) -> Callable[Concatenate[Sequence[T], P], Results]:
    """Horovod's operation on several tensors, with the arguments of its operation on one.

    Args:
        single: the operation on one tensor, whose first argument is `tensor`.
        gather: makes the result out of the results for each tensor.
        compares_names: whether ranks compare the name once for the whole group, instead of once for each tensor.
    """
    takes = inspect.signature(single)
    tensor, *others = takes.parameters.values()
    kind = f"grouped_{single.__name__}"

    @wraps(cast("Callable[..., Any]", inspect.unwrap(single)))
    def operation(tensors: Any, *arguments: Any, **options: Any) -> Any:
        given = takes.bind(None, *arguments, **options).arguments
        del given["tensor"]
        if compares_names:
            check_name(kind.removesuffix("_").removesuffix("_async"), given.pop("name", None))
        return gather([cast("Any", single)(tensor, **given) for tensor in tensors])

    operation.__name__ = operation.__qualname__ = kind
    operation.__doc__ = f"`{single.__name__}` of several tensors; further arguments as there."
    first = tensor.replace(name="tensors", annotation=f"Sequence[{tensor.annotation}]")
    returns = f"list[{takes.return_annotation}]" if gather is list else takes.return_annotation
    operation.__signature__ = inspect.Signature([first, *others], return_annotation=returns)  # type: ignore[attr-defined]
    operation.__annotations__["tensors"] = first.annotation
    return cast("Any", all_or_none(operation))  # type: ignore[no-any-return]


def refuse_join(device: Any = -1) -> NoReturn:
    """Horovod's `join`, for ranks with fewer batches than others."""
    raise ArgumentError(
        "join() does not exist here: give all ranks the same number of steps, for example with drop_last=True in the "
        "DataLoader and steps_per_epoch in fit(). Ranks with fewer steps are reported, they hang nobody."
    )


def allgather_object(obj: Any, name: str | None = None, process_set: Any = None) -> list[Any]:
    """The objects of all ranks, in rank order."""
    begin("allgather_object", name, process_set)
    return ring.all_gather_object(obj)


def broadcast_object(obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: Any = None) -> Any:
    """The root's object, on every rank."""
    begin("broadcast_object", name, process_set)
    return ring.broadcast_object(obj, root_rank)
