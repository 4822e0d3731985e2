"""A state of variables of TensorFlow, as a loop with tapes has it."""

from types import SimpleNamespace

import pytest

from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.joining import training_state
from ring_plugins.horovod import elastic as shared


@pytest.mark.slow  # it imports TensorFlow
def test_variables_and_values_are_saved_restored_and_given_to_all(monkeypatch):
    tf = pytest.importorskip("tensorflow")
    from ring_plugins.horovod.tensorflow import elastic

    job = SimpleNamespace(elastic=SimpleNamespace(view=0), replaces=False)
    for module in (shared, training_state):
        monkeypatch.setattr(module, "current", lambda: job)
    given = []
    monkeypatch.setattr(elastic, "broadcast_all", lambda variables, root: given.append((variables, root)))
    monkeypatch.setattr(elastic.ring, "broadcast_object", lambda value, root: {"batch": 7})
    variable = tf.Variable([1.0, 2.0])
    state = elastic.TensorFlowState([variable], batch=3)
    state.save()
    variable.assign([5.0, 5.0])
    state.batch = 4
    state.restore()
    assert variable.numpy().tolist() == [1, 2] and state.batch == 3
    state.sync()
    assert given == [([variable], 0)] and state.batch == 7
    with pytest.raises(ArgumentError, match="variables is empty"):
        elastic.TensorFlowState([])
