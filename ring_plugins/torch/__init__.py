"""PyTorch: averaged gradients for plain loops, and the "ring" backend of torch.distributed."""

from ring_plugins.core.base.arguments import check_calls
from ring_plugins.core.base.install import missing
from ring_plugins.other_names import no_attribute

try:
    import torch as _torch  # noqa: F401 - everything below needs it
except ImportError as error:
    raise missing("ring_plugins.torch", "PyTorch", error, "torch") from error

from ring_plugins.core.functions import gpu_functions
from ring_plugins.observe.balance_monitor import BalanceMonitor
from ring_plugins.observe.timeline import Timeline
from ring_plugins.torch import functions
from ring_plugins.torch.accelerate import accept_ring
from ring_plugins.torch.backend import register
from ring_plugins.torch.broadcast import broadcast_optimizer_state, broadcast_parameters
from ring_plugins.torch.compiled import leave_out_of_compilation
from ring_plugins.torch.differentiable import all_gather, all_reduce, all_to_all, broadcast, reduce_scatter
from ring_plugins.torch.global_batch import GlobalBatches
from ring_plugins.torch.gradients import GradientAverager
from ring_plugins.torch.join import join
from ring_plugins.torch.loaders import ElasticSampler
from ring_plugins.torch.local_updates import LocalUpdates
from ring_plugins.torch.optimizer import DistributedOptimizer
from ring_plugins.torch.sync_batch_norm import SyncBatchNorm
from ring_plugins.torch.training_state import TrainingState

leave_out_of_compilation()
register()
accept_ring()
gpu_functions["torch"] = functions

__all__ = [
    "BalanceMonitor",
    "DistributedOptimizer",
    "ElasticSampler",
    "GlobalBatches",
    "GradientAverager",
    "LocalUpdates",
    "SyncBatchNorm",
    "Timeline",
    "TrainingState",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "join",
    "reduce_scatter",
]
check_calls(globals(), __all__)


def __getattr__(name: str) -> object:
    raise no_attribute(__name__, name)
