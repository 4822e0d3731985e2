import pytest

pytestmark = [pytest.mark.gpu_rehearsal, pytest.mark.timeout(1200)]


@pytest.mark.parametrize(("processes", "nodes"), [(2, "1,1"), (4, "2")])
def test_hosts_of_gpus_exchange_weights_and_gradients_in_8_bits(rehearse, processes, nodes):
    hosts = {"RING_VIRTUAL_NODES": nodes}
    result = rehearse("local_updates", ranks=processes, lag=100, launcher="exported", variables_too=hosts)
    for found in result.reports.values():
        equal = {name: value for name, value in found.items() if name.startswith("as on CPUs")}
        assert equal == dict.fromkeys(equal, True) and len(equal) == 4
        assert {value for name, value in found.items() if name.startswith("kinds of weights")} == {1}
        assert found["inside a host"] == ([2, "DeviceCommunicator"] if processes == 4 else [1, "SingleCommunicator"])
        assert 'sparse="densify"' in found["sparse"]
        assert found["rounds"] and found["off by"] < 0.05
        assert found["loss, cuda, int8"] == pytest.approx(found["loss, cpu, int8"], abs=1e-6)
        assert found["unlike one process"] < 1e-5
        assert found["unlike, in 8 bits"] < 5e-2
        for codec in (None, "int8"):
            assert found[f"anchors are equal, {codec}"] == found[f"weights are equal, {codec}"] == 1
            assert found[f"exchanges, {codec}"] == 3
