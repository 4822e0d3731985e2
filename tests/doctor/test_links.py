import pytest

from ring_plugins.doctor.links import rounds


@pytest.mark.parametrize("hosts", [2, 3, 4, 7, 8])
def test_every_pair_of_hosts_is_measured_once_and_no_host_twice_at_a_time(hosts):
    seen = [pair for together in rounds(hosts) for pair in together]
    assert sorted(seen) == [(a, b) for a in range(hosts) for b in range(a + 1, hosts)]
    for together in rounds(hosts):
        met = [host for pair in together for host in pair]
        assert len(set(met)) == len(met)
