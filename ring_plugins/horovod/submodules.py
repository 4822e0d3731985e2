"""Submodules of Horovod that are no files here: other names of modules, and those that do not exist here.

Python asks the finder of this file once no file of the name has been found. It answers with the module in which the
names stand here, or with an ImportError that says what to write instead.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_PACKAGE = "ring_plugins.horovod."
#: Modules that Horovod divides further than this package does, and where their names are here.
ALIASES = {
    "common.elastic": "elastic",
    "spark.runner": "spark",
    "tensorflow.compression": "basics",
    "tensorflow.keras.callbacks": "keras.callbacks",
    "tensorflow.keras.elastic": "keras.elastic",
    "torch.compression": "torch",
    "torch.functions": "torch",
    "torch.mpi_ops": "torch",
    "torch.optimizer": "torch",
    "torch.sync_batch_norm": "torch",
}
_ESTIMATOR = "ring_plugins.horovod.spark.run(fn, num_proc=4) with the training in fn, as there are no estimators"
_LAUNCHER = "ring_plugins.horovod.run(fn, num_proc=4) or the command `ring run`, which have a launcher of their own"
#: What does not exist here, and what to write instead. A name stands for its own submodules, too.
INSTEAD = {
    "data": "torch.utils.data.DataLoader with num_workers=2, which loads ahead",
    "mxnet": "ring_plugins.horovod.torch, .keras or .tensorflow: MXNet is not supported",
    "ray": "RayExecutor of ring_plugins.horovod.ray, where min_workers=2 lets the others go on when ranks are lost",
    "runner": _LAUNCHER,
    "spark": _ESTIMATOR,
    "tensorflow.data": "tf.data's own service, tf.data.experimental.service",
    "tensorflow.gradient_aggregation": "gradient_accumulation_steps= of the Keras optimizer",
    "tensorflow.gradient_aggregation_eager": "gradient_accumulation_steps= of the Keras optimizer",
    "_keras": "ring_plugins.horovod.keras, or ring_plugins.horovod.tensorflow.keras",
}


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        name = fullname.removeprefix(_PACKAGE)
        if name == fullname:
            return None
        if name in ALIASES:
            return ModuleSpec(fullname, _Alias(_PACKAGE + ALIASES[name]))
        part = name
        while part and part not in INSTEAD:
            part = part.rpartition(".")[0]
        if not part:
            return None
        raise ImportError(
            f"horovod.{name} does not exist in ring_plugins; instead: {INSTEAD[part]} (docs/from_horovod.md).",
            name=fullname,
        )


class _Alias(Loader):
    """Loads a module by importing another, which then has both names."""

    def __init__(self, module: str) -> None:
        self._module = module

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        self._original = importlib.import_module(self._module)
        self._spec = self._original.__spec__
        return self._original

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # importlib has set that of the alias


def install() -> None:
    """Have Python ask for Horovod's submodules here once it has found no file."""
    if not any(isinstance(one, _Finder) for one in sys.meta_path):
        sys.meta_path.append(_Finder())
