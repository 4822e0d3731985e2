"""Arguments and messages of a wrong type, as errors that say what to do.

**Calls** that a public function or class cannot take at all. Python's own TypeError for an unknown argument names no
remedy; most such arguments are those of another library, in which the same thing has another name. What a value of a
wrong type raises, deep inside, does not even name it. Both are explained once a call has failed, from the function's
signature and type hints, so calls cost nothing more.

**Records** that the ranks of a starting job send each other are read by the same type hints. The error names the
sender: a rank that runs another program, or a process that poses as a rank of a job without RING_SECRET.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from functools import wraps
from types import UnionType
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from ring_plugins.core.base.errors import ArgumentError, LaunchError, RingError

#: Characters of a text that an error shows.
_SHORT = 60

#: Arguments of other libraries: the one of ours that means the same, and how to pass it.
_ELSEWHERE: Mapping[str, tuple[str, str]] = {
    "async_op": ("wait", "wait=False, which returns a Work,"),
    "average": ("op", "op=SUM for a sum, or nothing for an average,"),
    "np": ("ranks", "ranks"),
    "num_proc": ("ranks", "ranks"),
    "process_set": ("group", "group=ring_plugins.Group(ranks)"),
    "reduce_op": ("op", "op"),
    "root_rank": ("root", "root"),
    "src": ("root", "root"),
    "tensor": ("x", "x"),
    "world_size": ("ranks", "ranks"),
}
_GROUPS = "all ranks take part; collectives, and what averages gradients, take a ring_plugins.Group(ranks)"
_WITHOUT = {
    "group": _GROUPS, "process_set": _GROUPS, "name": "leave it out, operations match by their order on all ranks"
}  # fmt: skip


def wrong_call(
    function: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any], error: Exception, name: str = ""
) -> ArgumentError | None:
    """The error to raise instead of one that a function has raised since it cannot take its arguments; None otherwise.

    Args:
        function: that was called.
        args, options: what it was called with.
        error: that it has raised.
        name: what users call it, by default its own name.
    """
    if isinstance(error, RingError) or not isinstance(error, (TypeError, AttributeError, ValueError)):
        return None
    signature, name = inspect.signature(function), name or function.__name__
    try:
        given = signature.bind(*args, **options).arguments
    except TypeError as wrong:
        found = ArgumentError(_unknown(name, signature, options) or f"{name}(): {wrong}. {_listed(signature)}")
        found.__suppress_context__ = True
        return found
    try:
        hints = get_type_hints(function)
    except Exception:  # a name in them may exist for type checkers only
        return None
    for argument, value in given.items():
        kind = signature.parameters[argument].kind
        if argument in hints and kind is not kind.VAR_KEYWORD and not fits(value, hints[argument]):
            wanted = str(signature.parameters[argument].annotation)
            found = ArgumentError(f"{name}() got {argument}={_shown(value)}, but takes {wanted} there.")
            found.__cause__ = error
            return found
    return None


def _unknown(name: str, signature: inspect.Signature, options: Mapping[str, Any]) -> str:
    """What is wrong with an option that a function does not have, "" if it has all."""
    takes = signature.parameters
    if any(one.kind is one.VAR_KEYWORD for one in takes.values()):
        return ""
    for unknown in (one for one in options if one not in takes):
        own, meant = _ELSEWHERE.get(unknown, ("", ""))
        if own not in takes:
            meant = next(iter(difflib.get_close_matches(unknown, takes, 1)), "")
        remedy = f": pass {meant} instead" if meant else f": {_WITHOUT[unknown]}" if unknown in _WITHOUT else ""
        return f"{name}() has no argument {unknown}={_shown(options[unknown])}{remedy}. {_listed(signature)}"
    return ""


def _listed(signature: inspect.Signature) -> str:
    takes = [one for one in signature.parameters if one != "self"]
    return f"It takes {', '.join(takes)}." if takes else "It takes no arguments."


def _shown(value: Any) -> str:
    is_short = isinstance(value, (int, float, type(None))) or (isinstance(value, str) and len(value) < _SHORT)
    return repr(value) if is_short else f"<{type(value).__module__}.{type(value).__qualname__}>"


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is what a type hint says, as far as that is quickly seen; of collections, the first item."""
    if isinstance(hint, TypeVar):
        hint = hint.__bound__ or Any
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(fits(value, one) for one in inner)
    if origin is Literal:
        return value in inner
    kind = type(None) if hint is None else origin or hint
    if kind is float:
        kind = (float, int)
    if kind is Any or not isinstance(kind, (type, tuple)) or getattr(kind, "_is_protocol", False):
        return True
    if not isinstance(value, kind):
        return False
    if isinstance(value, (str, bytes)) and kind not in (str, bytes, object):
        return not inner  # a collection of characters is hardly meant
    if inner and isinstance(value, (list, tuple, dict)) and value and origin is not tuple:
        return fits(next(iter(value)), inner[0])
    return True


