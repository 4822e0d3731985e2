"""Builds the simulated CUDA: `python -m tests.gpu_rehearsal.build`, which needs g++, binutils and pip.

torch's CUDA wheel and NVIDIA's headers come from the package index that pip is set up with, in the versions that
constraints.txt pins for torch. They and the libraries that are built go into one folder, 1.2 GB in all: the one that
RING_GPU_REHEARSAL names, else ring_plugins_gpu_rehearsal in the user's cache. A second call takes a second.

Every other library that torch's CUDA build links is made of functions that say their name and fail.
"""

import fcntl
import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

SOURCES = Path(__file__).with_name("simulated")
REPOSITORY = SOURCES.parents[2]
#: Headers of the CUDA that torch 2.13 is built for.
HEADERS = ("nvidia-cuda-runtime==13.0.96", "nvidia-cuda-crt==13.0.88")
#: Libraries that torch links, and a prefix of their functions. Longer prefixes come first.
STUBS = {
    "libcusparseLt.so.0": "cusparseLt",
    "libcublasLt.so.13": "cublasLt",
    "libcusparse.so.12": "cusparse",
    "libcublas.so.13": "cublas",
    "libcufft.so.12": "cufft",
    "libcudnn.so.9": "cudnn",
    "libnvrtc.so.13": "nvrtc",
    "libcufile.so.0": "cuFile",
    "libcusolver.so.12": "cusolver",
    "libcupti.so.13": "cupti",
    "libcurand.so.10": "curand",
    "libnvshmem_host.so.3": "nvshmem",
}
#: File -> its sources, the libraries that it needs, and the prefix of functions that fail in it, if torch calls them.
LIBRARIES = {
    "libsimulated_devices.so": (("settings", "stream", "memory"), (), None),
    "libcudart.so.13": (("runtime",), ("libsimulated_devices.so",), "cuda"),
    "libcuda.so.1": (("driver",), ("libsimulated_devices.so", "libcudart.so.13"), r"cu(?=[A-Z])(?!File)"),
    "libnccl.so.2": (("nccl", "collectives", "board", "numbers"), ("libsimulated_devices.so",), "nccl"),
}
NOT_SUPPORTED = 801
DAY = 24 * 3600.0


class Unavailable(Exception):
    """The rehearsal cannot be built here; the text says why."""


def run(*command: str | os.PathLike[str], **options: object) -> str:
    try:
        return subprocess.run(
            ["nice", "-n", "5", *map(str, command)],
            check=True,
            text=True,
            capture_output=True,
            **options,  # type: ignore[call-overload]
        ).stdout
    except subprocess.CalledProcessError as error:
        raise Unavailable(f"{' '.join(map(str, command))[:200]} failed:\n{error.stderr[-2000:]}") from error


def cache() -> Path:
    """Where everything goes."""
    chosen = os.environ.get("RING_GPU_REHEARSAL")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ring_plugins_gpu_rehearsal"


def pinned_torch() -> str:
    found = re.search(r"^torch==([\d.]+)$", (REPOSITORY / "constraints.txt").read_text(), re.MULTILINE)
    if not found:
        raise Unavailable("constraints.txt pins no version of torch.")
    return found[1]


def install(folder: Path, *requirements: str) -> Path:
    """Install wheels into a folder of their own, once."""
    if not folder.exists():
        partly = folder.with_suffix(".partly")
        shutil.rmtree(partly, ignore_errors=True)
        pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--no-cache-dir")
        run(*pip, "--only-binary=:all:", "--target", partly, *requirements)
        partly.rename(folder)
    return folder


