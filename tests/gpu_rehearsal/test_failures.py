import pytest

pytestmark = [pytest.mark.gpu_rehearsal, pytest.mark.timeout(1200)]
#: What fails on one rank, and with which status of CUDA or NCCL.
FAULTS = [
    *("cuInit:1:100", "cuDeviceGetUuid_v2:1:999", "cuDevicePrimaryCtxRetain:1:2", "cuStreamCreateWithPriority:1:2"),
    *("cuEventCreate:2:2", "cuEventRecord:3:719", "cuStreamWaitEvent:3:719", "cuEventQuery:3:719"),
    *("ncclCommInitRankConfig:1:3", "ncclGroupStart:3:1", "ncclGroupEnd:3:1", "ncclAllReduce:4:5", "ncclBroadcast:1:2"),
    *("ncclKernel:3:6", "cudaMalloc:+1:2", "cudaMemcpyAsync:5:719", "cudaHostAlloc:1:2", "kernel:60:719"),
]
#: Those of which the other ranks must hear even if the rank's script catches the error and goes on.
TOLD = ["cuInit:1:100", "cuDeviceGetUuid_v2:1:999", "ncclCommInitRankConfig:1:3", "ncclAllReduce:4:5"]


def test_peer_killed_while_devices_wait_for_it(rehearse):
    result = rehearse("killed_peer", ranks=3, check=False)
    heard = result.values("heard")
    assert len(heard) == 2 and all("rank 2" in text for text in heard), heard


def test_ranks_that_a_killed_one_leaves_inside_nccl_end_with_its_name(rehearse):
    result = rehearse("killed_peer", "first", ranks=3, check=False, lazy=1)
    assert result.values("heard") == []
    for rank in (0, 1):
        assert f"rank {rank} ends because rank 2 (process" in result.output, result


def is_sound(texts):
    """Whether all ranks trained to the same weights, or none trained, and all but the last heard of it from us."""
    if any(text.startswith("trained") for text in texts):
        return len(set(texts)) == 1
    return "hangs" not in texts[-1] and all("!: " in one or "ended" in one for one in texts[:-1])


def test_a_fault_of_any_call_ends_on_all_ranks_in_an_error_of_ours(rehearse):
    found = rehearse("faults", "2", *FAULTS, ranks=1).reports[0]
    assert set(found) == set(FAULTS)
    assert not {fault: texts for fault, texts in found.items() if not is_sound(texts)}
    assert "DriftError" not in f"{found['ncclKernel:3:6']}"  # the weights do differ, but because a kernel failed
    assert sum(texts[-1].startswith("DeviceError!: ") for texts in found.values()) >= 8, found


def test_others_hear_of_a_fault_though_the_script_of_its_rank_goes_on(rehearse):
    found = rehearse("faults", "2", *TOLD, ranks=1, variables_too={"TEST_STAYS": "20"}).reports[0]
    for fault in TOLD:
        assert found[fault][0].startswith("PeerFailed!: ") and "rank 1 gave up" in found[fault][0], (
            fault,
            found[fault],
        )
