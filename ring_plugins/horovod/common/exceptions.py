"""Horovod's errors. What raises its `HorovodInternalError` raises a `RingError` here, so both names catch the same."""

from ring_plugins.core.base.errors import RingError

__all__ = ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt"]

HorovodInternalError = RingError


class HostsUpdatedInterrupt(RuntimeError):
    """Ranks have been added or removed, and the training function begins again.

    Args:
        skip_sync: whether the state of all ranks is equal already.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the ranks of the job have changed")
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """Never raised here, where nothing is built for one version of a framework."""