def check_calls(namespace: MutableMapping[str, Any], names: Iterable[str]) -> None:
    """Let public functions and classes of a module raise `ArgumentError` for arguments that they do not have.

    Args:
        namespace: of the module.
        names: its public names.
    """
    for name in names:
        public = namespace.get(name)
        if inspect.isfunction(public):
            namespace[name] = checked = _checked(public, name)
            defined_in = vars(sys.modules[public.__module__])
            if defined_in.get(name) is public:  # so that it can be pickled
                defined_in[name] = checked
        elif inspect.isclass(public) and inspect.isfunction(vars(public).get("__init__")):
            type.__setattr__(
                public, "__init__", _checked(vars(public)["__init__"], name)
            )  # also for what derives from it


def _checked(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    if hasattr(function, "checks_calls"):
        return function

    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        try:
            return function(*args, **options)
        except Exception as error:
            if wrong := wrong_call(function, args, options, error, name):
                raise wrong  # noqa: B904 - it says what it comes from
            raise

    call.checks_calls = True  # type: ignore[attr-defined]
    return call


Record = TypeVar("Record", bound=NamedTuple)
Read = TypeVar("Read")
_hints = functools.cache(get_type_hints)


def read_each(items: Iterable[Any], read: Callable[[Any], Read]) -> list[Read]:
    """What all ranks have sent, in rank order.

    Args:
        items: by rank.
        read: makes a record of an item, or raises an error of Python's.

    Raises:
        LaunchError: a rank has sent something else.
    """
    found = []
    for rank, item in enumerate(items):
        try:
            found.append(read(item))
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            raise LaunchError(
                f"rank {rank} sent what no rank sends while the job starts ({type(error).__name__}): something other "
                "than this release of ring_plugins runs there. Start all ranks alike; with RING_SECRET set alike on "
                "all of them, nothing else can pose as one (docs/security.md)."
            ) from error
    return found


def read_as(hint: type[Read], value: Any) -> Read:
    """A value that is what a type hint says.

    Raises:
        TypeError: it is not.
    """
    if type(value) is not hint and not fits(value, hint):  # the first is quick: a job may have thousands of ranks
        raise TypeError(f"{type(value).__name__} instead of {hint}")
    return value  # type: ignore[no-any-return]


def read_record(kind: type[Record], item: Any) -> Record:
    """A named tuple of this kind from its fields, whose types are checked.

    Raises:
        TypeError: they are others.
    """
    record = kind(*item)
    for name, value in record._asdict().items():
        read_as(_hints(kind)[name], value)
    return record


def read_address(value: Any) -> tuple[int, int, int]:
    """The address of a segment of shared memory, which JSON makes a list.

    Raises:
        TypeError, ValueError: it is none.
    """
    pid, descriptor, nbytes = value
    return read_as(int, pid), read_as(int, descriptor), read_as(int, nbytes)


def read_port(value: Any) -> int:
    """A port that can be connected to.

    Raises:
        TypeError, ValueError: it is none.
    """
    if not 0 < read_as(int, value) < 1 << 16:
        raise ValueError(f"{value} is no port")
    return int(value)
