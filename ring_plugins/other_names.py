"""What a module answers to a name that stands elsewhere here, or that Horovod has: an AttributeError with the remedy.

Scripts that come from Horovod import one module as `hvd` and find everything in it.
"""

import ast
import sys
from collections.abc import Collection
from difflib import get_close_matches
from pathlib import Path

#: Horovod's callback that starts ranks with equal weights.
HOROVODS_BROADCAST = "hvd.callbacks.BroadcastGlobalVariablesCallback(0)"
#: Names of Horovod's, with what to write instead where the name alone does not tell.
_HOROVOD = {
    "Adasum": "op=hvd.Average: Adasum does not exist here",
    "BroadcastGlobalVariablesCallback": "ring_plugins.keras.BroadcastCallback()",
    "BroadcastGlobalVariablesHook": "ring_plugins.keras.broadcast_variables(model) before the first step",
    "Compression": "compression='fp16' as an argument of what averages",
    "DistributedGradientTape": "ring_plugins.keras.DistributedOptimizer(optimizer)",
    "ElasticRayExecutor": "RayExecutor(settings, min_workers=2), which goes on when ranks are lost",
    "LocalGradientAggregationHelper": "gradient_accumulation_steps= of the Keras optimizer",
    "PartialDistributedGradientTape": "DistributedGradientTape for shared variables, tf.GradientTape for the others",
    "ProcessSet": "group = ring_plugins.Group(ranks)",
    "SyncBatchNorm": "ring_plugins.torch.SyncBatchNorm",
    "SyncBatchNormalization": "ring_plugins.keras.BroadcastCallback(synchronized_batch_norm=True)",
    "add_process_set": "group = ring_plugins.Group(ranks)",
    "allgather": "ring_plugins.all_gather(x)",
    "allgather_async": "work = ring_plugins.all_gather(x, wait=False)",
    "allgather_object": "ring_plugins.all_gather_object(x)",
    "allreduce": "ring_plugins.all_reduce(x)",
    "allreduce_async": "work = ring_plugins.all_reduce(x, wait=False)",
    "alltoall": "ring_plugins.all_to_all(x)",
    "broadcast_": "ring_plugins.broadcast(x, root, out=x), and for variables of TensorFlow broadcast_variables",
    "broadcast_async": "work = ring_plugins.broadcast(x, root, wait=False)",
    "broadcast_global_variables": "ring_plugins.keras.broadcast_variables(model)",
    "broadcast_object_fn": "ring_plugins.broadcast_object(x, root)",
    "callbacks": "ring_plugins.keras, which has the callbacks itself",
    "compression": "compression='fp16' as an argument of what averages: others do not exist here",
    "gpu_available": "torch.cuda.is_available() or tf.config.list_physical_devices('GPU')",
    "grouped_allgather": "ring_plugins.all_gather(x) for each tensor",
    "grouped_allreduce": "ring_plugins.all_reduce(x) for each tensor",
    "grouped_reducescatter": "ring_plugins.reduce_scatter(x) for each tensor",
    "join": "drop_last=True in the DataLoader, or steps_per_epoch in fit(): all ranks need equally many steps",
    "local_rank_op": "tf.constant(ring_plugins.local_rank())",
    "local_size_op": "tf.constant(ring_plugins.local_size())",
    "poll": "work.done()",
    "rank_op": "tf.constant(ring_plugins.rank())",
    "reducescatter": "ring_plugins.reduce_scatter(x)",
    "remove_process_set": "group = ring_plugins.Group(ranks)",
    "size_op": "tf.constant(ring_plugins.size())",
    "sparse_allreduce_async": "DistributedOptimizer, which averages sparse gradients",
    "start_timeline": "RING_TIMELINE=directory, before the job starts",
    "stop_timeline": "RING_TIMELINE=directory, before the job starts",
    "synchronize": "work.wait()",
}


#: Names of other libraries, and what to write instead.
_ELSEWHERE = {
    "get_local_rank": "ring_plugins.local_rank()",
    "get_rank": "ring_plugins.rank()",
    "get_world_size": "ring_plugins.size()",
    "hvd": "import ring_plugins.horovod.torch as hvd, or .keras or .tensorflow",
    "world_size": "ring_plugins.size()",
}
#: Packages whose public names are looked up without importing them, which would import a framework.
_PLUGINS = ("torch", "keras", "lightning")
_OF_HOROVOD = ("horovod.torch", "horovod.keras", "horovod.tensorflow")


def no_attribute(module: str, name: str) -> AttributeError:
    """The error for a name that a module lacks; called by the module's `__getattr__`.

    Raises:
        ImportError: with the same remedy, if `from module import name` asks: Python drops an AttributeError's text.
    """
    remedy = _remedy(module, name)
    asks = sys._getframe(2).f_code.co_name
    if remedy and asks == "_handle_fromlist":  # of importlib, which first sees whether the module has the name
        raise ImportError(f"cannot import name {name!r} from {module!r}{remedy}", name=module)
    return AttributeError(f"module {module!r} has no attribute {name!r}{remedy}", name=name)


def as_in_script(ours: str, horovods: str) -> str:
    """What a script should write: Horovod's name for it, if the script has a module with Horovod's names as `hvd`."""
    face = getattr(sys.modules.get("__main__"), "hvd", None)
    return horovods if getattr(face, "__name__", "").startswith("ring_plugins.horovod.") else ours


def _remedy(module: str, name: str) -> str:
    package, _, inner = module.partition(".")
    if module != package and name in getattr(sys.modules.get(package), "__all__", ()):
        return f": it is {package}.{name}"
    if inner in ("", "horovod") and name in _PLUGINS and sys._getframe(3).f_code.co_name != "_handle_fromlist":
        return f": write import {module}.{name}"
    others = _OF_HOROVOD if inner.startswith("horovod") else _PLUGINS
    if found := [f"{package}.{other}" for other in others if other != inner and name in _public_names(other)]:
        return f": import it from {' or '.join(found)}"
    if name in _HOROVOD:
        return f": write {_HOROVOD[name]} (docs/from_horovod.md)"
    if name in _ELSEWHERE:
        return f": write {_ELSEWHERE[name]}"
    directory = Path(__file__).parent.joinpath(*inner.split("."))
    if name.startswith("_") or (directory / name).exists() or (directory / f"{name}.py").exists():
        return ""  # a module of ours, which `from package import module` first looks for here
    public = {one.casefold(): one for one in getattr(sys.modules.get(module), "__all__", ())}
    near = get_close_matches(name.casefold(), public, 1, 0.75)
    return f": did you mean {module}.{public[near[0]]}?" if near else ""


def _public_names(module: str) -> Collection[str]:
    """What a module of this package has in its first `__all__`, as its source says."""
    source = Path(__file__).parent.joinpath(*module.split("."), "__init__.py")
    try:
        body = ast.parse(source.read_text(encoding="utf-8")).body
    except OSError:  # installed without sources
        return ()
    for line in body:
        if isinstance(line, ast.Assign) and [ast.unparse(target) for target in line.targets] == ["__all__"]:
            names: list[str] = ast.literal_eval(line.value)
            return names
    return ()
