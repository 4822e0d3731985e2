"""The rate of one optimizer in and after a fit, in one process; test_learning_rate.py has several ranks."""

import keras
import numpy as np
import pytest

from ring_plugins.keras.rates import has_schedule, known_rate_of, multiply_schedule, rate_of, stop_multiplying


@pytest.fixture
def optimizer():
    made = keras.optimizers.SGD(0.1, momentum=0.5)
    made.build([keras.Variable([0.0])])
    return made


def rate(optimizer):
    return float(np.asarray(keras.ops.convert_to_numpy(optimizer.learning_rate)))


def test_the_job_has_its_rate_inside_a_fit_and_files_the_one_for_one_process(optimizer):
    found = rate_of(optimizer)
    found.begin_fit(optimizer, momentum_correction=True)
    found.set(optimizer, 4.0, True)
    assert rate(optimizer) == pytest.approx(0.4)
    assert optimizer.get_config()["learning_rate"] == pytest.approx(0.1)
    assert known_rate_of(optimizer) is found and known_rate_of(keras.optimizers.SGD(0.1)) is None


def test_after_a_fit_a_script_reads_the_rate_of_the_fit_and_the_variable_is_the_one_for_one_process(optimizer):
    found = rate_of(optimizer)
    found.begin_fit(optimizer, momentum_correction=True)
    found.set(optimizer, 4.0, True)
    found.end_fit()
    assert rate(optimizer) == pytest.approx(0.4)
    assert float(keras.ops.convert_to_numpy(optimizer._learning_rate)) == pytest.approx(0.1)
    found.begin_fit(optimizer, momentum_correction=True)
    assert rate(optimizer) == pytest.approx(0.1)


def test_what_a_callback_sets_inside_a_fit_changes_the_base(optimizer):
    found = rate_of(optimizer)
    found.begin_fit(optimizer, momentum_correction=True)
    found.set(optimizer, 4.0, True)
    optimizer.learning_rate = 0.2  # half, as ReduceLROnPlateau would
    found.set(optimizer, 4.0, True)
    assert rate(optimizer) == pytest.approx(0.2)
    assert found.base == pytest.approx(0.05)


@pytest.mark.parametrize(("corrects", "expected"), [(True, 8.0), (False, 2.0)])
def test_velocities_are_scaled_along_with_the_rate_if_that_is_wanted(optimizer, corrects, expected):
    velocity = optimizer.momentums[0]
    velocity.assign([2.0])
    found = rate_of(optimizer)
    found.begin_fit(optimizer, corrects)
    found.set(optimizer, 4.0, corrects)
    assert keras.ops.convert_to_numpy(velocity).tolist() == [pytest.approx(expected)]
    found.end_fit()
    assert keras.ops.convert_to_numpy(velocity).tolist() == [pytest.approx(2.0)]


def test_a_schedule_is_multiplied_where_the_optimizer_reads_it_and_by_each_owner_once():
    optimizer = keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5))
    optimizer.build([keras.Variable([0.0])])
    assert has_schedule(optimizer)

    class Owner:
        pass

    first, second = Owner(), Owner()
    multiply_schedule(optimizer, first, [2.0, 3.0])
    assert float(optimizer._get_current_learning_rate()) == pytest.approx(0.2)
    multiply_schedule(optimizer, second, [5.0])
    assert float(optimizer._get_current_learning_rate()) == pytest.approx(1.0)
    stop_multiplying(optimizer, first)
    assert float(optimizer._get_current_learning_rate()) == pytest.approx(0.5)
    stop_multiplying(optimizer, second)
    assert float(optimizer._get_current_learning_rate()) == pytest.approx(0.1)
