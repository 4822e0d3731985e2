"""The declarations of NCCL's functions against the real library and header of the wheel; needs no GPU."""

import ctypes
import re
from pathlib import Path

import pytest

from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.base.errors import DeviceError
from ring_plugins.core.gpu import load_nccl, nccl
from ring_plugins.core.gpu.nccl import Nccl


@pytest.fixture(scope="module")
def real():
    return load_nccl()


def test_the_library_has_every_declared_function(real):
    loaded = ctypes.CDLL(real.path)
    for name in (*nccl.FUNCTIONS, "ncclGetErrorString", "ncclGetLastError"):
        assert hasattr(loaded, name)


C_TYPES = {
    ctypes.c_int: r"int \w+|nccl(DataType|RedOp)_t \w+",
    ctypes.c_size_t: r"size_t \w+",
    ctypes.c_void_p: r"(const )?void ?\* ?\w+|(const )?(ncclComm|cudaStream)_t \w+|ncclWindow_t \w+",
    nccl.UniqueId: r"ncclUniqueId \w+",
    ctypes.POINTER(ctypes.c_int): r"(int|ncclResult_t) ?\* ?\w+",
    ctypes.POINTER(ctypes.c_void_p): r"(ncclComm_t|ncclWindow_t|void\*) ?\* ?\w+",
    ctypes.POINTER(nccl.UniqueId): r"ncclUniqueId\* \w+",
    ctypes.POINTER(nccl.Config): r"ncclConfig_t\* \w+",
}


@pytest.mark.parametrize("name", nccl.FUNCTIONS)
def test_declarations_agree_with_the_wheels_header(name, real):
    header = (Path(real.path).parent.parent / "include/nccl.h").read_text()
    inside = re.search(rf"ncclResult_t\s+{name}\(([^)]*)\);", header)[1]
    declared = [" ".join(argument.split()) for argument in inside.split(",") if argument.strip()]
    ours = nccl.FUNCTIONS[name]
    assert len(declared) == len(ours)
    for text, type_ in zip(declared, ours, strict=True):
        assert re.fullmatch(C_TYPES[type_], text), (name, text, type_)


def test_unique_ids_are_unique(real, monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    one, two = real.unique_id(), real.unique_id()
    assert len(one) == len(two) == 128
    assert one != two


def test_an_error_quotes_nccl(real):
    with pytest.raises(DeviceError, match=r"ncclCommGetAsyncError of NCCL 2\.\d+\.\d+ .* failed: invalid argument"):
        real.state(ctypes.c_void_p())


def test_connecting_without_a_gpu_raises(real):
    communicator = ctypes.c_void_p()
    with pytest.raises(DeviceError, match=r"ncclCommInitRankConfig .* failed: unhandled cuda error .*: ."):
        real.call(
            "ncclCommInitRankConfig",
            ctypes.byref(communicator),
            1,
            nccl.UniqueId.from_buffer_copy(real.unique_id()),
            0,
            ctypes.byref(nccl.Config.of(blocking=False)),
        )


def test_the_config_has_the_layout_of_nccl_h_2_14():
    config = nccl.Config.of(blocking=False)
    assert (config.size, config.magic, config.version, config.blocking) == (24, 0xCAFEBEEF, 21400, 0)
    assert [getattr(nccl.Config, name).offset for name in ("size", "magic", "version", "blocking")] == [0, 8, 12, 16]


class Old:
    """A library that has only a version."""

    def __init__(self, version):
        self.version = version
        self.ncclGetVersion = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int))(self.tell)

    def tell(self, version):
        version[0] = self.version
        return 0


def test_a_library_before_2_14_is_rejected():
    with pytest.raises(DeviceError, match=r"NCCL 2.13.4 \(here\) is too old: ring_plugins needs 2.14"):
        Nccl(Old(21304), "here")


@pytest.mark.parametrize(("version", "has"), [(21803, False), (21900, True)])
def test_a_release_has_the_functions_that_came_before_it(version, has):
    library = Old(version)
    library.ncclMemAlloc = None
    assert Nccl(library, "here").has("ncclMemAlloc") == has


def test_unsupported_types_are_named():
    old = Nccl(Old(22300), "here")
    with pytest.raises(ValueError, match="op=SUM for dtype=int16"):
        old.reduction("int16", Op.SUM)
    with pytest.raises(ValueError, match="op=PRODUCT for dtype=complex64"):
        old.reduction("complex64", Op.PRODUCT)
    with pytest.raises(ValueError, match=r"float8_e4m3fn needs NCCL 2.24.0, and this is NCCL 2.23.0"):
        old.reduction("float8_e4m3fn", Op.SUM)
    assert old.reduction("bfloat16", Op.AVERAGE) == (9, 4, 1)
    assert Nccl(Old(23203), "here").reduction("float8_e4m3fn", Op.SUM) == (10, 0, 1)
