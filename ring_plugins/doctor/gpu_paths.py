"""Examine the paths of a host's GPUs: to each other, to its network cards, and past its main memory.

Everything is read from what the driver and the kernel say, without touching a GPU.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from ring_plugins.doctor.findings import Finding, fine, warning

#: The name of NVIDIA's kernel driver among the versions that ranks compare.
DRIVER = "NVIDIA driver"
#: How nvidia-smi calls paths that leave PCIe's switches: through the CPU, its host bridges, or from socket to socket.
THROUGH_THE_HOST = ("PHB", "NODE", "SYS")
#: Its names of paths, shortest first. NV18 stands for 18 NVLinks.
_ORDER = ("NV", "PIX", "PXB", *THROUGH_THE_HOST)
#: From this kernel on, network cards can reach GPU memory by DMA-BUF, if NVIDIA's open kernel modules are loaded.
_DMA_BUF_SINCE = (5, 12)


def gpu_paths() -> Iterator[Finding]:
    """Check the paths between GPUs and from GPUs to RDMA network cards, where there are any."""
    matrix = read_matrix(_topology())
    yield from check_matrix(matrix)
    if any(name.startswith("GPU") for name in matrix):
        yield from check_direct_rdma(
            rdma_cards(),
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


def _topology() -> str:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    done = subprocess.run([tool, "topo", "-m"], capture_output=True, text=True, timeout=30, check=False)
    return done.stdout if done.returncode == 0 else ""


def rdma_cards() -> list[str]:
    """Names of the InfiniBand and RoCE cards, such as "mlx5_0"."""
    cards = Path("/sys/class/infiniband")
    return sorted(card.name for card in cards.iterdir()) if cards.is_dir() else []


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
        nearest = min(cards, key=lambda card: _distance(cards[card]), default=None)
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
