"""`from ring_plugins.horovod.ray import RayExecutor`: Horovod's executor on Ray."""

from ring_plugins.horovod.ray.runner import RayExecutor
from ring_plugins.other_names import no_attribute

__all__ = ["RayExecutor"]


def __getattr__(name: str) -> object:
    raise no_attribute(__name__, name)
