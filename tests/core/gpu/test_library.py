"""Where libnccl and libcuda are found; nothing here needs a GPU."""

import contextlib
import ctypes
import importlib.metadata
import shutil
import subprocess
import sys

import pytest

from ring_plugins.core.base.errors import DeviceError, MissingDependency
from ring_plugins.core.gpu import library
from ring_plugins.core.gpu.library import CLibrary
from tests.launch import REPOSITORY


@pytest.fixture(scope="module")
def wheel():
    """Path and version of the library in the wheel: our extra's, or the one that torch's CUDA build has."""
    for name in ("nvidia-nccl-cu12", "nvidia-nccl-cu13"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            distribution = importlib.metadata.distribution(name)
            (file,) = [file for file in distribution.files if file.name == "libnccl.so.2"]
            return str(distribution.locate_file(file)), distribution.version
    return pytest.skip("no wheel of NCCL is installed; the extra `nccl` has one")


def python(code):
    """Words printed by a fresh process."""
    return subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, check=True, capture_output=True, text=True
    ).stdout.split()


def test_the_library_of_the_wheel_is_found_and_tells_its_version(wheel):
    code = "from ring_plugins.core.gpu import load_nccl, nccl; n = load_nccl();"
    assert python(code + "print(n.path, nccl.version_text(n.version))") == list(wheel)


def test_a_library_that_the_process_has_mapped_comes_first(wheel, tmp_path):
    copy = tmp_path / "libnccl.so.2.99"
    shutil.copy(wheel[0], copy)
    code = (
        f"import ctypes; ctypes.CDLL({str(copy)!r}); from ring_plugins.core.gpu import library;"
        "print(library.nccl_candidates()[0], library.open_nccl()[1])"
    )
    assert python(code) == [str(copy)] * 2


def test_wheels_come_before_the_system(monkeypatch, wheel):
    monkeypatch.setattr(library, "_mapped", list)
    assert library.nccl_candidates() == [wheel[0], "libnccl.so.2"]


def test_the_variable_overrides_the_search(monkeypatch, wheel, tmp_path):
    elsewhere = tmp_path / "mine.so"
    elsewhere.symlink_to(wheel[0])
    monkeypatch.setenv("RING_NCCL_LIBRARY", str(elsewhere))
    assert library.open_nccl()[1] == str(elsewhere)


def test_a_variable_that_names_no_library_is_quoted(monkeypatch):
    monkeypatch.setenv("RING_NCCL_LIBRARY", "/nowhere/libnccl.so")
    with pytest.raises(DeviceError, match="RING_NCCL_LIBRARY='/nowhere/libnccl.so' cannot be loaded"):
        library.open_nccl()


def test_a_machine_without_nccl_is_told_what_to_install(monkeypatch):
    monkeypatch.setattr(library, "nccl_candidates", lambda: iter(["/nowhere/libnccl.so.2"]))
    with pytest.raises(MissingDependency, match=r"/nowhere/libnccl.so.2: .*pip install \"ring_plugins\[nccl\]\""):
        library.open_nccl()


def test_a_machine_without_the_cuda_driver_is_told(monkeypatch):
    monkeypatch.setattr(library, "CUDA_SONAME", "libcuda.nowhere.so.1")
    with pytest.raises(DeviceError, match=r"CUDA driver \(libcuda.nowhere.so.1\) cannot be loaded.*train on the CPU"):
        library.open_cuda()


def test_a_function_is_called_with_its_declared_types():
    libc = CLibrary(ctypes.CDLL(None), {"abs": (ctypes.c_int,)})
    assert libc.call("abs", -3) == 3


def test_only_calls_that_are_named_keep_the_interpreters_lock():
    declared = dict.fromkeys(("abs", "labs"), (ctypes.c_int,))
    libc = CLibrary(ctypes.CDLL(None), declared, keeping=["abs"])
    assert keeps(libc.function("abs")) and not keeps(libc.function("labs"))
    assert keeps(libc.all_keeping().function("labs"))
    assert libc.all_keeping().call("labs", -3) == 3


def keeps(function):
    """Whether a C function keeps the interpreter's lock, as those of Python's own interface do."""
    return bool(function._flags_ & ctypes._FUNCFLAG_PYTHONAPI)
