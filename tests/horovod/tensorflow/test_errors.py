"""Errors that are ours and TensorFlow's."""

import copy
import pickle

import pytest

from ring_plugins.core.base.errors import ArgumentError, MismatchError, PeerFailed, TimeoutExceeded

pytestmark = pytest.mark.slow  # they import TensorFlow


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (ArgumentError("x is wrong"), "InvalidArgumentError"),
        (MismatchError("ranks disagree"), "FailedPreconditionError"),
        (PeerFailed("rank 1 is gone", 1), "UnknownError"),
        (TimeoutExceeded("waited"), "UnknownError"),
    ],
)
def test_an_error_is_of_both_classes_and_other_processes_read_it_as_ours(error, name):
    tf = pytest.importorskip("tensorflow")
    from ring_plugins.horovod.tensorflow.errors import with_tensorflow_errors

    @with_tensorflow_errors
    def operation():
        raise error

    with pytest.raises(type(error), match=str(error)) as caught:
        operation()
    found = caught.value
    assert isinstance(found, getattr(tf.errors, name))
    assert found.message == str(error) == str(found)
    assert getattr(found, "rank", None) == getattr(error, "rank", None)
    for again in (copy.copy(found), pickle.loads(pickle.dumps(found))):
        assert type(again) is type(error)
        assert str(again) == str(error)
    with pytest.raises(type(error)) as twice:
        with_tensorflow_errors(operation)()
    assert type(twice.value) is type(found)
