"""How the processes of a job start and find each other: one file for each kind of launcher."""

from ring_plugins.core.rendezvous.launchers import connect, detect, launcher_of, leave
from ring_plugins.core.rendezvous.record import Launcher, LaunchRecord, Rendezvous

__all__ = ["LaunchRecord", "Launcher", "Rendezvous", "connect", "detect", "launcher_of", "leave"]
