"""How the processes of a job start and find each other: one file for each kind of launcher."""

from ring_plugins.core.rendezvous.detection import connect, detect, leave
from ring_plugins.core.rendezvous.record import LaunchRecord, Rendezvous

__all__ = ["LaunchRecord", "Rendezvous", "connect", "detect", "leave"]
