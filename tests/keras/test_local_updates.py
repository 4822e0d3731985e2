"""Local updates in `fit`: `checks_local_updates.py` on ranks that count as hosts, and what one process can see."""

from pathlib import Path

import pytest

from ring_plugins.core.base.errors import ArgumentError
from tests.keras.launches import BACKENDS, environment
from tests.launch import run_ranks

CHECKS = Path(__file__).with_name("checks_local_updates.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "processes", "nodes"),
    [(backend, *hosts) for backend in BACKENDS for hosts in ((2, "1,1"), (3, "1,2"))]
    + [("torch", 4, "1,1,1,1"), ("jax", 4, "2"), ("torch", 2, "2")],
)
def test_hosts_exchange_weights(backend, processes, nodes, tmp_path):
    env = environment(backend, RING_VIRTUAL_NODES=nodes, TEST_PATH=str(tmp_path))
    result = run_ranks(CHECKS, processes, "exported", env=env, timeout=600)
    for rank in range(processes):
        assert {*result.reports[rank].values()} == {"ok"}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"sync_every": 0}, "sync_every=0 must be a number of steps from 1, or a time"),
        ({"sync_every": 8, "fragments": 3}, "fragments=3 must divide sync_every=8"),
        ({"sync_every": 8, "outer": "adam"}, "outer='adam' must be"),
        ({"sync_every": 8, "compression": "auto"}, "exchanges of local updates are too few"),
        ({"outer": "nesterov"}, r"BroadcastCallback\(outer='nesterov'\) needs sync_every"),
        ({"fragments": 2}, r"BroadcastCallback\(fragments=2\) needs sync_every"),
        ({"sync_every": 8, "shard_optimizer": True}, "does not work with shard_optimizer=True"),
        ({"sync_every": 8, "average_gradients": False}, "does not work with average_gradients=False"),
    ],
)
def test_bad_arguments(options, text):
    from ring_plugins.keras import BroadcastCallback

    with pytest.raises(ArgumentError, match=text):
        BroadcastCallback(**options)


def test_numbers_of_variables_are_read_and_written_in_stretches():
    import keras
    import numpy as np

    from ring_plugins.keras.local_updates import VariableWeights

    variables = [keras.Variable(np.arange(count) + 100.0 * i, dtype="float32") for i, count in enumerate((5, 30))]
    variables.append(keras.Variable(np.ones((), "int32"), dtype="int32", trainable=False))
    variables.append(keras.Variable(np.full((2, 2), 7.0), dtype="bfloat16"))
    weights = VariableWeights(lambda: None, variables[:3], variables[3:])
    assert (weights.trained, weights.averaged, weights.dtype) == (48, 4, "float32")  # three lines, and no integers
    stretch = np.full(20, -1.0, np.float32)
    weights.read(32, stretch)
    assert stretch.tolist() == [127.0, 128.0, 129.0] + [0.0] * 13 + [7.0] * 4
    stretch[:] = np.arange(20)
    weights.write(32, stretch)
    assert keras.ops.convert_to_numpy(variables[1]).tolist() == [100.0 + i for i in range(27)] + [0.0, 1.0, 2.0]
    stretch[:] = 0  # no variable has its memory
    assert keras.ops.convert_to_numpy(keras.ops.cast(variables[3], "float32")).tolist() == [[16, 17], [18, 19]]


@pytest.mark.parametrize(("every", "execution", "expected"), [(2, 1, [2, 4, 6, 8]), (2, 4, [4, 8]), (3, 2, [4, 8])])
def test_an_execution_of_several_steps_is_followed_by_one_exchange(every, execution, expected):
    from ring_plugins.keras.local_updates import BetweenHosts

    class Counting(BetweenHosts):
        teams = 2

        def __init__(self):
            self._last, self.steps, self._left, self._late, self._turn, self.met = -1, 0, every, None, 0, []

        def _meet(self, turn):
            self.met.append(self.steps)
            self._left = every

    counting = Counting()
    for batch in range(execution - 1, 8, execution):
        counting.after_batch(batch)
    assert counting.met == expected and counting.steps == 8
