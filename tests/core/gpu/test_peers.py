"""What ranks compare before they connect."""

import pytest

from ring_plugins.core.base.errors import DeviceError, MismatchError
from ring_plugins.core.gpu import peers
from ring_plugins.core.gpu.cuda import Driver
from ring_plugins.core.gpu.peers import RankInfo, check_gpus, check_versions, choose_interface, gpu_identity
from tests.gpu_stand_in import StandInDriver


def test_ranks_with_different_releases_are_named():
    infos = [RankInfo(version, f"/{version}", "", False) for version in (23203, 22907, 23203, 22907)]
    with pytest.raises(MismatchError, match=r"ranks 2, 5: 2.32.3 \(/23203\); ranks 3, 7: 2.29.7 \(/22907\)"):
        check_versions(infos, [2, 3, 5, 7])


def on_gpus(*gpus, share=False):
    return [RankInfo(23203, "", f"boot-id {gpu}", share) for gpu in gpus]


def test_ranks_on_one_gpu_are_named_with_it():
    with pytest.raises(DeviceError, match=r"ranks 3, 7 would share the GPU 0000:01:00.0\..*RING_SHARE_GPU=1"):
        check_gpus(on_gpus("0000:02:00.0", "0000:01:00.0", "0000:01:00.0"), [2, 3, 7])


def test_all_ranks_of_a_gpu_must_agree_to_share_it():
    check_gpus(on_gpus("a", "a", share=True), [0, 1])
    with pytest.raises(DeviceError):
        check_gpus(on_gpus("a", share=True) + on_gpus("a"), [0, 1])


def test_slices_of_one_gpu_are_told_apart():
    cards = [StandInDriver(), StandInDriver()]
    assert cards[0].card == cards[1].card
    cards[1].uuid = b"another slice of"
    on = [gpu_identity(Driver(card), 0) for card in cards]
    check_gpus([RankInfo(23203, "", gpu, False) for gpu in on], [0, 1])
    with pytest.raises(DeviceError, match="would share the GPU 0000:01:00.0"):
        check_gpus([RankInfo(23203, "", gpu, False) for gpu in (on[0], on[0])], [0, 1])


def test_a_driver_without_uuids_tells_gpus_by_their_bus():
    card = StandInDriver()
    del card.cuDeviceGetUuid_v2
    assert gpu_identity(Driver(card), 0).endswith("  0000:01:00.0")


@pytest.mark.parametrize(
    ("wanted", "users", "chosen"),
    [
        ([], None, None),  # nothing, on one host either: a group of the script's own may reach others
        (["lo"], None, "=lo"),
        (["ib0", "ib1"], None, "=ib0,ib1"),
        (["eth1"], "eth0", "eth0"),
    ],
)
def test_nccl_connects_over_the_wanted_networks_only(monkeypatch, wanted, users, chosen):
    monkeypatch.setattr(peers, "wanted_interfaces", lambda: wanted)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", users or "")
    if users is None:
        monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    choose_interface()
    assert peers.os.environ.get("NCCL_SOCKET_IFNAME") == chosen
