"""`import ring_plugins.horovod.tensorflow.keras as hvd`: the same as `ring_plugins.horovod.keras`."""

from ring_plugins.horovod import keras as _keras
from ring_plugins.horovod.keras import *  # noqa: F403 - the same names
from ring_plugins.horovod.keras import callbacks, elastic  # noqa: F401 - hvd.callbacks
from ring_plugins.other_names import no_attribute

__all__ = list(_keras.__all__)


def __getattr__(name: str) -> object:
    raise no_attribute(__name__, name)
