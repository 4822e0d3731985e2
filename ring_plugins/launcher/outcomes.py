"""A function call on a rank, and how its outcome comes back: pack, call, collect, and raise what went wrong first.

`pack_call` makes bytes of a function and its arguments, `call` runs them on a rank, `collect` gathers an `Outcome` from
each rank, and `results` returns what `ring_plugins.run` and its relatives return. How the bytes and outcomes travel is
up to each launcher: a pipe on one host, a socket between hosts and on Spark, the object store of Ray.

In a job that goes on without ranks that are lost, a rank without a result is no failure of the call, as long as others
bring theirs; `RankResults.lost` names it. Where lost ranks are replaced, the result of a slot is that of its last
owner.
"""

from __future__ import annotations

import contextlib
import json
import numbers
import os
import pickle
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeVar

from ring_plugins.core import world
from ring_plugins.core.base.errors import ArgumentError, RankFailed, TimeoutExceeded, name_ranks
from ring_plugins.core.base.log import logger
from ring_plugins.core.base.places import place_of
from ring_plugins.core.exit_hooks import consequence

#: Seconds that the other ranks may still report after one has failed. A rank needs up to RING_NETWORK_TIMEOUT, 6 s by
#: default, to notice that a peer on another host is gone.
GRACE_SECONDS = 7.0

_POLL_SECONDS = 0.1

#: Why a rank left the job before its end.
LEFT = "left on SIGTERM"
NOT_JOINED = "the process in its place had not joined when the job ended"

#: Why a rank could not begin.
_NOT_LOADED = (
    "the function or its arguments cannot be loaded in the rank's process ({why}): every module that they come from "
    "must be importable there, on all hosts"
)

T = TypeVar("T")


class RankResults(list[T]):
    """The results of a call in rank order, of the ranks that are left at its end.

    Attributes:
        lost: the ranks that have no result, numbered as at the start, and what became of each. Always empty unless
            `on_failure` lets the job go on.
    """

    def __init__(self, results: Iterable[T] = (), lost: Mapping[int, str] | None = None) -> None:
        super().__init__(results)
        self.lost: dict[int, str] = dict(lost or {})


@dataclass(frozen=True)
class Failure:
    """Why a rank has no result.

    Attributes:
        host: name of the rank's host.
        summary: the error in one line.
        traceback: the rank's own traceback, "" if there is none.
        error: the pickled exception, None if it cannot be pickled.
        caused_by: the rank whose failure made this one fail, None if this rank failed first.
        is_loss: whether the rank's process was ended from outside, so that a job may go on without it.
        place: where in the user's code it failed, "" if unknown.
    """

    host: str
    summary: str
    traceback: str = ""
    error: bytes | None = None
    caused_by: int | None = None
    is_loss: bool = False
    place: str = ""


@dataclass(frozen=True)
class Outcome:
    """How the call ended on a rank: a pickled result, a failure, or the reason why the rank left the job before."""

    rank: int
    result: bytes = b""
    failure: Failure | None = None
    left: str = ""


def pack(what: str, value: Any) -> bytes:
    """Pickle a value for another process. Where cloudpickle is installed, functions travel by value.

    Args:
        what: names the value in the error.
        value: the value to pickle.

    Raises:
        ArgumentError: the value cannot be pickled.
    """
    remedy = ""
    try:
        from cloudpickle import dumps
    except ImportError:
        dumps = pickle.dumps
        remedy = ": pip install cloudpickle, or move the function to the top level of a module that can be imported"
        parts = value if isinstance(value, tuple) else (value,)
        if any(getattr(part, "__module__", None) == "__main__" for part in parts):
            raise ArgumentError(
                f"{what} is defined in the script or notebook itself, which another process cannot import{remedy}."
            ) from None
    try:
        packed: bytes = dumps(value)
    except Exception as error:  # an object's own hooks may raise anything
        raise ArgumentError(f"{what} cannot be sent to another process ({error}){remedy}.") from error
    return packed


def check_options(number: str, ranks: Any, timeout: Any, env: Mapping[str, str] | None) -> None:
    """Check arguments of `ring_plugins.run` and its relatives.

    Args:
        number: name of the argument for the number of ranks.
        ranks, timeout, env: the arguments; None where they are not given.

    Raises:
        ArgumentError: one is wrong.
    """
    if ranks is not None and (isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1):
        raise ArgumentError(f"{number}={ranks!r} is not a positive number of ranks.")
    if timeout is not None and not (isinstance(timeout, (int, float, numbers.Real)) and float(timeout) > 0):
        raise ArgumentError(f"timeout={timeout!r} is not a positive number of seconds.")
    for name, value in (env or {}).items():
        if not isinstance(name, str) or not isinstance(value, str):  # the value may be a secret
            raise ArgumentError(f"env: name and value of {name!r} must be texts, as in env={{'OMP_NUM_THREADS': '1'}}.")


