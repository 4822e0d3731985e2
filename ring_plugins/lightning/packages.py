"""The strategies for `lightning` and for `pytorch_lightning`: the dual-package shim.

`lightning` and `pytorch_lightning` are the same sources published under two names, and both may be installed. Nothing
that one defines is an instance of the other's classes: each has its own ``Trainer``, its own ``Strategy`` and its own
registry of strategy names. So our logic (`parallel`, `strategy`, `fabric`) derives from neither, and this file derives
from it one pair of classes for each installed package.

Importing one of the two redirects the other's messages to its own logger, so this file imports neither by itself. It
derives the classes for a package that the script has already imported; a finder on `sys.meta_path` derives them for a
package that the script imports later. A script that asks for ``RingStrategy`` before it imports either makes us import
`lightning`, or `pytorch_lightning` where that is the only one installed.

``from ring_plugins.lightning import RingStrategy`` gives the class for one of them, `lightning` if both are imported,
yet a script may pass the object to either package's Trainer. A Trainer first checks that it was given a ``Strategy``,
and then sets its ``accelerator``; until then a strategy has only stored its arguments. So each class is registered as a
virtual subclass of the other package's ``Strategy``, and an object that is given an accelerator of the other package
changes its class to the counterpart and is constructed again with the same arguments.
"""

import importlib
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.base.install import is_installed
from ring_plugins.core.rendezvous import detect
from ring_plugins.import_watch import ImportWatch, has_finished
from ring_plugins.lightning.environment import RingEnvironment
from ring_plugins.lightning.fabric import BackwardSyncControl, RingFabricLogic
from ring_plugins.lightning.strategy import RingTrainerLogic

#: Names of the strategies in Lightning's registries, with the arguments they stand for.
_REGISTERED: dict[str, dict[str, Any]] = {
    "ring": {},
    "ring_fork": {"start_method": "fork"},
    "ring_notebook": {"start_method": "fork"},
}


@dataclass(frozen=True)
class Strategies:
    """The strategies for one package."""

    RingStrategy: Any
    RingFabricStrategy: Any
    Callback: Any


#: The modules of each package that correspond to ``lightning.pytorch`` and ``lightning.fabric``.
_MODULES = {
    "lightning": ("lightning.pytorch", "lightning.fabric"),
    "pytorch_lightning": ("pytorch_lightning", "lightning_fabric"),
}
#: The strategies derived so far, by package.
_derived: dict[str, Strategies] = {}
#: By class, the class for the other package.
_counterparts: dict[type, type] = {}


def strategies_for(name: str) -> Strategies:
    """The strategies for one package, which is imported if it is not yet.

    Args:
        name: of the package.
    """
    for module in _MODULES[name]:
        importlib.import_module(module)  # on a first import `_imported` derives the strategies
    if name not in _derived:
        _derived[name] = _strategies(name, *_MODULES[name])
        if len(_derived) == len(_MODULES):
            first, second = _derived.values()
            _make_interchangeable(first.RingStrategy, second.RingStrategy)
            _make_interchangeable(first.RingFabricStrategy, second.RingFabricStrategy)
    return _derived[name]


def preferred() -> Strategies:
    """The strategies for the package that the script has imported, else for an installed one; `lightning` first."""
    present = [name for name in _MODULES if name in sys.modules] or [name for name in _MODULES if is_installed(name)]
    return strategies_for(present[0])


