"""Ranks that begin with the same samples are told so, once."""

import pytest

from tests.core.collectives.thread_ranks import on_thread_ranks


@pytest.mark.parametrize(
    ("checksums", "said"), [((7, 8, 7), "ranks 0, 2 have the same"), ((7, 8, 9), ""), ((0, 0, 5), "")]
)
def test_ranks_with_the_same_first_batch_are_named_once(monkeypatch, caplog, checksums, said):
    from ring_plugins.observe import same_samples

    monkeypatch.setattr(same_samples, "_told", [])

    def rank_of(rank, communicator):
        for _ in range(2):
            same_samples.tell_if_same(checksums[rank], communicator)

    with caplog.at_level("WARNING", "ring_plugins"):
        on_thread_ranks(3, rank_of)
    found = [record.getMessage() for record in caplog.records if "same samples" in record.getMessage()]
    assert len(found) == bool(said)
    assert all(said in text for text in found)
