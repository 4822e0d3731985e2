"""Whether all ranks train with the same hyperparameters, compared once when fit starts.

Every rank runs the whole script. One that draws its hyperparameters itself, as in a search without a common seed,
trains with a dropout or a regularization of its own. No comparison of weights finds that: gradients are averaged.

Compared are what ``save_hyperparameters`` has kept in the module and the datamodule, the arguments of constructors that
the module and its submodules hold as attributes of the same name (the ``p`` of a ``Dropout``), and those arguments of
the Trainer that decide how often and how it steps. Of these, only numbers, bools, strings, None, members of enums,
named functions and classes, and what consists of them; anything else, such as a tensor, says nothing.

Some values differ between ranks on purpose. So a number is left out if its whole name is in `_OF_A_RANK`. Strings name
files and runs more often than they decide anything: where one differs, rank 0 warns, unless the name says that it
chooses what is trained.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import hashlib
import inspect
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral, Real
from types import BuiltinFunctionType, FunctionType
from typing import Any

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import MismatchError
from ring_plugins.core.base.log import logger
from ring_plugins.core.groups import Group, communicator_of
from ring_plugins.observe.consistency import is_check_wanted

#: Whole names, in lower case, of what each rank may have for itself: its place, its random numbers, its part of the
#: data, what it prints.
_OF_A_RANK = re.compile(
    r"((local|global|node|world|process|dp)_)?rank|(.*_)?seed|rng|(.*_)?port|(.*_)?(pid|uuid|timestamp)|(start_)?time"
    r"|devices?|(cuda_)?device(_ids?|_index)?|gpus?|gpu_ids?|node(_id)?|host|(is_)?(main|master)(_process)?|is_rank_zero"
    r"|(process|worker|run|job|shard)_(id|index)|id|index|shard|offset|start|(start|end)_index|(num|n)_samples"
    r"|(num_)?workers|verbos(e|ity)|quiet|silent|debug|(enable_)?progress_bar|log|logging|log_every.*|print|plot"
    r"|profiler?|save(_.*)?|wandb|notes|callbacks"
)
#: Words of names of strings for which the same holds, and of strings that choose what is trained.
_NO_CHOICE = frozenset(
    "dir directory path paths file files filename folder root prefix url uri name id key token date tag log".split()  # noqa: SIM905
)
_CHOICE = frozenset(
    """loss criterion objective activation act nonlinearity optimizer optim norm normalization scheduler schedule
    reduction initializer backbone arch architecture""".split()  # noqa: SIM905
)
_OF_THE_TRAINER = (
    "max_epochs", "max_steps", "accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm", "precision",
    "limit_train_batches", "limit_val_batches", "val_check_interval", "check_val_every_n_epoch", "overfit_batches",
    "num_sanity_val_steps", "reload_dataloaders_every_n_epochs",
)  # fmt: skip
_OF_THE_STRATEGY = ("global_batch_size", "exact")
#: Of names that all ranks have; the text of a value that a rank lacks.
_KEPT, _ABSENT = ("hparams", "datamodule.hparams"), "missing"
#: How deep values may be nested, how many differences an error names, and how many characters of each value.
_DEPTH, _NAMED, _SHOWN = 6, 4, 60


def check_equal(trainer: Any, group: Group | None = None) -> None:
    """Compare the hyperparameters of all ranks, or of a group, unless RING_WEIGHT_CHECK is 0. Collective.

    Raises:
        MismatchError: a value differs; the text names it and says what the ranks have.
    """
    if not is_check_wanted():
        return
    own, is_first = dict(_found(trainer)), trainer.is_global_zero
    digest = hashlib.sha256(repr(sorted(own.items())).encode()).digest()
    gather, operation = communicator_of(group).all_gather_object, "comparison of hyperparameters"
    if len(set(gather(digest, operation))) == 1:
        return
    first, *others = gather(own, operation)
    numbers = group.ranks if group else range(1 + len(others))
    for rank, theirs in zip(numbers[1:], others, strict=True):
        named: dict[tuple[str, ...], str] = {}
        warned: dict[tuple[str, ...], str] = {}
        for name in dict.fromkeys([*first, *theirs]):
            values = first.get(name, _ABSENT), theirs.get(name, _ABSENT)
            is_comparable = "" not in values and (_ABSENT not in values or name.startswith(_KEPT))
            if values[0] != values[1] and is_comparable and (wrong := _severity(name, values)) is not None:
                # The module may hold as an attribute what hparams has, too.
                key = (re.split(r"[.\[]", name)[-1], *values)
                (named if wrong else warned).setdefault(key, f"{name} is {values[0]} and {values[1]}")
        if warned and is_first:
            logger.warning(f"rank {numbers[0]} and rank {rank} have different values: {_listed(warned)}.")
        if named:
            raise MismatchError(
                f"rank {numbers[0]} and rank {rank} have different hyperparameters: {_listed(named)}. Every rank runs "
                "the whole script: draw values with the same seed on all of them, or call ring_plugins.init() before, "
                "and ring_plugins.broadcast_object(values). If they differ on purpose, "
                f"{config.WEIGHT_CHECK.name}=0 switches this comparison off."
            )


def _severity(name: str, values: Sequence[str]) -> bool | None:
    """Whether a difference is an error; False for a warning, None if it is on purpose."""
    key = next(iter(re.findall(r"[A-Za-z_]\w*", name)[::-1]), "")
    words = _words(key)
    if not any(value.startswith(("'", '"')) for value in values) or not _CHOICE.isdisjoint(words):
        return True
    return (
        None if not _NO_CHOICE.isdisjoint(words) or any("/" in value or os.sep in value for value in values) else False
    )


def _listed(differences: Mapping[Any, str]) -> str:
    more = f"; and {len(differences) - _NAMED} more" if len(differences) > _NAMED else ""
    return "; ".join(list(differences.values())[:_NAMED]) + more


def _found(trainer: Any) -> Iterator[tuple[str, str]]:
    """The names and values of this rank."""
    module, data = trainer.lightning_module, trainer.datamodule
    for name in _OF_THE_TRAINER:
        yield from _flat(f"Trainer({name})", getattr(trainer, name, None))
    arguments = getattr(getattr(trainer, "strategy", None), "arguments", {})
    for name in _OF_THE_STRATEGY:
        yield from _flat(f"RingStrategy({name})", arguments.get(name))
    yield from _flat("hparams", getattr(module, "hparams", None))
    yield from _flat("datamodule.hparams", getattr(data, "hparams", None))
    submodules = list(module.named_modules())
    arguments = {cls: set(_arguments(cls)) for cls in {type(submodule) for _, submodule in submodules}}
    for path, submodule in submodules:
        held = vars(submodule)
        for name in sorted(arguments[type(submodule)]):
            if name in held and not _is_of_a_rank(name):
                yield from _flat(f"{path}.{name}" if path else f"{type(submodule).__name__}.{name}", held[name])


def _arguments(cls: type) -> Iterator[str]:
    """The names of the arguments of a class's constructor, and of those that it may pass them on to."""
    for base in cls.__mro__:
        if isinstance(init := vars(base).get("__init__"), FunctionType):
            yield from inspect.signature(init).parameters


