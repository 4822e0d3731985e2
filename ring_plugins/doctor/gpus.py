"""Examine a host's GPUs: NCCL, torch, and their paths to each other, to network cards, and past main memory.

Paths are read from what the driver and the kernel say, without touching a GPU.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import DeviceError, RingError
from ring_plugins.core.base.install import pip_command
from ring_plugins.core.gpu import load_driver, load_nccl
from ring_plugins.core.gpu.library import NCCL_WHEELS
from ring_plugins.core.gpu.nccl import version_text
from ring_plugins.doctor.findings import Finding, error, fine, warning
from ring_plugins.doctor.installation import installed

#: The name of NVIDIA's kernel driver among the versions that ranks compare.
DRIVER = "NVIDIA driver"
#: How nvidia-smi calls paths that leave PCIe's switches: through the CPU, its host bridges, or from socket to socket.
THROUGH_THE_HOST = ("PHB", "NODE", "SYS")
#: Its names of paths, shortest first. NV18 stands for 18 NVLinks.
_ORDER = ("NV", "PIX", "PXB", *THROUGH_THE_HOST)
#: From this kernel on, network cards can reach GPU memory by DMA-BUF, if NVIDIA's open kernel modules are loaded.
_DMA_BUF_SINCE = (5, 12)


def nccl() -> Iterator[Finding]:
    """Find NCCL and its version, and wheels that overwrite each other's."""
    yield from conflicting_nccl({wheel: found for wheel in NCCL_WHEELS if (found := installed(wheel))})
    version, path = find_nccl()
    if version is not None:
        yield fine("NCCL", f"{version} from {path}", version=version, path=path)
        return
    if not gpu_names() and not config.NCCL_LIBRARY.is_set():
        yield fine("NCCL", "not needed: this host has no GPU")
        return
    yield error("NCCL", path, f"{pip_command('nccl')} adds it for CUDA 12, [nccl-cu13] for CUDA 13.")


def conflicting_nccl(wheels: Mapping[str, str]) -> Iterator[Finding]:
    """Warn if several of NVIDIA's wheels are installed: they own the same file, and the last one has overwritten it.

    Args:
        wheels: those installed, name -> version.
    """
    if len(wheels) > 1:
        names = " and ".join(f"{name} {version}" for name, version in wheels.items())
        yield warning(
            "NCCL",
            f"{names} are both installed and own one file, nvidia/nccl/lib/libnccl.so.2: one overwrote the other's",
            "Uninstall both, then reinstall the one that torch needs (`pip show torch` lists it; cu13 for CUDA 13).",
            wheels=dict(wheels),
        )


def find_nccl() -> tuple[str | None, str]:
    """Return the version and path of the NCCL that would be used, or None and the reason why there is none."""
    try:
        library = load_nccl()
    except RingError as problem:
        return None, str(problem)
    return version_text(library.version), library.path


def gpus() -> Iterator[Finding]:
    """List the GPUs, and check that torch was built for them."""
    names = gpu_names()
    yield fine("GPUs", "; ".join(names) or "none: ranks compute on CPUs", gpus=names)
    torch = installed("torch")
    if names and torch is not None and torch.endswith("+cpu"):
        yield warning("GPUs", f"torch {torch} was built without CUDA", "pip install torch, from the index with CUDA.")


def gpu_names() -> list[str]:
    """One line per GPU, as nvidia-smi prints it: "0, NVIDIA H100 80GB HBM3, 81559 MiB, 550.54.15".

    Where there is no nvidia-smi, as in some containers, those that the driver shows to this process: "0, 0000:1b:00.0".
    """
    listed = _nvidia_smi("--query-gpu=index,name,memory.total,driver_version", "--format=csv,noheader")
    if names := [line.strip() for line in listed.splitlines() if line.strip()]:
        return names
    try:
        driver = load_driver()
        return [f"{index}, {driver.bus_id(index)}" for index in range(driver.count())]
    except DeviceError:
        return []


