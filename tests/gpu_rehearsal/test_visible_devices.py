"""Which GPUs a process sees, by number, UUID and MIG name."""

import pytest

pytestmark = [pytest.mark.gpu_rehearsal, pytest.mark.timeout(1200)]
#: By rank, the GPU's number among those that are seen; what is seen; and how many that are. "": "would share".
SEEN = [
    ("0;1", "1,0;1,0", [2, 2]),
    ("0;0", "0;1", [1, 1]),
    ("1;0", "1,0;1,0,-1,5", [2, 2]),
    ("0;0", "GPU-02020202-0202;GPU-01", [1, 1]),
    ("0;0", "MIG-01010101,MIG-02;MIG-02020202-0202", [1, 1]),
    ("0;0", "0,1;0,1", []),
    ("0;1", "0,1;1,0", []),
    ("0;0", "MIG-01;MIG-01", []),
]


@pytest.mark.parametrize(("index", "visible", "counts"), SEEN)
def test_each_rank_trains_on_the_gpu_that_it_means(rehearse, index, visible, counts):
    found = rehearse("visible", index, visible, lag=100, check=False)
    if counts:
        assert found.values("count") == counts and found.values("same") == [True, True], found
        assert found.values("device") == [f"cuda:{number}" for number in index.split(";")]
    else:
        texts = found.values("error")
        assert len(texts) == 2 and all("ranks 0, 1 would share the GPU 0000:01:00.0" in text for text in texts), found
