"""Replace attributes of one instance, mostly methods: its class, and files saved with it, stay as they are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


class Patch:
    """Attributes of an instance that are others until `restore`, past any `__setattr__`, which might track them.

    Attributes:
        before: what they were, wherever they were defined.
    """

    def __init__(self, owner: Any, **replacements: Any) -> None:
        self._owner, self._names = owner, tuple(replacements)
        self._own = {name: vars(owner)[name] for name in replacements if name in vars(owner)}
        self.before: dict[str, Any] = {name: getattr(owner, name, None) for name in replacements}
        vars(owner).update(replacements)

    def restore(self) -> None:
        """Give the instance back what it had itself."""
        for name in self._names:
            vars(self._owner).pop(name, None)
        vars(self._owner).update(self._own)


@contextlib.contextmanager
def replaced(owner: Any, **replacements: Any) -> Iterator[dict[str, Any]]:
    """Replace attributes of an instance inside this block; yields what they were."""
    patch = Patch(owner, **replacements)
    try:
        yield patch.before
    finally:
        patch.restore()
