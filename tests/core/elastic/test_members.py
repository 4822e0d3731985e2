"""Ranks that leave a job on one host, as the others see them."""

import threading
import time
from types import SimpleNamespace

from ring_plugins.core.control.failure_detector import FailureDetector, Peer
from ring_plugins.core.control.liveness import LocalPeers
from ring_plugins.core.control.membership import Membership
from ring_plugins.core.elastic.members import Elastic
from ring_plugins.core.elastic.policy import FailurePolicy
from tests.core.collectives.mortal_ranks import Mortal, Silent

POLICY = FailurePolicy(True, 1)


def test_ranks_may_leave_one_long_after_the_other():
    own, first, last = (Mortal(rank) for rank in range(3))
    peers = LocalPeers(own, [first, last], min_ranks=1)
    detector = FailureDetector(0, [Peer("host", rank, "domain") for rank in range(3)], peers, Silent())
    elastic = Elastic(
        SimpleNamespace(failure_detector=detector), SimpleNamespace(own=0), peers, FailurePolicy(True, 1), None
    )
    elastic._membership = Membership(peers)
    first.leave()
    late = threading.Thread(target=lambda: (time.sleep(0.8), last.leave()))  # the failure of a rank is found in 0.5 s
    late.start()
    assert elastic._let_leave([1, 2]) == [] and elastic._membership.ranks == (0,)
    late.join()
