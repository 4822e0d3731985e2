"""The strategies as subclasses of `pytorch_lightning`'s; `for_lightning` holds the twins."""

from lightning_fabric.accelerators.accelerator import Accelerator as FabricAccelerator
from lightning_fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning_fabric.plugins.environments.mpi import MPIEnvironment
from lightning_fabric.strategies import STRATEGY_REGISTRY
from lightning_fabric.strategies.launchers.multiprocessing import (
    _MultiProcessingLauncher as FabricMultiProcessingLauncher,
)
from lightning_fabric.strategies.parallel import ParallelStrategy as FabricParallelStrategy
from lightning_fabric.strategies.strategy import _BackwardSyncControl
from lightning_fabric.utilities.imports import _IS_INTERACTIVE
from lightning_fabric.utilities.seed import reset_seed
from pytorch_lightning.accelerators import Accelerator
from pytorch_lightning.strategies import ParallelStrategy, SingleDeviceStrategy, StrategyRegistry
from pytorch_lightning.strategies.launchers import _MultiProcessingLauncher

from ring_plugins.lightning.environment import RingEnvironment
from ring_plugins.lightning.fabric import BackwardSyncControl, RingFabricLogic
from ring_plugins.lightning.registration import allow_compiled_modules, look_before_starting_mpi, register
from ring_plugins.lightning.strategy import RingTrainerLogic
from ring_plugins.lightning.tree import Tree

TREE = Tree("pytorch_lightning", reset_seed, _MultiProcessingLauncher, FabricMultiProcessingLauncher, _IS_INTERACTIVE)


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