def _flat(name: str, value: Any, depth: int = 0) -> Iterator[tuple[str, str]]:
    """The names of what a value consists of, each with its text; nothing for what cannot be compared."""
    if isinstance(value, argparse.Namespace) or (dataclasses.is_dataclass(value) and not isinstance(value, type)):
        value = vars(value) if hasattr(value, "__dict__") else None
    if isinstance(value, Mapping) and depth < _DEPTH:
        try:
            items = list(value.items())
        except Exception:  # OmegaConf's raises its own kinds where a value is missing
            return
        for key, item in items:
            if not isinstance(key, str):
                yield from _flat(f"{name}[{_text(key, depth) or '?'}]", item, depth + 1)
            elif not _is_of_a_rank(key):
                yield from _flat(f"{name}.{key}" if key.isidentifier() else f"{name}[{key!r}]", item, depth + 1)
    elif (text := _text(value, depth)) is not None:
        yield name, text
    elif isinstance(value, list | tuple) and depth < _DEPTH:
        for index, item in enumerate(value):
            yield from _flat(f"{name}[{index}]", item, depth + 1)
    else:
        yield name, ""


def _text(value: Any, depth: int) -> str | None:
    """A value as text, equal for equal values; None if it cannot be compared."""
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, FunctionType | BuiltinFunctionType | type):
        return value.__qualname__
    if isinstance(value, str):
        return _short(repr(value))
    if value is None or isinstance(value, bool):
        return repr(value)
    if isinstance(value, Real):  # of Python or of numpy
        return _short(repr(int(value) if isinstance(value, Integral) else float(value)))
    if isinstance(value, set | frozenset):
        value = sorted(value, key=repr)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview | range) and depth < _DEPTH:
        items = [_text(item, depth + 1) for item in value]
        return None if None in items else _short(f"({', '.join(map(str, items))})")
    return None


def _short(text: str) -> str:
    """A text, or the beginning of a long one with a checksum of the whole."""
    if len(text) <= _SHOWN:
        return text
    return f"{text[:_SHOWN]}... ({hashlib.sha256(text.encode()).hexdigest()[:8]})"


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", re.sub(r"(?<=[a-z])([A-Z])", r"_\1", name).lower())


def _is_of_a_rank(name: str) -> bool:
    """Whether a name is of something that each rank may have for itself."""
    return name.startswith("_") or _OF_A_RANK.fullmatch("_".join(_words(name))) is not None
