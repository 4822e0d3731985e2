"""A guess at why a rank does not come, from what it and the kernel say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class _Sign(NamedTuple):
    """Where a stack passes through, what that means.

    Attributes:
        files: parts of file names.
        functions: parts of function names, of frames that are not this package's.
        meaning: for the report.
    """

    files: tuple[str, ...]
    functions: tuple[str, ...]
    meaning: str


#: The first that fits counts; the innermost frames are looked at first for each.
_SIGNS = (
    _Sign(("/pdb.py", "/bdb.py", "debugpy"), (), "it stands in a debugger"),
    _Sign(
        ("/torch/utils/data/", "/tensorflow/python/data/", "data_adapters/", "/datasets/", "/webdataset/", "/PIL/"),
        ("next_data", "load_batch", "read_batch", "__getitem__", "get_batch"),
        "its data loader is slow, or has no data",
    ),
    _Sign(
        ("/torch/serialization.py", "/saving/", "checkpoint", "/h5py/", "/safetensors/", "/fsspec/", "/orbax/"),
        ("save_checkpoint", "save_model", "save_weights", "dump_checkpoint"),
        "it writes or reads a checkpoint; let all ranks wait for it, or raise RING_STALL_WARNING",
    ),
    _Sign(
        ("evaluation_loop.py",),
        ("validat", "evaluat", "eval_", "test_step", "_eval"),
        "it is in evaluation while the others train: let all ranks evaluate, each its share",
    ),
    _Sign(
        ("/torch/_inductor/", "/torch/_dynamo/", "/jax/_src/interpreters/", "/jax/_src/compiler.py", "/triton/"),
        ("trace_function", "xla_compile"),
        "it compiles; data of another shape makes a rank compile anew",
    ),
    _Sign(("/requests/", "/urllib", "/http/client.py", "/socket.py", "/ssl.py"), (), "it waits for the network"),
    _Sign(("/subprocess.py",), (), "it waits for another program"),
)


def is_ours(file: str) -> bool:
    """Whether a frame belongs to this package."""
    return "/ring_plugins/" in file and "/tests/" not in file


def guess(account: dict[str, Any] | None, kernel: dict[str, Any] | None, step: int, waits_in: str) -> str:
    """Why a rank does not come, in a sentence.

    Args:
        account: what the rank says (`own_account`), None where it does not answer.
        kernel: what the kernel says (`kernel_account`), None where nobody could look.
        step: how many steps the waiting ranks have finished.
        waits_in: the operation that this rank itself waits in, "" if it does not.
    """
    state = kernel["state"] if kernel is not None else "?"
    if state in ("T", "t"):
        return "the process is stopped (Ctrl-Z, SIGSTOP or a debugger); `kill -CONT` lets it go on"
    if state in ("Z", "X", ""):
        return "the process is dead"
    if account is None:
        if kernel is None:
            return "its host is down or cut off, or it is in native code holding the GIL"
        if state == "D":
            return "a disk or network file system does not answer it"
        return "does not answer: it is in native code holding the GIL"
    if waits_in:
        return f"it took another path through the program: it waits itself, in {waits_in}"
    return (
        _from_stack(account["stack"], account["step"] - step)
        or "it computes, or waits for something, in the lines above"
    )


def _from_stack(stack: Sequence[Sequence[Any]], ahead: int) -> str:
    frames = [(str(file), str(function)) for file, _, function, _ in stack if not is_ours(str(file))]
    if frames and frames[-1][1] in ("_shutdown", "_run_exitfuncs", "_at_exit"):
        return "its script has ended; the ranks took different numbers of steps"
    for sign in _SIGNS:
        for file, function in reversed(frames):
            if any(part in file for part in sign.files) or any(part in function.lower() for part in sign.functions):
                return sign.meaning
    if ahead > 0:
        return f"it has finished {ahead} more step{'s' if ahead > 1 else ''} than the waiting ranks and left the loop"
    return ""