def _strategies(name: str, trainer: str, fabric: str) -> Strategies:
    """Derive the strategies for one package, and make them known to it.

    Args:
        name: of the package, and of this module's attribute that holds the result.
        trainer: the module that corresponds to ``lightning.pytorch``.
        fabric: the module that corresponds to ``lightning.fabric``.
    """

    def of(module: str, attribute: str) -> Any:
        return getattr(importlib.import_module(module), attribute)

    def derive(class_name: str, logic: Any, base: Any, accelerator: Any, launcher: Any) -> Any:
        members = {
            "__doc__": logic.__doc__,
            "__module__": __name__,
            # Pickle finds the class by this name, as an attribute of this module's attribute.
            "__qualname__": f"{name}.{class_name}",
            "package": name,
            "is_interactive": of(f"{fabric}.utilities.imports", "_IS_INTERACTIVE"),
            "reset_seed": staticmethod(of(f"{fabric}.utilities.seed", "reset_seed")),
            "accelerator_type": accelerator,
            "accelerator": _accelerator,
            "lightnings_launcher": staticmethod(launcher),
        }
        return type(class_name, (logic, base), members)

    for_trainer = derive(
        "RingStrategy",
        RingTrainerLogic,
        of(f"{trainer}.strategies", "ParallelStrategy"),
        of(f"{trainer}.accelerators", "Accelerator"),
        of(f"{trainer}.strategies.launchers", "_MultiProcessingLauncher"),
    )
    for_fabric = derive(
        "RingFabricStrategy",
        RingFabricLogic,
        of(f"{fabric}.strategies.parallel", "ParallelStrategy"),
        of(f"{fabric}.accelerators.accelerator", "Accelerator"),
        of(f"{fabric}.strategies.launchers.multiprocessing", "_MultiProcessingLauncher"),
    )
    of(f"{fabric}.plugins.environments.cluster_environment", "ClusterEnvironment").register(RingEnvironment)
    of(f"{fabric}.strategies.strategy", "_BackwardSyncControl").register(BackwardSyncControl)
    _keep_lightning_from_starting_mpi(of(f"{fabric}.plugins.environments.mpi", "MPIEnvironment"))
    _keep_orders(of(f"{fabric}.fabric", "Fabric"))
    # Let ``trainer.fit(torch.compile(model))`` accept it. Lightning 2.6.6, pytorch/utilities/compile.py:118, asks for
    # an instance of ``SingleDeviceStrategy``, ``DDPStrategy`` or ``FSDPStrategy``, and asks nowhere else in the pytorch
    # package for the first. In what matters to the compiler our strategy is one: this process drives one device and
    # the module is not wrapped. Posing as ``DDPStrategy`` would claim a wrapper that is not there, and distribution at
    # world size 1.
    of(f"{trainer}.strategies", "SingleDeviceStrategy").register(for_trainer)
    _register(for_trainer, of(f"{trainer}.strategies", "StrategyRegistry"))
    _register(for_fabric, of(f"{fabric}.strategies", "STRATEGY_REGISTRY"))
    return Strategies(for_trainer, for_fabric, of(f"{trainer}.callbacks", "Callback"))


# One object for both packages --------------------------------------------------------------------


def _make_interchangeable(first: Any, second: Any) -> None:
    """Let each of two classes pass for a ``Strategy`` of the other's package."""
    for strategy, counterpart in ((first, second), (second, first)):
        _counterparts[strategy] = counterpart
        base: Any = next(cls for cls in counterpart.__mro__ if cls.__name__ == "Strategy")
        base.register(strategy)


def _set_accelerator(strategy: Any, accelerator: Any) -> None:
    """Turn `strategy` into its counterpart if `accelerator` belongs to the counterpart's package, and keep that.

    Raises:
        ArgumentError: If `strategy` is of a user's own subclass, which has no counterpart.
    """
    own: Any = next(cls for cls in type(strategy).__mro__ if cls in _counterparts or cls is object)
    counterpart: Any = _counterparts.get(own)
    is_counterparts = counterpart is not None and isinstance(accelerator, counterpart.accelerator_type)
    if not is_counterparts or isinstance(accelerator, strategy.accelerator_type):
        strategy._accelerator = accelerator
        return
    if own is not type(strategy):
        raise ArgumentError(
            f"{type(strategy).__name__} derives from the {own.__name__} of `{own.package}`, but was given to a"
            f" Trainer of `{counterpart.package}`. Derive it from"
            f" {counterpart.__module__}.{counterpart.__qualname__} instead."
        )
    strategy.__class__ = counterpart
    counterpart.__init__(strategy, **strategy.arguments)
    strategy._accelerator = accelerator


#: The first thing that a Trainer sets on a strategy.
_accelerator = property(lambda strategy: strategy._accelerator, _set_accelerator)


# Changes for which Lightning has no public interface ----------------------------------------------


