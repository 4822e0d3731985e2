"""How a function ended on a rank, in a form that travels, and which of several failures is the cause of the others."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ring_plugins.core.base.errors import ArgumentError, RankFailed


@dataclass(frozen=True)
class Failure:
    """Why a rank gave no result.

    Attributes:
        host: where it ran.
        summary: the error in a line.
        traceback: the rank's own, "" where there is none.
        error: the exception itself, pickled, or None where that is not possible.
        caused_by: the rank whose failure made this one fail, if one did.
    """

    host: str
    summary: str
    traceback: str = ""
    error: bytes | None = None
    caused_by: int | None = None


@dataclass(frozen=True)
class Outcome:
    """What became of a rank: its pickled result, or its failure."""

    rank: int
    result: bytes = b""
    failure: Failure | None = None


def results_of(outcomes: Sequence[Outcome]) -> list[Any]:
    """The results in rank order.

    Args:
        outcomes: in the order in which they became known.

    Raises:
        RankFailed: a rank failed; the first one that did so by itself.
    """
    failed = [outcome for outcome in outcomes if outcome.failure is not None]
    if failed:
        by_itself = [outcome for outcome in failed if outcome.failure and outcome.failure.caused_by is None]
        raise_failure((by_itself or failed)[0])
    return [pickle.loads(outcome.result) for outcome in sorted(outcomes, key=lambda outcome: outcome.rank)]


def raise_failure(outcome: Outcome) -> None:
    """Raise what made a rank fail, with its own exception as the cause where that could travel."""
    failure = outcome.failure
    assert failure is not None
    cause = None
    if failure.error is not None:
        try:
            cause = pickle.loads(failure.error)
        except Exception:  # an exception whose constructor wants more than its arguments: the text must do
            cause = None
    text = f"rank {outcome.rank} on {failure.host} failed: {failure.summary}"
    if failure.traceback:
        text += f"\n\nOn rank {outcome.rank}:\n{failure.traceback.rstrip()}"
    raise RankFailed(text, outcome.rank, failure.host, failure.traceback) from cause


def pack(what: str, thing: Any) -> bytes:
    """Pickle something for another process; functions also by value, where cloudpickle is installed.

    Args:
        what: it is, for the error's text.
        thing: to pickle.

    Raises:
        ArgumentError: it cannot be pickled.
    """
    try:
        import cloudpickle
    except ImportError:
        return _pack_by_name(what, thing)
    try:
        packed: bytes = cloudpickle.dumps(thing)
    except Exception as error:  # what is raised depends on the object's own hooks
        raise ArgumentError(f"{what} cannot be handed to another process: {error}.") from error
    return packed


def _pack_by_name(what: str, thing: Any) -> bytes:
    parts = thing if isinstance(thing, tuple) else (thing,)
    here = [part for part in parts if getattr(part, "__module__", None) == "__main__"]
    remedy = "pip install cloudpickle, or move the function to the top of a module that can be imported"
    if here:
        raise ArgumentError(
            f"{what} is defined in the script or notebook itself, which another process cannot import: {remedy}."
        )
    try:
        return pickle.dumps(thing)
    except Exception as error:
        raise ArgumentError(f"{what} cannot be handed to another process ({error}): {remedy}.") from error
