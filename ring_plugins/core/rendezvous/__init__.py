"""How the processes of a job start and find each other: one file a launcher."""

from ring_plugins.core.rendezvous.detection import connect, detect
from ring_plugins.core.rendezvous.record import Connection, LaunchRecord

__all__ = ["Connection", "LaunchRecord", "connect", "detect"]
