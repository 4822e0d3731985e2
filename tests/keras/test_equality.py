"""Several ranks train to the weights of one process on the same batches, bitwise equal among ranks."""

import ast
from pathlib import Path

import pytest

from tests.keras.launches import BACKENDS, case

TF, TORCH, JAX = BACKENDS
#: Scenario -> the backends on which it runs by default: torch, which is the cheapest, and others only if their code
#: differs. `-m slow` runs it on the remaining ones that support it.
BY_DEFAULT = {
    "accumulation": (TF, TORCH, JAX),
    "accumulation_in_mixed_precision": (TORCH,),
    "accumulation_of_an_embedding": (TORCH,),
    "adam": (TF, TORCH, JAX),
    "batch_normalization": (TF, TORCH, JAX),
    "batch_normalization_as_keras_spells_it": (),
    "batch_normalization_of_masked_steps": (TORCH,),
    "class_weights": (TORCH,),
    "clipping_weight_decay_and_moving_average": (TORCH,),
    "compiled": (TF,),
    "compiled_accumulation": (),
    "compiled_batch_normalization": (),
    "compiled_by_torch": (),  # torch's compiler takes a minute or two
    "compiled_several_steps_an_execution": (),
    "convolution_with_momentum": (TORCH,),
    "eager": (TF,),
    "eager_accumulation": (),
    "embedding": (TORCH,),
    "explicit_optimizer": (TORCH,),
    "fitted_before_without_and_twice_with": (TORCH, JAX),
    "frozen_layer_and_low_rank_adapter": (TORCH,),
    "gradient_of_nothing": (TORCH,),
    "gradients_that_the_optimizer_keeps": (TF,),
    "large_layer": (TF, TORCH, JAX),
    "layers_that_synchronize": (),
    "lazy_model": (TF, TORCH),
    "many_buckets": (TORCH,),
    "mixed_precision": (TORCH, JAX),
    "model_without_call": (TF,),
    "moving_mean_of_own_batches": (TORCH,),
    "not_compiled": (JAX,),
    "remainder": (TORCH,),
    "schedule": (TORCH,),
    "sharded_and_compiled": (),
    "sharded_and_eager": (),
    "sharded_embedding": (TF,),
    "sharded_for_fifty_steps": (TF, TORCH, JAX),
    "sharded_optimizers": (),
    "sharded_with_everything_before_the_update": (TORCH,),
    "several_accumulating_steps_an_execution": (),
    "several_optimizers": (TORCH,),
    "several_steps_an_execution": (TF, JAX),
    "two_outputs_with_weights": (TORCH,),
}
ON_REQUEST = {
    "accumulation_in_mixed_precision": (TF, JAX),
    "accumulation_of_an_embedding": (TF, JAX),
    "batch_normalization_as_keras_spells_it": (TF,),
    "batch_normalization_of_masked_steps": (TF, JAX),
    "class_weights": (TF,),
    "clipping_weight_decay_and_moving_average": (TF, JAX),
    "compiled_accumulation": (TF,),
    "compiled_batch_normalization": (TF,),
    "compiled_by_torch": (TORCH,),
    "compiled_several_steps_an_execution": (TF,),
    "convolution_with_momentum": (TF, JAX),
    "eager_accumulation": (TF, JAX),
    "embedding": (TF, JAX),
    "explicit_optimizer": (TF,),
    "fitted_before_without_and_twice_with": (TF,),
    "frozen_layer_and_low_rank_adapter": (TF, JAX),
    "gradient_of_nothing": (TF,),
    "gradients_that_the_optimizer_keeps": (TORCH, JAX),
    "lazy_model": (JAX,),
    "layers_that_synchronize": (TF, TORCH, JAX),
    "many_buckets": (TF, JAX),
    "mixed_precision": (TF,),
    "moving_mean_of_own_batches": (TF, JAX),
    "remainder": (TF,),
    "schedule": (TF,),
    "several_accumulating_steps_an_execution": (TF,),
    "several_optimizers": (TF, JAX),
    "sharded_and_compiled": (TF, JAX),
    "sharded_and_eager": (TF, TORCH, JAX),
    "sharded_embedding": (TORCH, JAX),
    "sharded_optimizers": (TF, TORCH, JAX),
    "sharded_with_everything_before_the_update": (TF, JAX),
    "two_outputs_with_weights": (TF, JAX),
}
#: Code that depends on the number of ranks is the same on all backends.
ON_THREE_RANKS = (
    "adam", "batch_normalization", "convolution_with_momentum", "large_layer", "sharded_embedding",
    "sharded_for_fifty_steps",
)  # fmt: skip

CASES = [case(backend, 2, name, f"-{name}") for name, backends in BY_DEFAULT.items() for backend in backends]
CASES += [
    case(backend, 2, name, f"-{name}", slow=True) for name, backends in ON_REQUEST.items() for backend in backends
]
CASES += [case(backend, 3, name, f"-{name}", slow=True) for backend in BACKENDS for name in ON_THREE_RANKS]

# Activations are in float16, and sums over another batch size round differently.
TOLERANCE = {"mixed_precision": 1e-3, "accumulation_in_mixed_precision": 1e-3}


@pytest.mark.parametrize("seen", CASES, indirect=True)
def test_scenario(request, seen):
    name = request.node.callspec.params["seen"].name
    for comparison in seen:
        assert comparison["disagreements"] == []
        assert comparison["compared"] > 0
        assert comparison["weights"] <= TOLERANCE.get(name, 1e-6)
        assert comparison["state"] <= TOLERANCE.get(name, 1e-5)


def test_every_scenario_runs_somewhere():
    tree = ast.parse(Path(__file__).with_name("scenarios.py").read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert sorted(BY_DEFAULT) == sorted(f.name for f in functions if f.decorator_list)
