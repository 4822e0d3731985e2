"""What one line says of NCCL's log, on texts in the form that its releases print them."""

import logging
import os

import pytest

from ring_plugins.core.gpu import nccl_log
from ring_plugins.core.gpu.nccl_log import NcclLog, read_choices

INFINIBAND = """\
a1:71:71 [0] NCCL INFO NCCL_SOCKET_IFNAME set by environment to eth0
a1:71:71 [0] NCCL INFO Bootstrap: Using eth0:10.0.0.1<0>
a1:71:71 [0] NCCL INFO NCCL version 2.28.9+cuda13.0
a1:71:90 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.1<0>
a1:71:90 [0] NCCL INFO Initialized NET plugin IB
a1:71:90 [0] NCCL INFO GPU Direct RDMA Enabled for GPU 0 / HCA 0 (distance 4 <= 4), read 1 mode Default
a1:71:90 [0] NCCL INFO NVLS multicast support is available on dev 0 (NVLS_NCHANNELS 16)
a1:71:90 [0] NCCL INFO 16 coll channels, 16 collnet channels, 16 nvls channels, 16 p2p channels, 2 p2p channels per peer
a1:71:90 [0] NCCL INFO ncclCommInitRankConfig comm 0x55 rank 0 nranks 16 cudaDev 0 busId 1000 - Init COMPLETE
a1:71:95 [0] NCCL INFO Channel 00/0 : 8[0] -> 0[0] [receive] via NET/IB/0/GDRDMA
a1:71:95 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read
a1:71:95 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via P2P/CUMEM/read
a1:71:95 [0] NCCL INFO Connected all rings, use ring PXN 0 GDR 1
"""
SOCKETS = """\
b2:33:33 [0] NCCL INFO NCCL version 2.18.1+cuda12.1
b2:33:40 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.2<0> [1]eth1:10.1.0.2<0>
b2:33:40 [0] NCCL INFO Using network Socket
b2:33:40 [0] NCCL INFO NVLS multicast support is not available on dev 0
b2:33:40 [0] NCCL INFO 2 coll channels, 0 nvls channels, 2 p2p channels, 2 p2p channels per peer
b2:33:40 [0] NCCL INFO Channel 00 : 0[1000] -> 1[2000] via SHM/direct/direct
b2:33:40 [0] NCCL INFO Channel 00/0 : 1[2000] -> 2[1000] [send] via NET/Socket/0
"""


def test_infiniband_with_everything():
    choices = read_choices(INFINIBAND)
    assert not choices.lacks_direct_rdma
    assert str(choices) == (
        "NCCL 2.28.9; network IB (mlx5_0:1, mlx5_1:1); between GPUs of a host P2P/CUMEM; between hosts NET/IB/GDRDMA; "
        "GPU Direct RDMA; NVLink SHARP; 16 channels"
    )


def test_infiniband_without_direct_rdma():
    choices = read_choices(INFINIBAND.replace("/GDRDMA", ""))
    assert choices.lacks_direct_rdma
    assert "between hosts NET/IB; without GPU Direct RDMA; NVLink SHARP" in str(choices)


def test_sockets():
    choices = read_choices(SOCKETS)
    assert not choices.lacks_direct_rdma  # no card could
    assert str(choices) == (
        "NCCL 2.18.1; network Socket (eth0:10.0.0.2, eth1:10.1.0.2); between GPUs of a host SHM; between hosts "
        "NET/Socket; no NVLink SHARP; 2 channels"
    )


def test_the_texts_of_release_2_32():
    newer = INFINIBAND.replace(
        "on dev 0 (NVLS_NCHANNELS 16)", "on dev 0, transport disabled, symmetric multimem enabled"
    ).replace("NET/IB/0/GDRDMA", "NET/IBext_v11/0/GDRDMA(PCI)/Shared")
    choices = read_choices(newer)
    assert choices.has_nvls is False
    assert choices.paths == ("P2P/CUMEM", "NET/IBext_v11/GDRDMA")
    assert read_choices(newer.replace("disabled", "enabled")).has_nvls is True


def test_a_log_that_says_nothing():
    assert read_choices("") is None
    assert read_choices("a1:71:71 [0] NCCL WARN Cuda failure 'out of memory'\n") is None


def written(environment, text):
    log = NcclLog(environment)
    with open(environment["NCCL_DEBUG_FILE"].replace("%p", str(os.getpid())), "w") as file:  # as NCCL opens it
        file.write(text)
    return log


def test_variables_are_set_for_nccl_and_taken_back():
    environment = {"NCCL_DEBUG": "WARN"}
    log = written(environment, SOCKETS)
    assert environment["NCCL_DEBUG"] == "INFO"
    log.restore_environment()
    assert environment == {"NCCL_DEBUG": "WARN"}
    assert log.text() == SOCKETS


def test_a_file_of_the_users_is_kept(tmp_path):
    environment = {"NCCL_DEBUG": "TRACE", "NCCL_DEBUG_FILE": str(tmp_path / "nccl.%p")}
    before = dict(environment)
    log = written(environment, SOCKETS)
    assert environment == before
    assert log.text() == SOCKETS
    (tmp_path / f"nccl.{os.getpid()}").unlink()
    assert log.text() == ""


@pytest.mark.parametrize(
    ("text", "is_first", "said"),
    [
        (INFINIBAND, True, "rank 3: NCCL 2.28.9; network IB"),
        (INFINIBAND, False, ""),
        (INFINIBAND.replace("/GDRDMA", ""), False, "without GPU Direct RDMA"),
        ("", True, "NCCL was used before ring_plugins"),
        ("", False, ""),
    ],
)
def test_one_rank_speaks_and_others_only_of_what_is_missing(caplog, text, is_first, said):
    log = written({}, text)
    with caplog.at_level(logging.INFO, logger="ring_plugins"):
        log.report(3, is_first)
        log.report(3, is_first)
    assert len(caplog.messages) == bool(said)
    assert said in "".join(caplog.messages)


def test_it_is_off_by_default():
    nccl_log.nccl_log.cache_clear()
    assert nccl_log.nccl_log() is None