def search_path_of_user() -> list[str]:
    """`sys.path` with the current directory in place of "": where the modules of a function that a rank calls are."""
    return [path or os.getcwd() for path in sys.path]


def take_search_path(path: Sequence[str]) -> None:
    """Search `search_path_of_user` of another process for modules, now that this package has been imported.

    Processes that this one starts do so, too.

    Args:
        path: of the other process.
    """
    sys.path[:] = dict.fromkeys([*path, *sys.path])
    earlier = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*path, *filter(None, earlier)]))


def pack_call(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None, path: Sequence[str] = ()
) -> bytes:
    """Pickle `function(*args, **kwargs)`, behind the path on which the rank is to search for modules first.

    Raises:
        ArgumentError: the function cannot be called, `args` or `kwargs` are something else, or one cannot be pickled.
    """
    name = getattr(function, "__qualname__", function)
    if not callable(function):
        raise ArgumentError(
            f"function={function!r:.80} cannot be called: pass the function itself, without calling it."
        )
    if not isinstance(args, Sequence) or isinstance(args, (str, bytes)):  # whose letters would be arguments
        raise ArgumentError(
            f"args={args!r:.80} is not a list or tuple of the function's arguments: pass args=[...], and what is none "
            "of them by its name, such as ranks=2."
        )
    if kwargs is not None and not (isinstance(kwargs, Mapping) and all(isinstance(key, str) for key in kwargs)):
        raise ArgumentError(
            f"kwargs={kwargs!r:.80} is not a dictionary of the function's keyword arguments: pass kwargs={{...}}, and "
            "what is none of them by its name, such as ranks=2."
        )
    packed = pack(f"function={name!r} with its arguments", (function, tuple(args), {**(kwargs or {})}))
    return json.dumps(list(path)).encode() + b"\n" + packed


def unpack_call(packed: bytes) -> tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]:
    """The function and the arguments that `pack_call` got, from where this process now searches for modules, too."""
    path, _, pickled = packed.partition(b"\n")
    if found := json.loads(path):
        take_search_path(found)
    function, args, kwargs = pickle.loads(pickled)
    return function, args, kwargs


def call(packed: bytes, rank: int) -> Outcome:
    """Run a packed call as a rank, and leave the job.

    The other ranks learn of a failure at once, so that they stop waiting.
    """
    try:
        function, args, kwargs = unpack_call(packed)
    except BaseException as error:  # modules may end, or do anything, while they are imported
        failure = _failure(error)
        return Outcome(rank, failure=replace(failure, summary=_NOT_LOADED.format(why=failure.summary)))
    try:
        outcome = Outcome(rank, pack(f"the result of rank {rank}", function(*args, **kwargs)), left=_why_it_left())
        world.shutdown()
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            return Outcome(rank, pack("nothing", None), left=_why_it_left())
        return Outcome(rank, failure=_failure(error))
    return outcome


def _why_it_left() -> str:
    if world.has_not_joined():
        return NOT_JOINED
    return LEFT if world.is_initialized() and world.current().has_left else ""


def tell_others(error: BaseException) -> int | None:
    """Have the other ranks of the job stop waiting for this one, which has failed.

    Returns:
        The rank whose failure made this one fail, None if there is none.
    """
    if not world.is_initialized() or (current := world.current()).topology.size == 1:
        return None
    peer = consequence(current, error)
    current.fail(peer or error)
    return peer.rank if peer is not None else None


def _failure(error: BaseException) -> Failure:
    caused_by = tell_others(error)
    summary = "".join(traceback.format_exception_only(type(error), error)).strip()
    # Skips the first frame, which is `call`.
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__ and error.__traceback__.tb_next))
    place, packed = place_of(error), None
    with contextlib.suppress(Exception):
        packed = pack("the error", error.with_traceback(None))
    failure = Failure(socket.gethostname(), summary, text, packed, caused_by, world.has_not_joined(), place)
    if failure.is_loss:  # the caller may not hear of it: the outcome of the next process counts
        logger.error(
            "the call failed in a process that was to take the place of a lost rank, before it joined; the other "
            f"ranks go on without it:\n{failure.traceback.rstrip()}"
        )
    return failure


