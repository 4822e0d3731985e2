"""The actor that is a rank. Its process serves nothing else and ends with the job."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from ring_plugins.core.linux.interfaces import free_port
from ring_plugins.launcher.outcomes import Outcome


class Rank:
    """One rank; `ray.remote` makes an actor of it."""

    def where(self) -> tuple[str, str, int]:
        """The host's name, its address in the cluster, and a free port there."""
        import ray

        return socket.gethostname(), ray.util.get_node_ip_address(), free_port()

    def perform(self, packed: bytes, rank: int, environment: Mapping[str, str]) -> Outcome:
        """Call the packed function as a rank.

        Args:
            packed: what `outcomes.pack` made of `(function, args, kwargs)`.
            rank: to be.
            environment: in which `ring_plugins.init()` finds the others.
        """
        os.environ.update(environment)
        from ring_plugins.launcher.outcomes import call

        return call(packed, rank)
