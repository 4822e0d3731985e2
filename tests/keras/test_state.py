"""What all ranks have alike: weights, the state of optimizers, and moving statistics after they are averaged."""

import keras
import numpy as np
import pytest

from ring_plugins.core.base.errors import ArgumentError, MismatchError
from ring_plugins.keras.state import (
    PART,
    average_variables,
    check_built,
    check_equal,
    innermost,
    nested,
    optimizers_among,
    optimizers_of,
    state_and_seeds,
    weight_checksums,
)
from tests.core.collectives.thread_ranks import on_thread_ranks


def compiled():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dropout(0.5, seed=1), keras.layers.Dense(2)])
    model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)), "mse")
    return model


def test_optimizers_are_found_once_and_inside_others():
    model, other = compiled(), keras.optimizers.Adam()
    model.discriminator_optimizer = other
    assert optimizers_of(model) == [model.optimizer, other]
    assert optimizers_among([model, other]) == [model.optimizer, other]
    assert nested(model.optimizer) == [model.optimizer, model.optimizer.inner_optimizer]
    assert innermost(other) is other


def test_state_is_told_from_seeds_and_from_the_parts_of_a_sharded_optimizer():
    model = compiled()
    model.optimizer.build(model.trainable_variables)
    state, (seed,) = state_and_seeds(model)
    assert seed is model.layers[0].seed_generator.state and len(state) == 2 + len(model.optimizer.variables)
    setattr(model.optimizer.inner_optimizer.momentums[0], PART, True)
    assert len(state_and_seeds(model)[0]) == len(state) - 1
    names, sums = weight_checksums(model)
    assert len(names) == 2 and len(set(sums)) == 2


def test_models_that_differ_are_told_of_by_their_first_variable():
    def rank_of(rank, communicator):
        check_equal([keras.Variable(np.full(2, rank, "float32"))], communicator)
        shapes = [(2,), (3 + rank,)]
        with pytest.raises(MismatchError, match=r"First at variable 1: rank 0 has .* of shape \(3,\), float32; rank 1"):
            check_equal([keras.Variable(np.zeros(shape, "float32")) for shape in shapes], communicator)

    on_thread_ranks(2, rank_of)


def test_what_differs_is_averaged():
    def rank_of(rank, communicator):
        variables = [keras.Variable(np.full(2, value, "float32")) for value in (1.0, float(rank))]
        average_variables(variables, communicator)
        return [keras.ops.convert_to_numpy(variable).tolist() for variable in variables]

    assert on_thread_ranks(3, rank_of) == [[[1.0, 1.0], [1.0, 1.0]]] * 3


def test_a_model_without_variables_is_not_built():
    check_built(compiled())
    with pytest.raises(ArgumentError, match=r"is not built \(.*dense"):
        check_built(keras.Sequential([keras.layers.Dense(1)]))
