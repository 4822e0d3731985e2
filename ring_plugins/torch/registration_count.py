"""How often any module got a parameter or a submodule: a cheap sign that a model may have grown.

Walking through a model of thousands of parameters at every step would cost milliseconds; torch offers
hooks on registration instead.
"""

from __future__ import annotations

from typing import Any

from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

_count = 0


def _registered(module: Any, name: str, value: Any) -> None:
    global _count
    _count += 1


register_module_parameter_registration_hook(_registered)
register_module_module_registration_hook(_registered)


def registrations() -> int:
    """Registrations in this process so far."""
    return _count
