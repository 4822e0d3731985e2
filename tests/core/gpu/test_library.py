"""Finding and loading the real NCCL of the wheel; nothing of this needs a GPU."""

import ctypes
import importlib.metadata
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.base.errors import DeviceError, MismatchError, MissingDependency
from ring_plugins.core.gpu import cuda as driver
from ring_plugins.core.gpu import library
from ring_plugins.core.gpu import nccl as calls
from ring_plugins.core.gpu.c_functions import Call, Table
from ring_plugins.core.gpu.connection import Introduction, check_versions
from ring_plugins.core.gpu.nccl import Nccl
from tests.launch import REPOSITORY


@pytest.fixture
def fresh():
    library.load_nccl.cache_clear()
    yield
    library.load_nccl.cache_clear()


@pytest.fixture(scope="module")
def real():
    return library.load_nccl()


@pytest.fixture(scope="module")
def wheel():
    """Path and version of the library in the wheel."""
    distribution = importlib.metadata.distribution("nvidia-nccl-cu12")
    (file,) = [file for file in distribution.files if file.name == "libnccl.so.2"]
    return str(distribution.locate_file(file)), distribution.version


def test_the_wheels_library_is_found_and_says_its_version(wheel):
    code = "from ring_plugins.core.gpu import load_nccl; n = load_nccl(); print(n.path, calls.version_text(n.version))"
    said = subprocess.run(
        [sys.executable, "-c", "from ring_plugins.core.gpu import calls; " + code],
        cwd=REPOSITORY,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    assert said == list(wheel)


def test_a_library_that_the_process_has_mapped_comes_first(wheel, tmp_path):
    copy = tmp_path / "libnccl.so.2.99"
    shutil.copy(wheel[0], copy)
    code = (
        f"import ctypes; ctypes.CDLL({str(copy)!r}); from ring_plugins.core.gpu import library;"
        "print(next(library.candidates()), library.load_nccl().path)"
    )
    said = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True, capture_output=True, text=True)
    assert said.stdout.split() == [str(copy)] * 2


def test_wheels_come_before_the_system(monkeypatch, wheel):
    monkeypatch.setattr(library, "_mapped", list)
    assert list(library.candidates()) == [wheel[0], "libnccl.so.2"]


def test_the_variable_overrules_and_names_a_file_that_cannot_be_loaded(monkeypatch, fresh, wheel, tmp_path):
    elsewhere = tmp_path / "mine.so"
    elsewhere.symlink_to(wheel[0])
    monkeypatch.setenv("RING_NCCL_LIBRARY", str(elsewhere))
    assert library.load_nccl().path == str(elsewhere)
    library.load_nccl.cache_clear()
    monkeypatch.setenv("RING_NCCL_LIBRARY", "/nowhere/libnccl.so")
    with pytest.raises(DeviceError, match="RING_NCCL_LIBRARY='/nowhere/libnccl.so' cannot be loaded"):
        library.load_nccl()


def test_none_at_all_names_what_to_install(monkeypatch, fresh):
    monkeypatch.setattr(library, "candidates", lambda: iter(["/nowhere/libnccl.so.2"]))
    with pytest.raises(MissingDependency, match=r"/nowhere/libnccl.so.2: .*pip install \"ring_plugins\[nccl\]\""):
        library.load_nccl()


def test_every_declared_function_is_there(real):
    loaded = ctypes.CDLL(real.path)
    for name in (*calls.CALLS, "ncclGetErrorString", "ncclGetLastError"):
        assert hasattr(loaded, name)


C_TYPES = {
    ctypes.c_int: r"int \w+|nccl(DataType|RedOp)_t \w+",
    ctypes.c_size_t: r"size_t \w+",
    ctypes.c_void_p: r"(const )?void\* ?\w+|(ncclComm|cudaStream)_t \w+",
    calls.UniqueId: r"ncclUniqueId \w+",
    ctypes.POINTER(ctypes.c_int): r"(int|ncclResult_t) ?\*\w+",
    ctypes.POINTER(ctypes.c_void_p): r"ncclComm_t\* \w+",
    ctypes.POINTER(calls.UniqueId): r"ncclUniqueId\* \w+",
    ctypes.POINTER(calls.Config): r"ncclConfig_t\* \w+",
}


