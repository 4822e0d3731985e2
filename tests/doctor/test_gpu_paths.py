"""What the doctor makes of the driver's and the kernel's words about GPUs."""

import pytest

from ring_plugins.doctor.gpu_paths import check_direct_rdma, check_matrix, driver_version, read_matrix

LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes

NIC Legend:

  NIC0: mlx5_0
"""
NVLINK = (
    "\t\x1b[4mGPU0\tGPU1\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tPIX\tSYS\t0-47\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tSYS\tPXB\t48-95\t1\t\tN/A\n"
    "NIC0\tPIX\tSYS\t X \tSYS\t\t\t\t\n"
    "NIC1\tSYS\tPXB\tSYS\t X \t\t\t\t\n"
)
PCIE = (
    "\tGPU0\tGPU1\tGPU2\tmlx5_0\tCPU Affinity\tNUMA Affinity\n"
    "GPU0\t X \tPIX\tSYS\tNODE\t0-15\t0\n"
    "GPU1\tPIX\t X \tPHB\tSYS\t0-15\t0\n"
    "GPU2\tSYS\tPHB\t X \tPIX\t16-31\t1\n"
    "mlx5_0\tNODE\tSYS\tPIX\t X \t\t\n"
)


def findings(text):
    return [(finding.severity.name, finding.summary) for finding in check_matrix(read_matrix(text + LEGEND))]


def test_the_matrix_is_read():
    matrix = read_matrix(NVLINK + LEGEND)
    assert list(matrix) == ["GPU0", "GPU1", "NIC0", "NIC1"]
    assert matrix["GPU1"] == {"GPU0": "NV18", "NIC0": "SYS", "NIC1": "PXB"}


def test_nvlink_and_a_near_card_are_fine():
    assert findings(NVLINK) == [("FINE", "2 GPUs, none of whose paths crosses the host")]


def test_paths_through_the_host_are_named():
    (severity, pairs), (_, cards) = findings(PCIE)
    assert severity == "WARNING"
    assert "GPU0-GPU2 (SYS), GPU1-GPU2 (PHB)" in pairs
    assert "GPU0 (mlx5_0, NODE), GPU1 (mlx5_0, SYS):" in cards
    assert "GPU2" not in cards


def test_a_host_without_gpus_has_no_paths():
    assert findings("") == []


OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023"


@pytest.mark.parametrize(
    ("peermem", "driver", "kernel", "severity"),
    [
        (True, CLOSED, "5.4.0-1", "FINE"),
        (False, OPEN, "5.15.0-91-generic", "FINE"),
        (False, OPEN, "5.4.0-150-generic", "WARNING"),
        (False, CLOSED, "6.8.0", "WARNING"),
        (False, "", "custom", "WARNING"),
    ],
)
def test_missing_direct_rdma_is_named(peermem, driver, kernel, severity):
    (finding,) = check_direct_rdma(["mlx5_0"], peermem, driver, kernel)
    assert finding.severity.name == severity
    assert "mlx5_0" in finding.summary


def test_without_rdma_cards_nothing_is_missing():
    assert list(check_direct_rdma([], False, CLOSED, "6.8.0")) == []


def test_the_drivers_release_is_read():
    assert [driver_version(text) for text in (OPEN, CLOSED, "")] == ["570.86.15", "535.104.05", None]
