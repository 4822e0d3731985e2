import pytest

pytestmark = [pytest.mark.gpu_rehearsal, pytest.mark.timeout(1200)]


def test_peer_killed_while_devices_wait_for_it(rehearse):
    result = rehearse("killed_peer", ranks=3, check=False)
    heard = result.values("heard")
    assert len(heard) == 2 and all("rank 2" in text for text in heard), heard