def build() -> dict[str, str]:
    """Build what is not there yet.

    Returns:
        Variables with which a Python process runs on simulated GPUs.

    Raises:
        Unavailable: a compiler or a wheel cannot be had here.
    """
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        raise Unavailable("the rehearsal simulates CUDA for Linux on x86-64 only.")
    for tool in ("g++", "nm"):
        if shutil.which(tool) is None:
            raise Unavailable(f"{tool} is not installed.")
    cache().mkdir(parents=True, exist_ok=True)
    with (cache() / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        version = pinned_torch()
        python = f"cp{sys.version_info.major}{sys.version_info.minor}"
        # `===` takes the build without a local version, such as +cpu: the one for CUDA.
        torch = install(cache() / f"torch-{version}-{python}", f"torch==={version}")
        headers = install(cache() / "headers", *HEADERS)
        libraries = compile_all(torch, headers)
    return environment(torch, libraries)


def environment(torch: Path, libraries: Path) -> dict[str, str]:
    """Variables that put the simulated libraries and torch's CUDA build before any others."""
    paths = [str(torch), str(libraries), str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "LD_LIBRARY_PATH": os.pathsep.join([str(libraries), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]),
        "PYTHONPATH": os.pathsep.join(paths),
        "RING_NCCL_LIBRARY": str(libraries / "libnccl.so.2"),
        "NVIDIA_TF32_OVERRIDE": "0",
    }


# Libraries ----------------------------------------------------------------------------------------


def compile_all(torch: Path, headers: Path) -> Path:
    """The folder of libraries for these sources and this torch."""
    folder = cache() / f"libraries-{digest(torch.name, Path(__file__), *SOURCES.iterdir())}"
    if folder.exists():
        folder.touch()
        return folder
    remove_unused()
    work = cache() / "libraries.partly"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    include = next(headers.glob("nvidia/*/include"))
    wanted = undefined(torch)
    ours: set[str] = set()
    for name, (sources, needs, prefix) in LIBRARIES.items():
        parts = [compiled(source, [include]) for source in sources]
        written = defined(parts)
        ours |= written
        missing = {symbol for symbol in wanted if prefix and re.match(rf"_*{prefix}", symbol)} - ours
        needed = [work / need for need in needs]
        link(work, name, [*parts, stubs(work, name, missing), *needed], wanted, written | missing)
        ours |= missing
    for name, prefix in STUBS.items():
        symbols = {symbol for symbol in wanted if symbol.startswith(prefix)} - ours
        ours |= symbols
        link(work, name, [stubs(work, name, symbols)], wanted, symbols)
    inside = torch / "torch" / "include"
    operators = compiled("operators", [inside, inside / "torch" / "csrc" / "api" / "include", include])
    torchs = [torch / "torch" / "lib" / f"lib{name}.so" for name in ("c10", "c10_cuda", "torch_cpu", "torch_cuda")]
    link(work, "libsimulated_operators.so", [operators, work / "libsimulated_devices.so", *torchs], {}, set())
    announce(work)
    work.rename(folder)
    return folder


def remove_unused() -> None:
    """Remove what no build has asked for in a day. Other working trees share the cache, and may be running tests."""
    for old in [*cache().glob("libraries-*"), *cache().glob("objects/*")]:
        if time.time() - old.stat().st_mtime > DAY:
            shutil.rmtree(old) if old.is_dir() else old.unlink()


def digest(*parts: str | Path) -> str:
    """Of texts and of files, wherever these lie."""
    state = hashlib.sha256()
    for name, part in sorted((part.name if isinstance(part, Path) else part, part) for part in parts):
        state.update(name.encode())
        if isinstance(part, Path) and part.is_file():
            state.update(part.read_bytes())
    return state.hexdigest()[:16]


def compiled(source: str, include: Sequence[Path]) -> Path:
    """The object of a source file; one that was compiled before is kept."""
    flags = ("-std=c++20", "-O2" if source == "numbers" else "-O1", "-w", "-fPIC", *(f"-I{path}" for path in include))
    made = cache() / "objects" / f"{source}-{digest(SOURCES / f'{source}.cpp', *SOURCES.glob('*.h'), *flags)}.o"
    if made.exists():
        made.touch()
    else:
        made.parent.mkdir(exist_ok=True)
        run("g++", *flags, "-c", SOURCES / f"{source}.cpp", "-o", made)
    return made


def link(work: Path, name: str, parts: Sequence[Path], wanted: Mapping[str, str], symbols: set[str]) -> None:
    """Link a library that gives its symbols the version which torch wants of them, if any."""
    command = ["g++", "-shared", "-w", "-fPIC", "-o", str(work / name), *map(str, parts), f"-Wl,-soname,{name}"]
    command += ["-Wl,--no-as-needed", "-lpthread", "-lrt"]
    for version in {wanted.get(symbol) for symbol in symbols} - {"", None}:
        script = work / f"{name}.map"
        script.write_text(f"{version} {{ global: *; }};\n")
        command.append(f"-Wl,--version-script={script}")
    run(*command)


@functools.cache
def undefined(torch: Path) -> Mapping[str, str]:
    """Symbol that torch's libraries expect elsewhere -> its version, or ""."""
    found = {}
    for library in sorted((torch / "torch" / "lib").glob("lib*.so")):
        for line in run("nm", "-D", "--undefined-only", library).splitlines():
            symbol, _, version = line.split()[-1].partition("@")
            if re.match(r"_*(cu|nccl|nv)", symbol):
                found[symbol] = version.lstrip("@")
    return found


def defined(objects: Sequence[Path]) -> set[str]:
    lines = run("nm", "--defined-only", "--extern-only", *objects).splitlines()
    return {line.split()[-1] for line in lines if len(line.split()) == 3}


def stubs(work: Path, library: str, symbols: set[str]) -> Path:
    """A source of functions that say which they are, and fail."""
    source = work / f"{library}.cpp"
    source.write_text(
        "#include <stdio.h>\n"
        "static int refuse(const char* name) {\n"
        f'  fprintf(stderr, "simulated CUDA: nothing simulates %s of {library}\\n", name);\n'
        f"  return {NOT_SUPPORTED if library in ('libcudart.so.13', 'libcuda.so.1') else 3};\n}}\n"
        + "".join(f'extern "C" int {symbol}() {{ return refuse("{symbol}"); }}\n' for symbol in sorted(symbols))
    )
    return source


def announce(work: Path) -> None:
    """Let torch find the operators: it imports what installed packages name as extensions of a backend."""
    shutil.copy(SOURCES / "plugin.py", work / "ring_simulated_cuda.py")
    package = work / "ring_simulated_cuda-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: ring-simulated-cuda\nVersion: 1\n")
    (package / "entry_points.txt").write_text("[torch.backends]\nring_simulated_cuda = ring_simulated_cuda:load\n")


if __name__ == "__main__":
    try:
        for variable, value in build().items():
            print(f"export {variable}={value}")
    except Unavailable as error:
        sys.exit(str(error))
