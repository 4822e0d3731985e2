"""Whether all ranks train with the same hyperparameters, compared once when fit starts.

Every rank runs the whole script. One that draws its hyperparameters itself, as in a search without a common seed,
trains with a dropout or a regularization of its own. No comparison of weights finds that: gradients are averaged.

Compared are what ``save_hyperparameters`` has kept in the module and the datamodule, the arguments of constructors that
the module and its submodules hold as attributes of the same name (the ``p`` of a ``Dropout``), and those arguments of
the Trainer that decide how often and how it steps. Of these, only numbers, bools, strings and None, and what consists
of them; anything else, such as a tensor or a function, says nothing.

Some values differ between ranks on purpose. So a name is left out if one of its words is in `_OF_A_RANK`, and a string
if it looks like a path.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import inspect
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral, Real
from types import FunctionType
from typing import Any

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import MismatchError
from ring_plugins.core.world import current
from ring_plugins.observe.drift import is_check_wanted

#: Words of names for what each rank may have for itself: its place, its files, its random numbers, what it prints.
_OF_A_RANK = frozenset(
    """
    rank ranks node host hostname ip port pid process device devices gpu cuda main master worker workers index
    seed seeds rng dir directory path paths file files filename folder root prefix url uri name id uuid key token
    time date timestamp start tag notes log logger logging verbose quiet silent debug print progress bar
    profile profiler plot report save wandb callbacks
    """.split()  # noqa: SIM905 - one line a word would be 60 lines
)
_OF_THE_TRAINER = (
    "max_epochs", "max_steps", "accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm", "precision",
    "limit_train_batches", "limit_val_batches", "val_check_interval", "check_val_every_n_epoch", "overfit_batches",
    "num_sanity_val_steps", "reload_dataloaders_every_n_epochs",
)  # fmt: skip
#: How deep values may be nested, how many differences an error names, and how many characters of each value.
_DEPTH, _NAMED, _SHOWN = 6, 4, 60


def check_equal(trainer: Any) -> None:
    """Compare the hyperparameters of all ranks, unless RING_WEIGHT_CHECK is 0. Collective.

    Raises:
        MismatchError: a value differs; the text names it and says what the ranks have.
    """
    if not is_check_wanted():
        return
    own = dict(_found(trainer))
    digest = hashlib.sha256(repr(sorted(own.items())).encode()).digest()
    gather, operation = current().communicator.all_gather_object, "comparison of hyperparameters"
    if len(set(gather(digest, operation))) == 1:
        return
    first, *others = gather(own, operation)
    for rank, theirs in enumerate(others, start=1):
        differing = [name for name, text in first.items() if theirs.get(name, text) != text]
        if differing:
            named = [f"{name} is {first[name]} and {theirs[name]}" for name in differing[:_NAMED]]
            more = f"; and {len(differing) - _NAMED} more" if len(differing) > _NAMED else ""
            raise MismatchError(
                f"rank 0 and rank {rank} have different hyperparameters: {'; '.join(named)}{more}. Every rank runs the "
                "whole script: draw values with the same seed on all of them, or call ring_plugins.init() before, and "
                "ring_plugins.broadcast_object(values). If they differ on purpose, "
                f"{config.WEIGHT_CHECK.name}=0 switches this comparison off."
            )


def _found(trainer: Any) -> Iterator[tuple[str, str]]:
    """The names and values of this rank."""
    module, data = trainer.lightning_module, trainer.datamodule
    for name in _OF_THE_TRAINER:
        yield from _flat(f"Trainer({name})", getattr(trainer, name, None))
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
            if isinstance(key, str) and not _is_of_a_rank(key):
                yield from _flat(f"{name}.{key}" if key.isidentifier() else f"{name}[{key!r}]", item, depth + 1)
    elif (text := _text(value, depth)) is not None:
        yield name, text


def _text(value: Any, depth: int) -> str | None:
    """A value as text, equal for equal values; None if it cannot be compared."""
    if isinstance(value, str):
        return None if "/" in value or os.sep in value else _short(repr(value))
    if value is None or isinstance(value, bool):
        return repr(value)
    if isinstance(value, Real):  # of Python or of numpy
        return _short(repr(int(value) if isinstance(value, Integral) else float(value)))
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview | range) and depth < _DEPTH:
        items = [_text(item, depth + 1) for item in value]
        return None if None in items else _short(f"({', '.join(map(str, items))})")
    return None


def _short(text: str) -> str:
    """A text, or the beginning of a long one with a checksum of the whole."""
    if len(text) <= _SHOWN:
        return text
    return f"{text[:_SHOWN]}... ({hashlib.sha256(text.encode()).hexdigest()[:8]})"


def _is_of_a_rank(name: str) -> bool:
    """Whether a name is of something that each rank may have for itself."""
    words = re.findall(r"[a-z]+", re.sub(r"([A-Z])", r"_\1", name).lower())
    return name.startswith("_") or not _OF_A_RANK.isdisjoint(words)
