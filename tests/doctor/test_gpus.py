"""What the doctor makes of the driver's and the kernel's words about GPUs."""

import re
from types import SimpleNamespace

import pytest

from ring_plugins.doctor import gpus
from ring_plugins.doctor.gpus import check_direct_rdma, check_matrix, driver_version, read_matrix
from tests.launch import REPOSITORY

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


def test_nccl_is_missed_only_where_it_is_wanted(monkeypatch):
    monkeypatch.setattr(gpus, "installed", lambda name: "")
    monkeypatch.setattr(gpus, "find_nccl", lambda: (None, "NCCL is needed"))
    monkeypatch.setattr(gpus, "gpu_names", list)
    monkeypatch.delenv("RING_NCCL_LIBRARY", raising=False)
    assert next(gpus.nccl()).severity.name == "FINE"
    monkeypatch.setenv("RING_NCCL_LIBRARY", "/no/such/file")
    assert next(gpus.nccl()).severity.name == "ERROR"


def test_torch_without_cuda_beside_a_gpu_is_a_warning(monkeypatch):
    monkeypatch.setattr(gpus, "gpu_names", lambda: ["0, a card"])
    monkeypatch.setattr(gpus, "installed", lambda name: "2.13.0+cpu")
    assert [finding.severity.name for finding in gpus.gpus()] == ["FINE", "WARNING"]


def test_gpus_are_found_without_nvidia_smi(monkeypatch):
    driver = SimpleNamespace(count=lambda: 2, bus_id=lambda index: f"0000:0{index}:00.0")
    monkeypatch.setattr(gpus, "_nvidia_smi", lambda *arguments: "")
    monkeypatch.setattr(gpus, "load_driver", lambda: driver)
    assert gpus.gpu_names() == ["0, 0000:00:00.0", "1, 0000:01:00.0"]


def test_wheels_that_overwrite_each_others_nccl_are_named():
    (finding,) = gpus.conflicting_nccl({"nvidia-nccl-cu13": "2.28.9", "nvidia-nccl-cu12": "2.32.3"})
    assert "nvidia-nccl-cu13 2.28.9 and nvidia-nccl-cu12 2.32.3 are both installed" in finding.summary
    assert list(gpus.conflicting_nccl({"nvidia-nccl-cu13": "2.28.9"})) == []


def test_all_extras_leave_the_nccl_of_torch_alone():
    extras = dict(re.findall(r'^([\w-]+) = (\[".*"\])$', (REPOSITORY / "pyproject.toml").read_text(), re.MULTILINE))
    assert "nvidia-nccl-cu12" in extras["nccl"] and "nvidia-nccl-cu13" in extras["nccl-cu13"]
    assert "lightning" in extras["all"] and "nccl" not in extras["all"]
