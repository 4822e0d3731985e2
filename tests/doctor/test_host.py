import os
import re
import resource

from ring_plugins.doctor import host
from tests.launch import REPOSITORY


def test_a_containers_quota_is_a_warning(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.setattr(host.process, "cores", lambda: 1)
    monkeypatch.setattr(host.process, "cpu_quota", lambda: 1.5)
    usable, quota = host.cores()
    assert "enough for 1 rank of" in usable.summary
    assert quota.severity.name == "WARNING" and "1.5 of the 16 cores" in quota.summary


def test_too_few_open_files_are_a_warning(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 256))
    (finding,) = host.limits()
    assert finding.severity.name == "WARNING" and "ulimit -n 4096" in finding.remedy


def test_nccl_is_missed_only_where_it_is_wanted(monkeypatch):
    monkeypatch.setattr(host, "installed", lambda name: "")
    monkeypatch.setattr(host, "find_nccl", lambda: (None, "NCCL is needed"))
    monkeypatch.setattr(host, "gpu_names", list)
    monkeypatch.delenv("RING_NCCL_LIBRARY", raising=False)
    assert next(host.nccl()).severity.name == "FINE"
    monkeypatch.setenv("RING_NCCL_LIBRARY", "/no/such/file")
    assert next(host.nccl()).severity.name == "ERROR"


def test_torch_without_cuda_beside_a_gpu_is_a_warning(monkeypatch):
    monkeypatch.setattr(host, "gpu_names", lambda: ["0, a card"])
    monkeypatch.setattr(host, "installed", lambda name: "2.13.0+cpu")
    assert [finding.severity.name for finding in host.gpus()] == ["FINE", "WARNING"]


def test_wheels_that_overwrite_each_others_nccl_are_named():
    (finding,) = host.conflicting_nccl({"nvidia-nccl-cu13": "2.28.9", "nvidia-nccl-cu12": "2.32.3"})
    assert "nvidia-nccl-cu13 2.28.9 and nvidia-nccl-cu12 2.32.3 are both installed" in finding.summary
    assert list(host.conflicting_nccl({"nvidia-nccl-cu13": "2.28.9"})) == []


def test_all_extras_leave_the_nccl_of_torch_alone():
    extras = dict(re.findall(r'^([\w-]+) = (\[".*"\])$', (REPOSITORY / "pyproject.toml").read_text(), re.MULTILINE))
    assert "nvidia-nccl-cu12" in extras["nccl"] and "nvidia-nccl-cu13" in extras["nccl-cu13"]
    assert "lightning" in extras["all"] and "nccl" not in extras["all"]
