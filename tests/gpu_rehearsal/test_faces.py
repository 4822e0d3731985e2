"""What other faces than torch's ask of GPUs: Horovod's operations, and memory of TensorFlow and JAX."""

import pytest

pytestmark = [pytest.mark.gpu_rehearsal, pytest.mark.timeout(1200)]


def test_operations_of_horovod_and_zeros_of_a_rank_in_join(rehearse):
    result = rehearse("horovod_joins", "named", lag=100)
    assert result.values("error") == ["none", "none"]
    assert result.values("factors") == [[True, f"cuda:{rank}", True] for rank in range(2)]
    assert result.values("splits") == [[True, True, [1, 2], 3], [True, True, [3, 2], 5]]
    assert result.values("zeros") == [[3.0] * 4] * 2 and result.values("last") == [0, 0]
    assert result.values("after") == [[6.0] * 4] * 2


@pytest.mark.parametrize("case", ["waits", "starts", "optimizer"])
def test_what_gets_no_zeros_of_a_rank_in_join_is_an_error_with_a_remedy(rehearse, case):
    """It waited for ever; and what came after `join` matched what was left."""
    result = rehearse("horovod_joins", case, check=False)
    texts = result.values("error")
    assert len(texts) == 2 and all("it is in hvd.join()" in text for text in texts), result
    assert all('hvd.allreduce(x, name="loss")' in text for text in texts) and not result.values("wrong")


def test_memory_of_tensorflow_by_dlpack(rehearse):
    result = rehearse("foreign", "tensorflow", lag=100)
    assert result.values("sum") == [[3.0 * value for value in range(12)]] * 2
    assert result.values("memory") == [[rank, "float32", 12] for rank in range(2)]
    assert all("TensorFlow computed a gradient on cpu" in text for text in result.values("on the CPU"))
    assert result.values("GPUs") == [0, 0]  # so nothing of TensorFlow's own can be tried


def test_addresses_and_streams_of_jax(rehearse):
    result = rehearse("foreign", "jax", lag=100)
    assert result.values("sum") == [[3.0]] * 2 and result.values("GPUs") == [0, 0]
