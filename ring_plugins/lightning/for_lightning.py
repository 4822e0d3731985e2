"""The strategies as subclasses of `lightning`'s; `for_pytorch_lightning` holds the twins."""

from lightning.fabric.accelerators.accelerator import Accelerator as FabricAccelerator
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.mpi import MPIEnvironment
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies.launchers.multiprocessing import (
    _MultiProcessingLauncher as FabricMultiProcessingLauncher,
)
from lightning.fabric.strategies.parallel import ParallelStrategy as FabricParallelStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.strategies import ParallelStrategy, SingleDeviceStrategy, StrategyRegistry
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher

from ring_plugins.lightning.environment import RingEnvironment
from ring_plugins.lightning.fabric import BackwardSyncControl, RingFabricLogic
from ring_plugins.lightning.registration import allow_compiled_modules, look_before_starting_mpi, register
from ring_plugins.lightning.strategy import RingTrainerLogic
from ring_plugins.lightning.tree import Tree

TREE = Tree("lightning", reset_seed, _MultiProcessingLauncher, FabricMultiProcessingLauncher, _IS_INTERACTIVE)


# Our attributes are of our own types where Lightning's are wider; the logic's docstrings are those of the classes.
class RingStrategy(RingTrainerLogic, ParallelStrategy):  # type: ignore[misc]  # noqa: D101
    __doc__ = RingTrainerLogic.__doc__
    tree = TREE
    accelerator_type = Accelerator


class RingFabricStrategy(RingFabricLogic, FabricParallelStrategy):  # type: ignore[misc]  # noqa: D101
    __doc__ = RingFabricLogic.__doc__
    tree = TREE
    accelerator_type = FabricAccelerator


ClusterEnvironment.register(RingEnvironment)
_BackwardSyncControl.register(BackwardSyncControl)
look_before_starting_mpi(MPIEnvironment)
allow_compiled_modules(RingStrategy, SingleDeviceStrategy)
register(RingStrategy, StrategyRegistry)
register(RingFabricStrategy, STRATEGY_REGISTRY)
