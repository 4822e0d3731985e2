from tests.launch import run_ranks

UNEVEN = """
import os
import numpy as np
import ring_plugins as ring

ring.init(ranks=int(os.environ["TEST_RANKS"]))
much = 60_000_000
splits = [much, 1, 1] if ring.rank() == 1 else [1, 1, 1]
received = ring.all_to_all(np.ones(sum(splits), np.float32), splits)
assert received.size == (much + 2 if ring.rank() == 0 else 3)
"""


def test_a_rank_that_has_all_it_needs_may_leave_while_others_still_transfer():
    run_ranks(UNEVEN, 3, "mpirun", env={"RING_VIRTUAL_NODES": "3"})
