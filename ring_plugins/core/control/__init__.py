"""A thin line between every rank and rank 0, beside the data, for what people want to know about a job."""

from ring_plugins.core.control.channel import Channel
from ring_plugins.core.control.hub import Hub
from ring_plugins.core.control.link import Link

__all__ = ["Channel", "Hub", "Link"]
