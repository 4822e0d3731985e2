"""What was wrong before anything ran on a GPU; README.md has the list."""

import pytest

pytestmark = [pytest.mark.gpu_rehearsal, pytest.mark.timeout(1200)]


def test_what_was_wrong_with_types_memory_threads_and_graphs(rehearse):
    found = rehearse("former_defects", lag=200)
    assert found.values("types") == [[True] * 5] * 2
    assert found.values("overwritten") == [0, 0]
    assert found.values("futures") == [[0, True, True]] * 2
    assert found.values("message") == [True, True] and found.values("visits of GPU 0") == [0, 0]
    assert found.values("ends of a captured communicator") == [0, 0] and found.values("replayed") == [True, True]
    assert found.values("threads of NCCL's") == [0, 0]  # each would delay a bucket by 0.2 ms


def test_a_rank_that_has_left_is_not_blamed_for_what_the_gpu_computes_before(rehearse):
    assert rehearse("leaves").values("received") == [[8.0] * 4]


def test_nobody_waits_for_an_abort_that_hangs(rehearse):
    heard = rehearse("killed_peer", ranks=3, check=False, abort_hangs=1).values("heard")
    assert len(heard) == 2 and all("rank 2" in text for text in heard), heard


def test_the_benchmark_measures_our_calls_on_one_card_too(rehearse):
    found = rehearse("benchmark_alone", ranks=1)
    assert found.values("no communication") == [0]
    assert found.values("ring_plugins")[0] > 0 and found.values("DDP (NCCL)")[0] > 0
