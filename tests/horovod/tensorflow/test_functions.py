"""Broadcasts of variables and objects, in a job of one; test_tensorflow.py has two ranks."""

import pytest

import ring_plugins as ring

pytestmark = pytest.mark.slow  # they import TensorFlow


@pytest.fixture(autouse=True)
def _job_of_one():
    ring.init(ranks=1)
    yield
    ring.shutdown()


def test_variables_and_objects_are_the_roots():
    tf = pytest.importorskip("tensorflow")
    from ring_plugins.horovod.tensorflow import functions

    variables = [tf.Variable([1.0, 2.0]), tf.Variable(3)]
    assert [one.numpy().tolist() for one in functions.broadcast_(variables, 0)] == [[1, 2], 3]
    assert functions.broadcast_object_fn(root_rank=0)({"epoch": 3}) == {"epoch": 3}
    assert functions.broadcast_object([1], 0, None, "name") == [1]
    assert functions.allgather_object(5, None, "name") == [5]


def test_what_belongs_to_tensorflow_1_says_what_to_write():
    pytest.importorskip("tensorflow")
    from ring_plugins.horovod.tensorflow import functions

    with pytest.raises(RuntimeError, match=r"hvd\.broadcast_variables\(model\.variables, root_rank=0\)"):
        functions.broadcast_global_variables(0)
    with pytest.raises(ring.ArgumentError, match="session='name' must be left out"):
        functions.broadcast_object([1], 0, "name")
