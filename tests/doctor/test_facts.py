from ring_plugins.core.linux.interfaces import Interface
from ring_plugins.doctor import facts


def test_addresses_are_grouped_by_interface_external_ones_first(monkeypatch):
    addresses = [
        Interface("lo", "127.0.0.1", 8, 0, True),
        Interface("eth0", "10.0.0.1", 16, 0, False),
        Interface("eth0", "10.1.0.1", 16, 0, False),
    ]
    monkeypatch.setattr(facts.linux, "interfaces", lambda: addresses)
    first, last = facts.network_interfaces()
    assert first.name == "eth0" and first.external
    assert first.addresses == ("10.0.0.1", "10.1.0.1") and first.networks == ("10.0.0.0/16", "10.1.0.0/16")
    assert last.name == "lo" and not last.external
