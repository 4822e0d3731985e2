"""What torch asks of a process group besides collectives: its name, its store, its device."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]  # torch re-exports it unmarked

# torch's stub describes the overloads that its C++ base accepts; nobody calls a subclass with more than one of them.
_Base: Any = dist.ProcessGroup


class NamedGroup(_Base):  # type: ignore[misc]
    """A process group written in Python, without collectives yet.

    Args:
        store: shared by the members, under a prefix that no other group uses.
        rank: of this process in the group.
        size: of the group.
    """

    # What torch asks a backend object for; a Python process group is its own only backend.
    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False

    def __init__(self, store: Store, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._store = store
        self._name = ""
        self._description = ""

    def getBackendName(self) -> str:  # noqa: N802
        """The name given to `init_process_group`."""
        return "ring"

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Remember the name that torch chose."""
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802
        """The name that torch chose."""
        return self._name

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        """Remember the description."""
        self._description = description

    def getGroupDesc(self) -> str:  # noqa: N802
        """The description."""
        return self._description

    _set_group_name = setGroupName
    _set_group_desc = setGroupDesc
    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    def get_group_store(self) -> Store:
        """The store that the members share."""
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> NamedGroup:
        return self
