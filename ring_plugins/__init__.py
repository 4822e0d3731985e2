"""All-reduce training: one core that averages gradients for PyTorch, Lightning and Keras, and collectives on arrays.

`ring_plugins.init()` joins the processes that mpirun, torchrun or srun started. In a script that was started with plain
`python`, `init(ranks=2)` starts the second process. The other functions then work on arrays of all ranks.
"""

import sys
import warnings

if sys.platform != "linux":
    raise ImportError(
        f"ring_plugins runs on Linux, and this is {sys.platform}: it shares memory and wakes sleeping ranks by system "
        "calls of Linux. On Windows use WSL 2; elsewhere a Linux container or virtual machine."
    )

from ring_plugins import frameworks
from ring_plugins.core.arrays.dtypes import AVERAGE, MAX, MIN, PRODUCT, SUM, Op
from ring_plugins.core.base.arguments import check_calls
from ring_plugins.core.base.errors import (
    ArgumentError,
    DeadlockError,
    DeviceError,
    DriftError,
    LaunchError,
    MismatchError,
    MissingDependency,
    NotInitialized,
    PeerFailed,
    PeerLeft,
    RankFailed,
    RingError,
    SharedMemoryError,
    StepSkipped,
    TimeoutExceeded,
)
from ring_plugins.core.functions import (
    all_gather,
    all_gather_object,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    broadcast_object,
    local_rank,
    local_size,
    node_rank,
    num_nodes,
    on_membership_change,
    preempted,
    rank,
    reduce_scatter,
    size,
)
from ring_plugins.core.groups import Group
from ring_plugins.core.members.changes import MembershipChange
from ring_plugins.core.world import init, is_initialized, shutdown
from ring_plugins.launcher.function import run
from ring_plugins.launcher.outcomes import RankResults
from ring_plugins.observe import averaging_check
from ring_plugins.other_names import no_attribute

frameworks.register()
averaging_check.register()
#: Former spellings, which earlier releases documented.
_RENAMED = {"is_initialised": "is_initialized", "NotInitialised": "NotInitialized"}


def __getattr__(name: str) -> object:
    if name not in _RENAMED:
        raise no_attribute(__name__, name)
    warnings.warn(f"ring_plugins.{name} is now ring_plugins.{_RENAMED[name]}.", DeprecationWarning, stacklevel=2)
    return globals()[_RENAMED[name]]


__version__ = "0.2.0"

__all__ = [
    "AVERAGE",
    "MAX",
    "MIN",
    "PRODUCT",
    "SUM",
    "ArgumentError",
    "DeadlockError",
    "DeviceError",
    "DriftError",
    "Group",
    "LaunchError",
    "MembershipChange",
    "MismatchError",
    "MissingDependency",
    "NotInitialized",
    "Op",
    "PeerFailed",
    "PeerLeft",
    "RankFailed",
    "RankResults",
    "RingError",
    "SharedMemoryError",
    "StepSkipped",
    "TimeoutExceeded",
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "broadcast_object",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "node_rank",
    "num_nodes",
    "on_membership_change",
    "preempted",
    "rank",
    "reduce_scatter",
    "run",
    "shutdown",
    "size",
]
check_calls(globals(), __all__)
