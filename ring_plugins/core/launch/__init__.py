"""How the processes of a job start and find each other: one file a launcher."""

from ring_plugins.core.launch.detection import connect, detect
from ring_plugins.core.launch.record import Connection, LaunchRecord

__all__ = ["Connection", "LaunchRecord", "connect", "detect"]
