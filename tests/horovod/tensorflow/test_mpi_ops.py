"""Where this process is, as operations of TensorFlow."""

import pytest

import ring_plugins as ring

pytestmark = pytest.mark.slow  # they import TensorFlow


@pytest.fixture(autouse=True)
def _job_of_one():
    ring.init(ranks=1)
    yield
    ring.shutdown()


def test_places_are_tensors_eagerly_and_in_functions():
    tf = pytest.importorskip("tensorflow")
    from ring_plugins.horovod.tensorflow import mpi_ops

    operations = mpi_ops.rank_op, mpi_ops.local_rank_op, mpi_ops.size_op, mpi_ops.local_size_op
    for places in ([one() for one in operations], tf.function(lambda: [one() for one in operations])()):
        assert [int(one) for one in places] == [0, 0, 1, 1]
        assert {one.dtype for one in places} == {tf.int32}
    assert int(mpi_ops.process_set_included_op()) == 1
    with pytest.raises(Exception, match="process_set_id=7 is the number of no process set"):
        mpi_ops.size_op(7)
    assert mpi_ops.check_num_rank_power_of_2(8)
    assert mpi_ops.handle_average_backwards_compatibility(None, False) is mpi_ops.Sum
    assert mpi_ops.allreduce(tf.constant([2, 3]), op=mpi_ops.Sum).numpy().tolist() == [2, 3]
