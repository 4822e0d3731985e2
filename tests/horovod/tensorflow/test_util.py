"""References to variables."""

import pytest


@pytest.mark.slow  # it imports TensorFlow
def test_variables_come_back_from_their_references():
    tf = pytest.importorskip("tensorflow")
    from ring_plugins.horovod.tensorflow import util

    one, other = tf.Variable(1.0), tf.Variable(2.0)
    references = util.vars_to_refs([one, [other]])
    assert len({references}) == 1
    assert util.refs_to_vars(references)[0] is one
    assert util.refs_to_vars(references)[1][0] is other
    assert util._executing_eagerly()
