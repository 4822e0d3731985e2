"""Releases of NCCL from 2.18 to 2.29, and libraries that lack what their release should have."""

from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu_rehearsal, pytest.mark.timeout(1200)]
WINDOW, REGISTERED, FRAMEWORKS = "registered as a symmetric window", "registered (ncclCommRegister)", "the framework's"
#: Version, functions that it lacks, which memory it gives, and whether it shrinks communicators.
RELEASES = [
    (
        21801,
        "ncclMemAlloc ncclCommRegister ncclCommWindowRegister ncclCommShrink ncclCommInitRankScalable",
        FRAMEWORKS,
        False,
    ),
    (21903, "ncclCommWindowRegister ncclCommShrink ncclCommInitRankScalable", REGISTERED, False),
    (22304, "ncclCommWindowRegister ncclCommShrink", REGISTERED, False),
    (22605, "", REGISTERED, False),
    (22707, "", WINDOW, True),
    (22809, "ncclCommShrink", WINDOW, False),
    (22907, "ncclCommWindowRegister", REGISTERED, True),
    (22907, "ncclMemAlloc", FRAMEWORKS, True),
]


def without(library: Path, functions: str, directory: Path) -> Path:
    """A copy of a library whose loader does not find some functions."""
    code = library.read_bytes()
    for name in functions.split():
        found = code.replace(b"\0" + name.encode() + b"\0", b"\0" + b"x" * len(name) + b"\0")
        assert found != code, name
        code = found
    (copy := directory / "libnccl.so.2").write_bytes(code)
    return copy


@pytest.mark.parametrize(("version", "lacks", "memory", "shrinks"), RELEASES)
@pytest.mark.parametrize("blocking", ["", "0"])
def test_collectives_and_registered_memory(variables, rehearse, tmp_path, version, lacks, memory, shrinks, blocking):
    library = without(Path(variables["RING_NCCL_LIBRARY"]), lacks, tmp_path)
    chosen = {"RING_NCCL_LIBRARY": str(library), "NCCL_COMM_BLOCKING": blocking}
    found = rehearse("release", nccl=version, variables_too=chosen)
    assert found.values("version") == [version] * 2 and found.values("memory") == [memory] * 2
    assert found.values("shrinks") == [shrinks] * 2 and found.values("blocks") == [not blocking] * 2
    assert found.values("sum") == [[3.0] * 4] * 2


def test_a_window_that_fails_on_one_rank_is_an_error_on_all(rehearse):
    """A collective call, in which NCCL's thread of the other rank would wait for ever."""
    fails = {"TEST_FAULTS_OF_LAST": "ncclCommWindowRegister:1:2"}
    others, own = rehearse("release", variables_too=fails).values("error")
    assert "ncclCommWindowRegister of NCCL" in own
    assert "rank 1" in others and "within" not in others
