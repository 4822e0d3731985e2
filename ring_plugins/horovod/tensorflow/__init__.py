"""`import ring_plugins.horovod.tensorflow as hvd`: what scripts with a `GradientTape` use of `horovod.tensorflow`.

Operations work eagerly and inside `tf.function`, where they are calls of the host; `jit_compile=True` cannot contain
these. Functions of TensorFlow 1 (sessions, hooks) do not exist here.
"""

from ring_plugins.core.base.arguments import check_calls
from ring_plugins.horovod import keras as horovod_keras  # explains a missing Keras, so it comes first

# isort: split
from ring_plugins.horovod.common.util import gpu_available, split_list
from ring_plugins.horovod.tensorflow import elastic, functions, mpi_ops
from ring_plugins.horovod.tensorflow.functions import *  # noqa: F403 - all its public functions are Horovod's
from ring_plugins.horovod.tensorflow.functions import broadcast_variables
from ring_plugins.horovod.tensorflow.mpi_ops import *  # noqa: F403 - all its public functions are Horovod's
from ring_plugins.horovod.tensorflow.sync_batch_norm import SyncBatchNormalization
from ring_plugins.horovod.tensorflow.tape import DistributedGradientTape, PartialDistributedGradientTape
from ring_plugins.horovod.tensorflow.util import (
    _executing_eagerly,  # noqa: F401 - scripts use it
    refs_to_vars,
    vars_to_refs,
)
from ring_plugins.other_names import no_attribute

DistributedOptimizer = horovod_keras.DistributedOptimizer

__all__ = [
    "DistributedGradientTape",
    "DistributedOptimizer",
    "PartialDistributedGradientTape",
    "SyncBatchNormalization",
    "broadcast_variables",
    "gpu_available",
    "refs_to_vars",
    "split_list",
    "vars_to_refs",
]
__all__ += ["elastic"]
__all__ += mpi_ops.__all__ + functions.__all__


def __getattr__(name: str) -> object:
    raise no_attribute(__name__, name)


check_calls(globals(), [name for name in __all__ if name != "SyncBatchNormalization"])  # Keras reads its arguments