def collect(
    ranks: int,
    poll: Callable[[float], Iterable[Outcome]],
    timeout: float | None,
    is_over: Callable[[], bool] | None = None,
    recovers: bool = False,
) -> list[Outcome]:
    """Gather an outcome from every rank, or what arrives within `GRACE_SECONDS` of the first failure.

    Args:
        ranks: number of ranks.
        poll: waits up to the given number of seconds and returns the outcomes that have arrived meanwhile.
        timeout: seconds for all ranks to finish, None for no limit.
        is_over: whether no more will come, where somebody else ends a job in which a rank has failed; None for the
            rule above.
        recovers: whether a rank that is lost has not failed.

    Returns:
        The outcomes in the order of their arrival.

    Raises:
        TimeoutExceeded: a rank has not finished within `timeout`; the caller ends all ranks.
    """
    found: list[Outcome] = []
    deadline = time.monotonic() + timeout if timeout is not None else float("inf")
    give_up = float("inf")
    is_over = is_over or (lambda: len(found) >= ranks or time.monotonic() >= give_up)
    while not is_over():
        if time.monotonic() > deadline:
            late = sorted(set(range(ranks)) - {outcome.rank for outcome in found})
            raise TimeoutExceeded(
                f"timeout={timeout:g}: {name_ranks(late)} of {ranks} did not finish in time; all ranks were ended."
            )
        for outcome in poll(_POLL_SECONDS):
            found.append(outcome)
            if outcome.failure is not None and not (recovers and outcome.failure.is_loss):
                give_up = min(give_up, time.monotonic() + GRACE_SECONDS)
    return found


def results(outcomes: Sequence[Outcome], ranks: int = 0, trouble: str | None = None) -> RankResults[Any]:
    """The results in rank order.

    Args:
        outcomes: in the order of their arrival.
        ranks: number of ranks of a job that goes on without those that are lost; 0 if it ends with the first.
        trouble: why such a job failed as a whole, None if it has ended well.

    Raises:
        RankFailed: a rank failed. Ranks that failed because of another are named only if there is no other. In a job
            that goes on without lost ranks: it could not, or nobody was left.
    """
    failed = [outcome for outcome in outcomes if outcome.failure and not (ranks and outcome.failure.is_loss)]
    if failed:
        causes = [outcome for outcome in failed if outcome.failure and outcome.failure.caused_by is None]
        _raise_failure(causes or failed)
    last = {outcome.rank: outcome for outcome in outcomes if not ranks or outcome.rank < ranks}
    found = {rank: outcome for rank, outcome in last.items() if outcome.failure is None and not outcome.left}
    fates = {rank: outcome.failure.summary if outcome.failure else outcome.left for rank, outcome in last.items()}
    lost = {rank: fates.get(rank, "it did not report") for rank in range(ranks) if rank not in found}
    told = "; ".join(f"rank {rank}: {fate}" for rank, fate in lost.items())
    if ranks and (trouble or not found):
        why = trouble or "no rank is left that could have a result"
        raise RankFailed(f"{why}{f' ({told})' if told else ''}.", next(iter(lost), 0), "", "")
    if lost:
        logger.warning(f"{len(found)} of {ranks} ranks have results. Of the others, {told}.")
    return RankResults((pickle.loads(found[rank].result) for rank in sorted(found)), lost)


def _raise_failure(outcomes: Sequence[Outcome]) -> NoReturn:
    """Raise the first failure, with the tracebacks of those that happened elsewhere."""
    outcome = outcomes[0]
    failure = outcome.failure
    assert failure is not None
    cause = None
    if failure.error is not None:
        with contextlib.suppress(
            Exception
        ):  # an exception whose constructor needs more than its args: the text has to do
            cause = pickle.loads(failure.error)
    text = f"rank {outcome.rank} on {failure.host} failed: {failure.summary}"
    shown = set()
    for other in outcomes:
        if other.failure is not None and other.failure.traceback and other.failure.place not in shown:
            shown.add(other.failure.place)
            text += f"\n\nOn rank {other.rank}:\n{other.failure.traceback.rstrip()}"
    # A rank that could not report, as by `os._exit`, is known from those that failed because of it.
    by = failure.caused_by
    first, printed = (outcome.rank, failure.traceback) if by is None else (by, "")
    raise RankFailed(text, first, failure.host, printed) from cause
