"""Horovod's names and arguments on top of this package, for scripts that were written for it.

A script goes on as it is after one line is changed:

    import ring_plugins.horovod.torch as hvd             # was: import horovod.torch as hvd
    import ring_plugins.horovod.keras as hvd             # was: import horovod.keras as hvd
    import ring_plugins.horovod.tensorflow.keras as hvd  # was: import horovod.tensorflow.keras as hvd
    import ring_plugins.horovod.tensorflow as hvd        # was: import horovod.tensorflow as hvd

What Horovod (0.28) has and this package has not raises an error that says what to write instead. New scripts are better
off with `ring_plugins` itself, which needs fewer lines.
"""

from ring_plugins.horovod import submodules
from ring_plugins.horovod.runner import run
from ring_plugins.other_names import no_attribute

__all__ = ["run"]
#: The release whose names and arguments these are; scripts compare it.
__version__ = "0.28.1"

submodules.install()


def __getattr__(name: str) -> object:
    raise no_attribute(__name__, name)
