"""On TensorFlow, host calls take gradients out of the graph."""

import pytest

from tests.keras.launches import on_ranks


@on_ranks("own_compiled_step", "tensorflow")
def test_tracing_a_step_of_the_script_s_own_warns_of_nothing_and_keeps_no_communicator(seen):
    """AutoGraph would rewrite what averages, and say for each function that it cannot."""
    assert seen == [[[], pytest.approx([-0.15] * 5), False]] * 2