@pytest.mark.parametrize("name", calls.CALLS)
def test_declarations_agree_with_the_wheels_header(name, wheel):
    header = (Path(wheel[0]).parent.parent / "include/nccl.h").read_text()
    inside = re.search(rf"ncclResult_t\s+{name}\(([^)]*)\);", header)[1]
    declared = [" ".join(argument.split()) for argument in inside.split(",") if argument.strip()]
    ours = calls.CALLS[name].arguments
    assert len(declared) == len(ours)
    for text, type_ in zip(declared, ours, strict=True):
        assert re.fullmatch(C_TYPES[type_], text), (name, text, type_)


def test_unique_ids_are_unique(real, monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    one, two = real.unique_id(), real.unique_id()
    assert len(one) == len(two) == 128
    assert one != two


def test_an_error_has_nccls_own_words(real):
    with pytest.raises(DeviceError, match=r"ncclCommGetAsyncError of NCCL 2\.\d+\.\d+ .* failed: invalid argument"):
        real.state(ctypes.c_void_p())


def test_without_a_gpu_the_real_library_refuses_to_connect(real):
    communicator = ctypes.c_void_p()
    with pytest.raises(DeviceError, match=r"ncclCommInitRankConfig .* failed: unhandled cuda error .*: ."):
        real.call(
            "ncclCommInitRankConfig",
            ctypes.byref(communicator),
            1,
            calls.UniqueId.from_buffer_copy(real.unique_id()),
            0,
            ctypes.byref(calls.Config.nonblocking()),
        )


def test_the_config_is_laid_out_as_nccl_h_of_2_14_has_it():
    config = calls.Config.nonblocking()
    assert (config.size, config.magic, config.version, config.blocking) == (24, 0xCAFEBEEF, 21400, 0)
    assert [getattr(calls.Config, name).offset for name in ("size", "magic", "version", "blocking")] == [0, 8, 12, 16]


class Old:
    """A library of which only the version is known."""

    def __init__(self, version):
        self.version = version
        self.ncclGetVersion = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int))(self.tell)

    def tell(self, version):
        version[0] = self.version
        return 0


def test_a_library_that_is_too_old_is_refused():
    with pytest.raises(DeviceError, match=r"NCCL 2.13.4 \(here\) is too old: ring_plugins needs 2.14"):
        Nccl(Old(21304), "here")


def test_a_function_that_came_later_names_the_release(monkeypatch):
    monkeypatch.setitem(calls.CALLS, "ncclCommShrink", Call(22700, ()))
    with pytest.raises(DeviceError, match=r"ncclCommShrink came with NCCL 2.27.0, and this is NCCL 2.18.3 \(here\)"):
        Nccl(Old(21803), "here").call("ncclCommShrink")


def test_types_that_nccl_lacks_are_named():
    nccl = Nccl(Old(22300), "here")
    with pytest.raises(ValueError, match="op=SUM of dtype=int16"):
        nccl.reduction("int16", Op.SUM)
    with pytest.raises(ValueError, match="op=PRODUCT of dtype=complex64"):
        nccl.reduction("complex64", Op.PRODUCT)
    with pytest.raises(ValueError, match=r"float8_e4m3fn came with NCCL 2.24.0, and this is NCCL 2.23.0"):
        nccl.reduction("float8_e4m3fn", Op.SUM)
    assert nccl.reduction("bfloat16", Op.AVERAGE) == (9, 4, 1)
    assert Nccl(Old(23203), "here").reduction("float8_e4m3fn", Op.SUM) == (10, 0, 1)


def test_ranks_with_other_releases_are_named():
    everyones = [Introduction(version, f"/{version}", "", False) for version in (23203, 22907, 23203, 22907)]
    with pytest.raises(MismatchError, match=r"ranks 2, 5: 2.32.3 \(/23203\); ranks 3, 7: 2.29.7 \(/22907\)"):
        check_versions(everyones, [2, 3, 5, 7])


def test_a_machine_without_the_driver_is_told(monkeypatch):
    monkeypatch.setattr(driver, "SONAME", "libcuda.nowhere.so.1")
    driver.load_driver.cache_clear()
    with pytest.raises(DeviceError, match=r"CUDA driver \(libcuda.nowhere.so.1\) cannot be loaded.*train on the CPU"):
        driver.load_driver()


def test_a_table_calls_with_the_declared_types():
    table = Table(ctypes.CDLL(None), {"abs": Call(0, (ctypes.c_int,))})
    assert table.call("abs", -3) == 3