def _nvidia_smi(*arguments: str) -> str:
    """What the tool prints; "" where it is missing or fails."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    done = subprocess.run([tool, *arguments], capture_output=True, text=True, timeout=30, check=False)
    return done.stdout if done.returncode == 0 else ""


def gpu_paths() -> Iterator[Finding]:
    """Check the paths between GPUs and from GPUs to RDMA network cards, where there are any."""
    matrix = read_matrix(_nvidia_smi("topo", "-m"))
    yield from check_matrix(matrix)
    if any(name.startswith("GPU") for name in matrix):
        cards = Path("/sys/class/infiniband")  # has one entry for each InfiniBand or RoCE card, such as "mlx5_0"
        yield from check_direct_rdma(
            sorted(card.name for card in cards.iterdir()) if cards.is_dir() else [],
            any(Path("/sys/module", module).exists() for module in ("nvidia_peermem", "nv_peer_mem")),
            _driver(),
            platform.release(),
        )


def _driver() -> str:
    version = Path("/proc/driver/nvidia/version")
    return version.read_text() if version.exists() else ""


def driver_version(text: str | None = None) -> str | None:
    """The release of NVIDIA's kernel driver, such as "570.86.15"; None if there is none.

    Args:
        text: of /proc/driver/nvidia/version; by default this host's.
    """
    found = re.search(r"\s(\d+\.\d+(\.\d+)?)\s", _driver() if text is None else text)
    return found and found[1]


def read_matrix(text: str) -> dict[str, dict[str, str]]:
    """What `nvidia-smi topo -m` prints, as device -> device -> kind of path.

    Devices are called "GPU0" and, for network cards, "NIC0" or "mlx5_0", as the driver does.
    """
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).split("\t") for line in text.splitlines()]
    header = next(([cell.strip() for cell in line] for line in lines if "GPU0" in map(str.strip, line[1:])), [])
    columns = [(place, name) for place, name in enumerate(header) if re.fullmatch(r"(GPU|NIC|mlx)\w*", name)]
    devices = {name for _, name in columns}
    found: dict[str, dict[str, str]] = {}
    for line in lines:
        name = line[0].strip()
        if name in devices:
            cells = [cell.strip() for cell in line] + [""] * len(header)
            found[name] = {other: cells[place] for place, other in columns if cells[place] not in ("", "X")}
    return found


def check_matrix(matrix: dict[str, dict[str, str]]) -> Iterator[Finding]:
    """Name pairs of GPUs, and GPUs and their nearest network cards, whose data goes through the host."""
    gpus = [name for name in matrix if name.startswith("GPU")]
    pairs = [
        (one, other, matrix[one][other])
        for place, one in enumerate(gpus)
        for other in gpus[place + 1 :]
        if matrix[one].get(other) in THROUGH_THE_HOST
    ]
    if pairs:
        listed = ", ".join(f"{one}-{other} ({kind})" for one, other, kind in pairs[:4])
        more = f" and {len(pairs) - 4} more" if len(pairs) > 4 else ""
        yield warning(
            "GPU paths",
            f"data between {listed}{more} goes through the host: these GPUs share neither NVLink nor a PCIe switch",
            "Choose GPUs that `nvidia-smi topo -m` shows as NV, PIX or PXB by CUDA_VISIBLE_DEVICES, if there are any; "
            "in a virtual machine ask for a PCIe topology that shows the switches.",
            pairs=pairs,
        )
    far = []
    for gpu in gpus:
        cards = {other: kind for other, kind in matrix[gpu].items() if other not in gpus}
        nearest = min(cards, key=lambda card: _distance(matrix[gpu][card]), default=None)
        if nearest is not None and cards[nearest] in THROUGH_THE_HOST:
            far.append((gpu, nearest, cards[nearest]))
    if far:
        listed = ", ".join(f"{gpu} ({card}, {kind})" for gpu, card, kind in far)
        yield warning(
            "GPU paths",
            f"the nearest network card is beyond the host for {listed}: NCCL may send through main memory",
            "Use GPUs and cards below one PCIe switch. NCCL_NET_GDR_LEVEL=SYS allows GPU Direct RDMA on such paths; "
            "measure whether it is faster.",
            paths=far,
        )
    if gpus and not pairs and not far:
        yield fine("GPU paths", f"{len(gpus)} GPU{'s' if len(gpus) > 1 else ''}, none of whose paths crosses the host")


def _distance(kind: str) -> int:
    """How far a kind of path is, nearest first; unknown kinds come last."""
    return next((place for place, start in enumerate(_ORDER) if kind.startswith(start)), len(_ORDER))


def check_direct_rdma(cards: Sequence[str], peermem: bool, driver: str, kernel: str) -> Iterator[Finding]:
    """Warn if network cards cannot read GPU memory themselves (GPU Direct RDMA), on a host with GPUs.

    Args:
        cards: the RDMA cards of this host.
        peermem: whether NVIDIA's module for them, nvidia-peermem, is loaded.
        driver: the text of /proc/driver/nvidia/version.
        kernel: the kernel's release, such as "5.15.0-91-generic".
    """
    if not cards:
        return
    numbers = re.match(r"(\d+)\.(\d+)", kernel)
    has_dma_buf = "Open Kernel Module" in driver and numbers is not None
    has_dma_buf = has_dma_buf and tuple(map(int, numbers.groups() if numbers else ())) >= _DMA_BUF_SINCE
    if peermem or has_dma_buf:
        yield fine("GPU Direct RDMA", f"possible by {'nvidia-peermem' if peermem else 'DMA-BUF'} on {', '.join(cards)}")
        return
    yield warning(
        "GPU Direct RDMA",
        f"missing: {', '.join(cards)} cannot read GPU memory, so NCCL copies all it sends through main memory",
        "modprobe nvidia-peermem, or install NVIDIA's open kernel modules on Linux 5.12 or newer (DMA-BUF).",
        cards=list(cards),
        kernel=kernel,
    )
