"""PyTorch: averaged gradients for plain loops, and the "ring" backend of torch.distributed."""

from ring_plugins.core.functions import gpu_functions
from ring_plugins.observe.balance_monitor import BalanceMonitor
from ring_plugins.observe.timeline import Timeline
from ring_plugins.torch import functions
from ring_plugins.torch.backend import register
from ring_plugins.torch.broadcast import broadcast_optimizer_state, broadcast_parameters
from ring_plugins.torch.gradients import GradientAverager
from ring_plugins.torch.optimizer import DistributedOptimizer

register()
gpu_functions["torch"] = functions

__all__ = [
    "BalanceMonitor",
    "DistributedOptimizer",
    "GradientAverager",
    "Timeline",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]
