"""Which parts of a model are trained, and by which groups of the optimizers: what `state_dict` leaves out.

A process that joins others gets their state, and runs the script only up to the place at which it waits. The others may
have frozen or unfrozen parameters since then, or given an optimizer further groups, as Lightning's `BackboneFinetuning`
does. So these are told by name, and taken over before the optimizers' state is loaded, which needs the same groups.

A module's mode belongs to them: what scripts freeze, they often switch to evaluation, too, and Lightning has batch
normalization no longer track its statistics.

So do the buffers that `state_dict()` lacks (`persistent=False`), such as a count of steps or a mask that `forward`
makes.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from ring_plugins.core.base.errors import MismatchError
from ring_plugins.torch.gradients import GradientAverager
from ring_plugins.torch.tensor_memory import is_dense

#: A parameter: the name of its module among the parts, and its own name in it.
_Name = tuple[str, str]

#: Parameters of an averager that an error lists.
_LISTED = 4


class TrainedParts(NamedTuple):
    """What to take over.

    Attributes:
        requires_grad: of each parameter.
        modes: of each module, whether it trains, and whether it tracks statistics (None if it never does).
        groups: by optimizer, the parameters of each of its groups; None for those that are in none of the modules.
        buffers: by module, those that `state_dict()` lacks, by name; None for one that is yet to be made.
    """

    requires_grad: dict[_Name, bool]
    modes: dict[_Name, tuple[bool, bool | None]]
    groups: dict[str, list[list[_Name | None]]]
    buffers: dict[_Name, dict[str, torch.Tensor | None]]


def trained_parts(parts: Mapping[str, Any]) -> TrainedParts:
    """Which parts are trained now.

    Args:
        parts: modules, optimizers and anything else, by name.
    """
    names = {parameter: name for name, parameter in _parameters(parts).items()}
    saved = {(of, name) for of, part in parts.items() if isinstance(part, nn.Module) for name in part.state_dict()}
    return TrainedParts(
        {name: parameter.requires_grad for name, parameter in _parameters(parts).items()},
        {
            name: (module.training, getattr(module, "track_running_stats", None))
            for name, module in _modules(parts).items()
        },
        {
            name: [[names.get(parameter) for parameter in group["params"]] for group in part.param_groups]
            for name, part in parts.items()
            if isinstance(part, Optimizer)
        },
        {
            (of, path): {
                own: one for own, one in module._buffers.items() if (of, f"{path}.{own}".lstrip(".")) not in saved
            }
            for (of, path), module in _modules(parts).items()
        },
    )


def take_trained_parts(parts: Mapping[str, Any], told: TrainedParts) -> None:
    """Train the same parts from now on as the process that told of them; call it before state is loaded.

    Args:
        parts: of this process, as in `trained_parts`.

    Raises:
        MismatchError: an optimizer has other groups there, with parameters that are in none of the modules.
    """
    parameters = _parameters(parts)
    for name, parameter in parameters.items():
        if told.requires_grad.get(name, parameter.requires_grad) != parameter.requires_grad:
            parameter.requires_grad_(not parameter.requires_grad)
    for name, module in _modules(parts).items():
        if name in told.modes:
            trains, tracks = told.modes[name]
            module.training = trains
            if tracks not in (None, getattr(module, "track_running_stats", None)):  # a scripted one cannot be set
                setattr(module, "track_running_stats", tracks)  # noqa: B010 - of the modules that have it
        for buffer, value in told.buffers.get(name, {}).items():
            _take_buffer(module, buffer, value)
    own = trained_parts(parts).groups
    for optimizer, groups in told.groups.items():
        if groups == own.get(optimizer):
            continue
        found = [[parameters.get(one) if one else None for one in group] for group in groups]
        if optimizer not in own or any(parameter is None for group in found for parameter in group):
            raise MismatchError(
                f"the optimizer {optimizer!r} has {len(groups)} parameter groups on the other ranks, which differ from "
                f"the {len(own.get(optimizer, ()))} of this process, and some of whose parameters are in no module of "
                "the state. Add that module to the TrainingState, or give the optimizer all its groups before the "
                "training begins."
            )
        parts[optimizer].param_groups[:] = [{"params": group} for group in found]  # the state has their options


def _take_buffer(module: nn.Module, name: str, value: torch.Tensor | None) -> None:
    """Give a module a buffer that another process has. `forward`, which has not run here, may make or enlarge it."""
    own = module._buffers.get(name)
    if own is not None and value is not None and (own.shape, own.dtype) == (value.shape, value.dtype) and is_dense(own):
        own.detach().copy_(value)  # others may share it
    elif name in module._buffers:
        module._buffers[name] = value
    else:
        module.register_buffer(name, value, persistent=False)


def averaged_orders(parts: Mapping[str, Any]) -> str:
    """Which parameters optimizers average that were wrapped without names, in which order; equal where these are.

    Ranks average gradients by their order. Where names are given, these are compared. Numbers are the same in any
    order, so a process with another one would give gradients of equal shapes the averages of other parameters.
    """
    names, told = {parameter: name for name, parameter in _parameters(parts).items()}, ""
    for of, part in parts.items():
        averager = getattr(part, "averager", None)
        named = averager.named_parameters if isinstance(averager, GradientAverager) else ()
        if any(parameter in names and names[parameter][1] != name for name, parameter in named):
            order = [".".join(names.get(parameter, (name,))) for name, parameter in named]
            first, more = ", ".join(order[:_LISTED]), len(order) - _LISTED
            told += f"; {of} averages {first}{f' and {more} more' if more > 0 else ''}"
            told += f" in the order {zlib.crc32(repr(order).encode()):08x}"
    return told


def _parameters(parts: Mapping[str, Any]) -> dict[_Name, nn.Parameter]:
    """A parameter that several modules share, once."""
    found: dict[nn.Parameter, _Name] = {}
    for of, part in parts.items():
        if isinstance(part, nn.Module):
            for name, parameter in part.named_parameters():
                found.setdefault(parameter, (of, name))
    return {name: parameter for parameter, name in found.items()}


def _modules(parts: Mapping[str, Any]) -> dict[_Name, nn.Module]:
    return {
        (of, name): module
        for of, part in parts.items()
        if isinstance(part, nn.Module)
        for name, module in part.named_modules()
    }
