"""A thin line between every rank and rank 0, beside the data, for what people want to know about a job."""

from ring_plugins.core.control.channel import Channel
from ring_plugins.core.control.client import ControlClient
from ring_plugins.core.control.server import ControlServer

__all__ = ["Channel", "ControlClient", "ControlServer"]