def _register(strategy: type, registry: Any) -> None:
    """Enter `strategy` into a ``StrategyRegistry``. Lightning has no entry points for this."""
    for name, arguments in _REGISTERED.items():
        registry.register(name, strategy, description=f"{strategy.__name__}({arguments})", override=True, **arguments)


def _keep_lightning_from_starting_mpi(mpi_environment: Any) -> None:
    """Let Lightning find out that there is no mpirun without starting MPI.

    Lightning 2.6.6, fabric/plugins/environments/mpi.py:82: where mpi4py is installed, every ``Trainer`` whose strategy
    is given by name (``"ring"`` too) asks MPI for its number of ranks, which initializes it. That takes a moment, fails
    with RuntimeError where mpi4py finds no libmpi, and with Open MPI 5.0 leaves 16 MiB in /dev/shm for each process.
    Outside of an MPI launcher MPI has one rank, so the answer is known; under one, MPI is asked as before.
    """
    asks_mpi = mpi_environment.detect

    def is_started_by_mpi() -> bool:
        return detect().launcher.uses_mpi and asks_mpi()

    mpi_environment.detect = staticmethod(is_started_by_mpi)


def _keep_orders(fabric: Any) -> None:
    """Let ``fabric.setup_dataloaders`` ask our strategy first how a loader is divided.

    Lightning 2.6.6, fabric/fabric.py:467: a sampler of the script's may draw otherwise on each rank, and a batch
    sampler is made again from its class, over other samples; lists of batches are rejected.
    """
    set_up = fabric._setup_dataloader

    def _setup_dataloader(
        self: Any, dataloader: Any, use_distributed_sampler: bool = True, move_to_device: bool = True
    ) -> Any:
        divides = use_distributed_sampler and isinstance(self._strategy, RingFabricLogic)
        if divides and self._requires_distributed_sampler(dataloader):
            divided = self._strategy.divided(dataloader)
            dataloader, use_distributed_sampler = divided, divided is dataloader
        return set_up(self, dataloader, use_distributed_sampler, move_to_device)

    fabric._setup_dataloader = _setup_dataloader


# Packages imported later --------------------------------------------------------------------------


#: ``lightning`` imports all of its parts; ``lightning_fabric`` may be imported without ``pytorch_lightning``.
_PACKAGE_OF = {
    "lightning": "lightning",
    "pytorch_lightning": "pytorch_lightning",
    "lightning_fabric": "pytorch_lightning",
}


def _imported(module: str) -> None:
    """Derive the strategies for a package right after the script has imported it."""
    package = _PACKAGE_OF[module]
    # `lightning_fabric` is a part of `pytorch_lightning`, which may itself be in the middle of its import, or absent.
    is_part = module != package
    if not is_part or (package not in sys.modules and is_installed(package)):
        strategies_for(package)


for _name, _package in _PACKAGE_OF.items():
    if has_finished(_name) and is_installed(_package):
        strategies_for(_package)
sys.meta_path.insert(0, ImportWatch(_PACKAGE_OF, _imported))


# The strategies ----------------------------------------------------------------------------------


def __getattr__(name: str) -> Any:
    """`lightning` and `pytorch_lightning`, None where not installed, and the preferred package's two strategies."""
    if name in _MODULES:
        return strategies_for(name) if is_installed(name) else None
    if name in ("RingStrategy", "RingFabricStrategy", "Callback"):
        globals()[name] = found = getattr(preferred(), name)
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _module_of_earlier_releases(name: str) -> ModuleType:
    """A module that 0.1 had: its error messages told users to derive from the classes in it."""

    def find(attribute: str) -> Any:
        if attribute in ("RingStrategy", "RingFabricStrategy") and is_installed(name):
            return getattr(strategies_for(name), attribute)
        raise AttributeError(attribute)

    module = ModuleType(f"{__package__}.for_{name}")
    vars(module)["__getattr__"] = find
    return module


for _name in _MODULES:
    sys.modules[f"{__package__}.for_{_name}"] = _module_of_earlier_releases(_name)

if TYPE_CHECKING:  # a type checker sees the logic, whose base class is Any to it
    RingStrategy, RingFabricStrategy = RingTrainerLogic, RingFabricLogic
    Callback: Any
