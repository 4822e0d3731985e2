"""Failure detection, waiting for other ranks, and the control channel to rank 0."""

from ring_plugins.core.control.channel import Channel
from ring_plugins.core.control.client import ControlClient
from ring_plugins.core.control.server import ControlServer

__all__ = ["Channel", "ControlClient", "ControlServer"]
